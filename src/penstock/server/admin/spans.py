"""One OpenTelemetry span per request to the engine, under the caller's trace if it sent one (W3C Trace Context).

Name and attributes are vLLM's, and contain no text of a prompt or an answer. Where the time went is
`penstock.latency.*` in seconds; these parts sum to `gen_ai.latency.e2e`. The caller's `user` is `enduser.id`
(OpenTelemetry's semantic conventions), and each of its labels `penstock.metadata.NAME`. OpenTelemetry is optional, so
it is imported only when spans are wanted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.contract.measurements import PARTS
from penstock.server.delivery.observation import RequestRecord
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest

__all__ = ["Spans", "open_spans", "span_attributes"]

NAME = "llm_request"
OUR_FAULT = 500


class Spans:
    """An observer that records a span for each request that the engine serves.

    Args:
        provider: an OpenTelemetry SDK `TracerProvider`; ended by `close`.
        model: the served model's name; "" if there are several: a span then has the name that its request gave.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, provider: Any, model: str) -> None:
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("penstock")
        self._trace = _part("opentelemetry.trace")
        self._propagator = _part("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        """Record the span of a request that is over."""
        if record.parsed is None or record.outputs is None:
            return
        span = self._tracer.start_span(
            NAME,
            context=self._propagator.extract(record.trace_headers),
            kind=self._trace.SpanKind.SERVER,
            start_time=record.started_ns,
            attributes=span_attributes(record, record.parsed, record.outputs, self._model),
        )
        if record.status >= OUR_FAULT:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_time=record.started_ns + int(record.seconds * 1e9))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def span_attributes(
    record: RequestRecord, parsed: ParsedRequest, outputs: OutputStream, model: str
) -> dict[str, str | int | float | bool]:
    """The attributes of a span; times in seconds. The engine's counts and times appear only if it reported them."""
    request = parsed.requests[0]
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.id": parsed.id,
        "gen_ai.request.n": request.n,
        "gen_ai.request.temperature": float(request.sampling.get("temperature", 1.0)),
        "gen_ai.request.top_p": float(request.sampling.get("top_p", 1.0)),
        "gen_ai.response.model": model or parsed.model,
        "gen_ai.usage.num_sequences": parsed.num_choices,
        "gen_ai.latency.e2e": record.seconds,
        "http.route": record.route,
        "http.response.status_code": record.status,
    }
    if parsed.user:
        attributes["enduser.id"] = parsed.user
    attributes |= {f"penstock.metadata.{name}": label for name, label in parsed.metadata.items()}
    if request.stop.max_tokens:
        attributes["gen_ai.request.max_tokens"] = request.stop.max_tokens
    if not outputs.usage.prompt_tokens:
        return attributes
    usage, timings = outputs.usage, outputs.timings
    attributes |= {f"penstock.latency.{name}": getattr(record.parts, name) for name in PARTS if record.parts.total}
    attributes |= {f"penstock.latency.queue_for.{reason}": seconds for reason, seconds in record.parts.queue_for}
    return attributes | {
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.usage.cached_tokens": usage.cached_tokens,
        "gen_ai.latency.time_in_queue": timings.queue,
        "gen_ai.latency.time_to_first_token": timings.queue + timings.prefill,
        "gen_ai.latency.time_in_model_prefill": timings.prefill,
        "gen_ai.latency.time_in_model_decode": timings.decode,
        "gen_ai.latency.time_in_model_inference": timings.prefill + timings.decode,
    }


def open_spans(endpoint: str, model: str) -> Spans:
    """Spans that an OpenTelemetry thread sends to a collector over OTLP/HTTP, in batches.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    exporter = _part("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(endpoint=endpoint)
    resource = _part("opentelemetry.sdk.resources").Resource.create({"service.name": "penstock"})
    provider = _part("opentelemetry.sdk.trace").TracerProvider(resource=resource)
    provider.add_span_processor(_part("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
    return Spans(provider, model)


def _part(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        message = f"needs {name}, which is not installed: pip install 'penstock[otel]'"
        raise ConfigError("otlp_traces_endpoint", message) from error
