"""What the log, the counter and the spans say about a finished request. Never what it said."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import ClassVar

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from scripted_engine import ScriptedEngine, Wait, always, delta, failed, stop
from server_harness import CARD, LIMITS

from penstock.contract.errors import ConfigError, EngineDead
from penstock.contract.events import RequestFinished, Usage
from penstock.contract.measurements import PARTS, LatencyParts, Timings
from penstock.contract.request import EngineRequest, TextPrompt
from penstock.contract.server_config import ServerConfig
from penstock.server import create_app
from penstock.server.admin.request_log import JsonLines, TextLines, configure_logging, log_request, request_fields
from penstock.server.admin.spans import Spans, open_spans
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.observation import RequestRecord
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.run import Server

SECRET = "the prompt that nobody may read"
LIFE = Timings(arrived=10.0, admitted=10.5, first_token=11.0, last_token=13.0, ended=13.0)
TIMED = always(delta("Hel"), delta("lo"), stop(), RequestFinished(Usage(9, 2, 4), LIFE))
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Watched:
    """A server whose every request is kept on record."""

    http: httpx.Client
    engine: ScriptedEngine
    records: list[RequestRecord]
    exporter: InMemorySpanExporter
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def record(self) -> RequestRecord:
        """The next record, which is written just after the answer's last byte."""
        assert self.came.acquire(timeout=5)
        return self.records[-1]

    def chat(self, text: str = SECRET, headers: dict[str, str] | None = None, **fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "user": "somebody"} | fields
        return self.http.post("/v1/chat/completions", json=body, headers=headers)


def breaking(record: RequestRecord) -> None:
    if record.id == "break":
        raise ValueError("an observer's own mistake")


@pytest.fixture(scope="module")
def _watched() -> Iterator[tuple[str, Watched]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans, engine = Spans(provider, CARD.name), ScriptedEngine()
    watched = Watched(httpx.Client(), engine, [], exporter)

    def keep(record: RequestRecord) -> None:
        watched.records.append(record)
        watched.came.release()

    ready, urls = threading.Event(), []
    app = create_app(engine, CARD, LIMITS, observers=[spans, log_request, breaking, keep])
    server = Server(app, ServerConfig(port=0), lambda url: (urls.append(url), ready.set()), 1)
    thread = threading.Thread(target=lambda: asyncio.run(server.listen()))
    thread.start()
    assert ready.wait(10)
    yield urls[0], watched
    watched.http.close()
    server.stop()
    thread.join(10)
    spans.close()


@pytest.fixture
def watched(_watched) -> Iterator[Watched]:
    url, watched = _watched
    watched.engine.reset()
    watched.records.clear()
    watched.exporter.clear()
    watched.came = threading.Semaphore(0)
    with httpx.Client(base_url=url, timeout=10) as watched.http:
        yield watched


def test_an_answered_request_is_told_with_its_counts_and_times(watched):
    watched.engine.script = TIMED
    answer = watched.chat(headers={"x-request-id": "my-id.7"})
    fields = request_fields(watched.record())
    assert 0 < fields.pop("ms") < 10_000
    assert fields == {
        "id": "my-id.7",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "complete": True,
        "answer": answer.json()["id"],
        "stream": False,
        "prompts": 1,
        "choices": 1,
        "sent_tokens": 2,
        "finish_reasons": "stop",
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "completion_tokens": 2,
        "queue_ms": 500.0,
        "prefill_ms": 500.0,
        "decode_ms": 2000.0,
    }
    assert answer.headers["x-request-id"] == "my-id.7"


def test_a_request_without_an_id_is_logged_under_the_one_it_was_given(watched):
    answer = watched.chat()
    assert watched.record().id == answer.headers["x-request-id"]


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_no_line_holds_what_a_caller_wrote(watched, caplog, formatter):
    caplog.set_level(logging.INFO, "penstock")
    watched.chat(stop=["halt-word"], metadata={"key": "label-text"})
    watched.record()
    watched.chat(unknown_field=SECRET)
    watched.record()
    watched.http.get(f"/no/such/{SECRET}", headers={"x-request-id": "bad id!"})
    watched.record()
    lines = [formatter.format(record) for record in caplog.records if record.name == "penstock.request"]
    assert len(lines) == 3
    for line in lines:
        for text in (SECRET, "Hel", "halt-word", "label-text", "somebody", "no/such", "bad id"):
            assert text not in line
        assert "\n" not in line


def test_refused_and_unrouted_requests_are_told_too(watched):
    watched.chat(temperature=-1)
    record = watched.record()
    assert (record.status, record.route, record.parsed) == (400, "/v1/chat/completions", None)
    watched.http.get("/nowhere")
    record = watched.record()
    assert (record.status, record.route, record.method) == (404, "none", "GET")
    watched.http.get("/v1/models/acme/tiny-1")
    assert watched.record().route == "/v1/models/{model_id:path}"
    watched.http.request("BREW", "/v1/models")
    assert watched.record().method == "OTHER"


def test_a_client_that_left_is_on_record_with_what_it_got(watched):
    watched.engine.script = always(delta("x"), delta("y"), Wait())
    with watched.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as answer:
        next(answer.iter_bytes())
        watched.engine.wait_until(lambda: watched.engine.yielded == 2)
    record = watched.record()
    assert (record.status, record.complete) == (200, False)
    assert record.outputs is not None
    assert record.outputs.sent_tokens >= 1
    assert "prompt_tokens" not in request_fields(record)


def test_a_client_that_left_before_any_answer_is_a_499(watched):
    watched.engine.script = always(Wait())
    with pytest.raises(httpx.ReadTimeout):
        watched.http.post("/v1/completions", json={"prompt": "Hi"}, timeout=0.2)
    record = watched.record()
    assert (record.status, record.complete) == (499, False)


def test_monitoring_is_logged_only_when_it_goes_wrong(watched, caplog):
    caplog.set_level(logging.INFO, "penstock.request")
    watched.http.get("/health")
    watched.record()
    assert not caplog.records
    watched.engine.state = replace(watched.engine.state, alive=False, reason="broken")
    watched.http.get("/health")
    watched.record()
    assert [record.fields["status"] for record in caplog.records] == [503]


def test_scrapes_are_counted_by_route_and_never_by_what_callers_invent(watched):
    for path in ("/v1/models/acme/tiny-1", "/v1/models/no-such", "/a", "/b", "/metrics"):
        watched.http.get(path)
        watched.record()
    lines = [each for each in watched.http.get("/metrics").text.splitlines() if each.startswith("http_requests_total")]
    watched.record()
    handlers = {each.split('handler="')[1].split('"')[0] for each in lines}
    assert {"/v1/models/{model_id:path}", "/metrics", "none"} <= handlers
    assert not {handler for handler in handlers if "no-such" in handler or handler in ("/a", "/b")}


def test_a_span_is_told_what_the_record_holds_and_joins_the_callers_trace(watched):
    watched.engine.script = TIMED
    header = f"00-{TRACE}-{PARENT}-01"
    answer = watched.chat(headers={"traceparent": header}, temperature=0.5, top_p=0.9, max_tokens=7)
    record = watched.record()
    (span,) = watched.exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    assert span.end_time - span.start_time == int(record.seconds * 1e9)
    assert dict(span.attributes) == {
        "gen_ai.request.id": answer.json()["id"],
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.response.model": CARD.name,
        "enduser.id": "somebody",
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 9,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.usage.cached_tokens": 4,
        "gen_ai.latency.e2e": record.seconds,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }


def test_a_trace_that_is_not_sampled_stays_so_and_a_broken_one_is_not_joined(watched):
    watched.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    watched.record()
    assert not watched.exporter.get_finished_spans()
    watched.chat(headers={"traceparent": "00-nonsense"})
    watched.record()
    (span,) = watched.exporter.get_finished_spans()
    assert span.parent is None


def test_failures_of_ours_are_errors_in_the_trace_and_callers_mistakes_are_no_spans(watched):
    watched.engine.script = always(failed())
    watched.chat()
    watched.record()
    watched.engine.script = always(EngineDead("gone"))
    watched.chat()
    watched.record()
    watched.chat(temperature=9)
    watched.record()
    watched.http.get("/v1/models")
    watched.record()
    spans = watched.exporter.get_finished_spans()
    assert [span.attributes["http.response.status_code"] for span in spans] == [500, 503]
    assert all(span.status.status_code is StatusCode.ERROR for span in spans)


def test_without_the_packages_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint.*penstock\[otel\]"):
        open_spans("http://127.0.0.1:4318/v1/traces", "m")


class Collector(InMemorySpanExporter):
    """Stands for the OTLP exporter, which the tests do not install."""

    made: ClassVar[list[Collector]] = []

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.made.append(self)


def test_spans_go_to_the_endpoint_and_closing_sends_what_is_left(monkeypatch):
    module = ModuleType("trace_exporter")
    module.OTLPSpanExporter = Collector
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", module)
    spans = open_spans("http://collector:4318/v1/traces", "acme/tiny-1")
    parsed = ParsedRequest("cmpl-1", (EngineRequest("cmpl-1", TextPrompt(SECRET)),))
    outputs = OutputStream(LiveRequests(ScriptedEngine(), 0), parsed)
    spans(RequestRecord("r", "POST", "/v1/completions", 200, True, 1_000, 0.5, parsed, outputs, {}))
    spans.close()
    (collector,) = Collector.made
    (span,) = collector.get_finished_spans()
    assert collector.endpoint == "http://collector:4318/v1/traces"
    assert span.resource.attributes["service.name"] == "penstock"
    assert SECRET not in span.to_json()
    assert "gen_ai.usage.prompt_tokens" not in span.attributes  # the engine gave no account


def test_an_observer_that_fails_harms_neither_the_request_nor_the_other_observers(watched, caplog):
    assert watched.chat(headers={"x-request-id": "break"}).status_code == 200
    assert watched.record().id == "break"
    assert [record.getMessage() for record in caplog.records] == ["an observer failed"]


def test_json_lines_are_json_whatever_they_hold():
    record = logging.LogRecord("penstock.x", logging.WARNING, "", 0, 'said "%s"\n', ("hm",), None)
    record.fields = {"n": 1, "none": None}
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told == {"level": "warning", "logger": "penstock.x", "message": 'said "hm"\n', "n": 1, "none": None}


def test_text_lines_escape_what_would_forge_another_line():
    record = logging.LogRecord("penstock.x", logging.INFO, "", 0, "one\ntwo\x1b[31m", (), None)
    record.fields = {"flag": True, "empty": ""}
    line = TextLines().format(record)
    assert line.endswith(r"penstock.x: one\ntwo\x1b[31m flag=true empty=-")


@pytest.fixture
def _logging_as_before():
    names = ("penstock", "uvicorn")
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).level) for name in names}
    yield
    for name, (handlers, level) in before.items():
        logging.getLogger(name).handlers[:] = handlers
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("_logging_as_before")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_failures_keep_their_trace_in_either_format(log_format, capsys):
    configure_logging(log_format)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("penstock.engine").exception("step failed")
    said = capsys.readouterr().err
    assert "step failed" in said
    assert "ValueError: broken" in (json.loads(said)["exception"] if log_format == "json" else said)


@pytest.mark.usefixtures("_logging_as_before")
def test_configuring_twice_writes_each_line_once(capsys):
    configure_logging("text")
    configure_logging("json")
    logging.getLogger("penstock.x").warning("once")
    logging.getLogger("uvicorn.error").warning("once")
    logging.getLogger("uvicorn.error").info("never")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["once", "once"]


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="log_format"):
        ServerConfig(log_format="xml")


def test_a_span_says_on_whose_behalf_and_with_what_labels(watched):
    watched.chat(metadata={"ticket": "label-text"})
    watched.record()
    attributes = watched.exporter.get_finished_spans()[-1].attributes
    assert attributes["enduser.id"] == "somebody"
    assert attributes["penstock.metadata.ticket"] == "label-text"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "metadata": {"user_id": "u7"}},
        ),
        ("/v1/responses", {"input": "Hi", "safety_identifier": "u7"}),
        ("/v1/embeddings", {"input": "Hi", "user": "u7"}),
        ("/v1/completions", {"prompt": "Hi", "user": "u7"}),
        ("/generate", {"prompt": "Hi", "user": "u7"}),
    ],
)
def test_every_endpoint_says_on_whose_behalf(watched, path, fields):
    assert watched.http.post(path, json=fields).status_code == 200
    watched.record()
    assert watched.exporter.get_finished_spans()[-1].attributes["enduser.id"] == "u7"


def test_a_span_has_the_parts_of_its_time_and_they_sum_to_it(watched):
    parts = LatencyParts(
        queue=0.5, queue_for=(("no_slot", 0.5),), other_prompts=0.25, decode=2.0, behind=("another/0",)
    )
    life = Timings(1.0, 1.5, 2.0, 3.75, 3.75, parts=parts)  # by another clock than the server's
    watched.engine.script = always(delta("Hi"), stop(), RequestFinished(Usage(9, 2), life))
    watched.chat()
    record = watched.record()
    (span,) = watched.exporter.get_finished_spans()
    told = {
        name.removeprefix("penstock.latency."): value
        for name, value in span.attributes.items()
        if name.startswith("penstock.latency.")
    }
    assert told.pop("queue_for.no_slot") == 0.5
    assert set(told) == set(PARTS)
    assert (told["queue"], told["other_prompts"], told["decode"]) == (0.5, 0.25, 2.0)
    assert sum(told.values()) == pytest.approx(max(record.seconds, parts.total))
    assert "another" not in span.to_json()
