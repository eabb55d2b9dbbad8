"""`GET /metrics`: the engine's measurements in Prometheus' formats, under vLLM's names, labels and bounds.

Only HTTP requests and refusals are counted here. The engine publishes plain numbers, and a scrape turns the newest into
samples. Each application has its own registry; there is no global state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.contract.errors import RefusalCause
from penstock.contract.measurements import AdaptersInUse, AnswerCacheUse, Histogram, Measurements
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.ports import EngineClient
from penstock.server.delivery.observation import RequestRecord
from penstock.server.http.route import Route

__all__ = [
    "ANSWER_CACHE_COUNTERS",
    "COUNTERS",
    "EVENT_OUTCOMES",
    "GAUGES",
    "HISTOGRAMS",
    "LABELS",
    "STORE_OUTCOMES",
    "EngineMetrics",
    "RequestCounter",
    "ServerMetrics",
    "routes",
]

LABELS = ("model_name", "engine")
ENGINE = "0"
"""vLLM numbers its engines; here a server has one."""

GAUGES = {
    "vllm:num_requests_running": ("running", "Sequences that hold a slot."),
    "vllm:num_requests_waiting": ("waiting", "Sequences that wait for a slot or for KV blocks."),
    "penstock:kv_store_bytes": ("store_bytes", "Bytes of the disk that the store of KV blocks takes."),
}
"""Metric -> (field of `Measurements`, help text)."""

COUNTERS = {
    "vllm:num_preemptions": ("preemptions", "Times that a sequence lost its KV blocks to another."),
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of sequences that have their first token."),
    "vllm:prompt_tokens_cached": ("cached_tokens", "Those of them that the prefix cache had."),
    "vllm:generation_tokens": ("generated_tokens", "Tokens generated."),
    "vllm:prefix_cache_queries": ("query_tokens", "Tokens that admissions asked the prefix cache for."),
    "vllm:prefix_cache_hits": ("hit_tokens", "Those of them that it had."),
    "vllm:external_prefix_cache_queries": ("sought_tokens", "Tokens that were looked for in the store of KV blocks."),
    "vllm:external_prefix_cache_hits": ("restored_tokens", "Those of them that were read from there."),
    "penstock:cancelled_tokens_wasted": ("wasted_tokens", "Tokens generated for sequences that were aborted."),
    "penstock:engine_steps": ("steps", "Steps planned."),
    "penstock:engine_steps_failed": ("failed_steps", "Steps that failed as a whole and were computed again."),
    "penstock:runners_lost": ("lost_runners", "Processes that computed and are gone, each followed by another."),
}

ANSWER_CACHE_BYTES = "Bytes of the answers in the answer cache, of all models together."
ANSWER_CACHE_COUNTERS = {
    "penstock:answer_cache_queries": ("queries", "Requests whose answer was looked for in the answer cache."),
    "penstock:answer_cache_hits": ("hits", "Those of them that were answered out of it."),
    "penstock:answer_cache_evictions": ("evicted", "Answers that made room for others, of all models together."),
}

STORE_OUTCOMES = ("written", "dropped", "failed", "damaged", "evicted")
EVENT_OUTCOMES = ("published", "dropped")

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": ("inter_token_latency", "Between two tokens of one sequence."),
    "vllm:request_time_per_output_token_seconds": ("time_per_output_token", "Mean time between a sequence's tokens."),
    "vllm:e2e_request_latency_seconds": ("e2e_latency", "From arrival to the end."),
    "vllm:request_queue_time_seconds": ("queue_time", "From arrival to admission."),
    "vllm:request_prefill_time_seconds": ("prefill_time", "From admission to the first token."),
    "vllm:request_decode_time_seconds": ("decode_time", "From the first token to the last."),
    "vllm:request_inference_time_seconds": ("inference_time", "From admission to the last token."),
    "vllm:request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a sequence."),
    "vllm:request_generation_tokens": ("request_generation_tokens", "Tokens generated of a sequence."),
    "vllm:request_params_n": ("request_choices", "Choices asked for."),
    "vllm:request_params_max_tokens": ("request_max_tokens", "Most tokens that a sequence may have generated."),
    "vllm:request_max_num_generation_tokens": ("request_longest_choice", "Tokens of the longest choice of a request."),
    "vllm:request_num_preemptions": ("request_preemptions", "Times that a sequence was preempted."),
    "vllm:request_prefill_kv_computed_tokens": ("request_computed_tokens", "Prompt tokens that were not cached."),
    "vllm:iteration_tokens_total": ("step_tokens", "Tokens computed in one step."),
    "penstock:step_time_error": ("step_time_error", "Error of a step's expected time, as a share of its time."),
}


class RequestCounter:
    """An observer that counts HTTP requests, and refusals by cause. Confined to the event loop."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.refusals = dict.fromkeys(RefusalCause, 0)

    def __call__(self, record: RequestRecord) -> None:
        """Count one request by declared route, method and status class."""
        self.counts[record.route, record.method, f"{record.status // 100}xx"] += 1
        if record.refused is not None:
            self.refused(record.refused)

    def refused(self, cause: RefusalCause) -> None:
        """Count one refusal."""
        self.refusals[cause] += 1


class ServerMetrics(Collector):
    """Turns the counts of HTTP requests into Prometheus metrics at each scrape.

    Args:
        requests: the counter.
        model_name: the model that labels refusals; None if the server has several.
    """

    def __init__(self, requests: RequestCounter, model_name: str | None = None) -> None:
        self._requests = requests
        self._labels = {} if model_name is None else dict(zip(LABELS, (model_name, ENGINE), strict=True))

    def collect(self) -> Iterator[Metric]:
        """Yield both metrics."""
        text = "Requests refused, by the bound that they met."
        refused = CounterMetricFamily("penstock:requests_refused", text, labels=(*self._labels, "reason"))
        for cause, count in self._requests.refusals.items():
            refused.add_metric((*self._labels.values(), cause.value), count)
        yield refused
        text = "HTTP requests answered."
        answered = CounterMetricFamily("http_requests", text, labels=("handler", "method", "status"))
        for labels, count in sorted(self._requests.counts.items()):
            answered.add_metric(labels, count)
        yield answered


class EngineMetrics(Collector):
    """Turns an engine's newest measurements into Prometheus metrics at each scrape."""

    def __init__(self, client: EngineClient, model_name: str, memory: MemoryBudget) -> None:
        self._client = client
        self._memory = memory
        self._labels = (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        measured = self._client.measurements()
        yield from self._gauges(measured)
        yield from self._counters(measured)
        yield from self._labelled_counters(measured)
        if measured.answer_cache is not None:
            yield from self._answer_cache(measured.answer_cache)
        for name, (source, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=LABELS)
            histogram: Histogram = getattr(measured, source)
            family.add_metric(self._labels, _buckets(histogram), histogram.total)
            yield family
        yield from self._stores()

    def _gauges(self, measured: Measurements) -> Iterator[Metric]:
        for name, (source, text) in GAUGES.items():
            yield self._gauge(name, text, getattr(measured, source))
        used = 1 - measured.free_blocks / measured.total_blocks
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences hold, 0 to 1.", used)
        # The field's name is vLLM's; the blocks are wherever the model runs.
        labels = {
            "block_size": str(measured.block_size),
            "num_gpu_blocks": str(measured.total_blocks),
            "enable_prefix_caching": str(measured.prefix_caching),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache.", labels=(*LABELS, *labels))
        info.add_metric((*self._labels, *labels.values()), 1)
        yield info
        if measured.adapters is not None:
            yield _adapters_info(measured.adapters)
        if measured.answer_cache is not None:
            yield self._gauge("penstock:answer_cache_bytes", ANSWER_CACHE_BYTES, measured.answer_cache.bytes)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, measured: Measurements) -> Iterator[Metric]:
        for name, (source, text) in COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, getattr(measured, source))
            yield family

    def _answer_cache(self, used: AnswerCacheUse) -> Iterator[Metric]:
        for name, (source, text) in ANSWER_CACHE_COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, getattr(used, source))
            yield family

    def _labelled_counters(self, measured: Measurements) -> Iterator[Metric]:
        sources = (
            ("local_compute", measured.prompt_tokens - measured.cached_tokens),
            ("local_cache_hit", measured.cached_tokens),
        )
        text = "Prompt tokens of sequences that have their first token, by where their KV came from."
        yield self._by("vllm:prompt_tokens_by_source", text, "source", sources)
        yield self._by("vllm:request_success", "Sequences that ended, by how.", "finished_reason", measured.finished)
        drafts = measured.drafts
        rows = [(drafter, count.rows) for drafter, count in drafts]
        yield self._by("vllm:spec_decode_num_drafts", "Rows of steps that carried guesses.", "drafter", rows)
        tokens = [(drafter, count.tokens) for drafter, count in drafts]
        yield self._by("vllm:spec_decode_num_draft_tokens", "Tokens guessed and computed.", "drafter", tokens)
        accepted = [(drafter, count.accepted) for drafter, count in drafts]
        yield self._by("vllm:spec_decode_num_accepted_tokens", "Those of them that were right.", "drafter", accepted)
        outcomes = tuple((each, getattr(measured, f"store_{each}")) for each in STORE_OUTCOMES)
        text = "KV blocks that were to be kept in files, by what became of them."
        yield self._by("penstock:kv_store_blocks", text, "outcome", outcomes)
        batches = tuple((each, getattr(measured, f"events_{each}")) for each in EVENT_OUTCOMES)
        text = "Batches of KV events, by what became of them."
        yield self._by("penstock:kv_event_batches", text, "outcome", batches)
        rejections = (("queue_full", measured.rejections),)
        yield self._by("vllm:admission_rejections", "Requests refused on arrival, by why.", "reason", rejections)

    def _by(self, name: str, text: str, label: str, counts: Sequence[tuple[str, int]]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for value, count in counts:
            family.add_metric((*self._labels, value), count)
        return family

    def _stores(self) -> Iterator[Metric]:
        text = "Bytes that the server keeps for its clients, by store."
        family = GaugeMetricFamily("penstock:memory_bytes", text, labels=(*LABELS, "store"))
        for store, size in self._memory.taken():
            family.add_metric((*self._labels, store), size)
        yield family
        yield self._gauge("penstock:memory_limit_bytes", "The most that they may be together.", self._memory.limit)


def _adapters_info(used: AdaptersInUse) -> Metric:
    """Which adapters are in use, as labels; as in vLLM, the value is the time, so the newest sample is the present."""
    labels = {
        "max_lora": str(used.most),
        "waiting_lora_adapters": ",".join(used.waiting),
        "running_lora_adapters": ",".join(used.running),
    }
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of sequences that wait or run.", labels=tuple(labels))
    info.add_metric(tuple(labels.values()), time.time())
    return info


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(bound, number of values up to it) for each bound: cumulative, as in Prometheus."""
    bounds = [*(str(edge) for edge in histogram.edges), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def routes(*collectors: Collector) -> tuple[Route, ...]:
    """`GET /metrics`, with what these collectors yield at each scrape."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    described = {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    async def metrics(http_request: Request) -> Response:
        """What the engine measured, for Prometheus; in OpenMetrics if the scraper asks for it."""
        encode, content_type = choose_encoder(http_request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return (Route("GET", "/metrics", metrics, {200: described}),)
