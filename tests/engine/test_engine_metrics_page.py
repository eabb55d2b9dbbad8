"""`/metrics` over a real engine, stepped by hand on a simulated clock: every sample is computed here by hand."""

from __future__ import annotations

import asyncio

import httpx
from engine_harness import build
from prometheus_client.parser import text_string_to_metric_families
from test_engine_metrics_collector import timed

from penstock.contract.errors import RefusalCause
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import ModelCard
from penstock.server import create_app
from penstock.server.admin.metrics import COUNTERS, EVENT_OUTCOMES, GAUGES, HISTOGRAMS, STORE_OUTCOMES

CARD = ModelCard("acme/tiny-1", 0, 128, 32, True)
MODEL = {"model_name": "acme/tiny-1", "engine": "0"}


class Shown:
    """As much of a client as a scrape needs."""

    def __init__(self, harness) -> None:
        self.measurements = harness.engine.measurements
        self.health = harness.engine.health

    def check_queue(self, tenant: str) -> None:
        raise AssertionError(f"nobody asks for room, and {tenant!r} did")


def scrape(app, accept: str = "") -> httpx.Response:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.get("/metrics", headers={"accept": accept} if accept else {})

    return asyncio.run(get())


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if MODEL.get(key) != value}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


STORES = ("requests", "resumable_streams", "stored_completions", "stored_responses")
"""What an application keeps without a client that keeps grammars and output."""


def scripted_run():
    """Three requests: one answered after 2.5 s in the queue, one that finds 8 tokens of its prompt, one aborted."""
    harness = timed(max_num_seqs=2)
    harness.submit("abcdefghij", max_tokens=4)
    harness.clock.advance(2.5)
    harness.run()  # 4 steps: instants 2.5, then tokens at 3.5, 4.5, 5.5, 6.5
    harness.submit("abcdefghij", n=2, max_tokens=2)
    harness.run()  # 2 steps: tokens at 7.5 and 8.5
    doomed = harness.submit("zyxwv", max_tokens=9)
    waiting = harness.submit("q", n=2, max_tokens=9)
    harness.step()
    harness.step()
    harness.collect(harness.engine.abort(doomed))
    assert waiting in harness.outputs
    return harness


def test_every_gauge_and_counter_is_what_the_run_did():
    harness = scripted_run()
    harness.engine.metrics.rejected()
    found = samples(scrape(create_app(Shown(harness), CARD, DEFAULT_LIMITS)).text)
    plain = {
        name: value for (name, labels), value in found.items() if not labels and not name.endswith(("_sum", "_count"))
    }
    held = harness.engine.health()
    assert plain == {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 1,
        "vllm:kv_cache_usage_perc": 1 - held.free_blocks / 64,
        "vllm:num_preemptions_total": 0,
        "vllm:prompt_tokens_total": 10 + 2 * 10 + 5 + 1,
        "vllm:prompt_tokens_cached_total": 8 + 8,
        "vllm:generation_tokens_total": 4 + 2 * 2 + 2 + 2,
        "vllm:prefix_cache_queries_total": 10 + 2 * 10 + 5 + 1,
        "vllm:prefix_cache_hits_total": 8 + 8,
        "penstock:cancelled_tokens_wasted_total": 2,
        "penstock:engine_steps_total": 4 + 2 + 2,
        "penstock:engine_steps_failed_total": 0,
        "penstock:runners_lost_total": 0,
        "penstock:kv_store_bytes": 0,
        "vllm:external_prefix_cache_queries_total": 0,
        "vllm:external_prefix_cache_hits_total": 0,
        "penstock:memory_limit_bytes": MemoryBudget().limit,
    }
    labelled = {key: value for key, value in found.items() if key[1] and "le" not in dict(key[1])}
    config = (("block_size", "4"), ("enable_prefix_caching", "True"), ("num_gpu_blocks", "64"))
    assert labelled == {
        ("vllm:cache_config_info", config): 1,
        ("vllm:prompt_tokens_by_source_total", (("source", "local_compute"),)): 20,
        ("vllm:prompt_tokens_by_source_total", (("source", "local_cache_hit"),)): 16,
        ("vllm:request_success_total", (("finished_reason", "stop"),)): 0,
        ("vllm:request_success_total", (("finished_reason", "length"),)): 3,
        ("vllm:request_success_total", (("finished_reason", "repetition"),)): 0,
        ("vllm:request_success_total", (("finished_reason", "tool_calls"),)): 0,
        ("vllm:request_success_total", (("finished_reason", "abort"),)): 1,
        ("vllm:request_success_total", (("finished_reason", "error"),)): 0,
        ("vllm:admission_rejections_total", (("reason", "queue_full"),)): 1,
        **{("penstock:kv_store_blocks_total", (("outcome", outcome),)): 0 for outcome in STORE_OUTCOMES},
        **{("penstock:kv_event_batches_total", (("outcome", outcome),)): 0 for outcome in EVENT_OUTCOMES},
        **{("penstock:memory_bytes", (("store", store),)): 0 for store in STORES},
        **{("penstock:requests_refused_total", (("reason", cause.value),)): 0 for cause in RefusalCause},
    }


def test_every_histogram_is_what_the_run_did():
    found = samples(scrape(create_app(Shown(scripted_run()), CARD, DEFAULT_LIMITS)).text)
    count, wrong = (found[f"penstock:step_time_error_{part}", ()] for part in ("count", "sum"))
    assert count == 7  # of eight steps; nothing was expected of the first
    assert 0 < wrong < 1
    names = HISTOGRAMS.keys() - {"penstock:step_time_error"}
    totals = {name: (found[f"{name}_count", ()], found[f"{name}_sum", ()]) for name in names}
    assert totals == {
        "vllm:time_to_first_token_seconds": (3, 3.5 + 1 + 1),
        "vllm:inter_token_latency_seconds": (7, 7.0),  # 3 in the first, one in each of two, one each in the last two
        "vllm:request_time_per_output_token_seconds": (3, 3.0),
        "vllm:e2e_request_latency_seconds": (3, 6.5 + 2 + 2),
        "vllm:request_queue_time_seconds": (3, 2.5),
        "vllm:request_prefill_time_seconds": (3, 3.0),
        "vllm:request_decode_time_seconds": (3, 3 + 1 + 1),
        "vllm:request_inference_time_seconds": (3, 4 + 2 + 2),
        "vllm:request_prompt_tokens": (3, 30),
        "vllm:request_generation_tokens": (3, 8),
        "vllm:request_params_n": (2, 3),
        "vllm:request_params_max_tokens": (3, 8),
        "vllm:request_max_num_generation_tokens": (2, 6),
        "vllm:request_num_preemptions": (3, 0),
        "vllm:request_prefill_kv_computed_tokens": (3, 14),
        "vllm:iteration_tokens_total": (8, 10 + 3 + 2 * 2 + 2 + 5 + 1 + 2),
    }
    bucket = "vllm:time_to_first_token_seconds_bucket"
    ttft = {float(dict(labels)["le"]): value for (name, labels), value in found.items() if name == bucket}
    assert (ttft[0.75], ttft[1.0], ttft[2.5], ttft[5.0], ttft[float("inf")]) == (0, 2, 2, 3, 3)


def test_names_labels_and_bounds_are_vllms():
    text = scrape(create_app(Shown(build()), CARD, DEFAULT_LIMITS)).text
    assert 'vllm:num_requests_running{engine="0",model_name="acme/tiny-1"} 0.0' in text
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="acme/tiny-1"} 0.0' in text
    assert 'vllm:e2e_request_latency_seconds_bucket{engine="0",le="7680.0",model_name="acme/tiny-1"} 0.0' in text
    assert 'vllm:iteration_tokens_total_bucket{engine="0",le="16384.0",model_name="acme/tiny-1"} 0.0' in text
    assert 'vllm:request_prompt_tokens_bucket{engine="0",le="100.0",model_name="acme/tiny-1"} 0.0' in text


def test_every_metric_has_help_and_a_type_of_its_own():
    families = list(text_string_to_metric_families(scrape(create_app(Shown(build()), CARD, DEFAULT_LIMITS)).text))
    assert all(family.documentation for family in families)
    kinds = {family.name: family.type for family in families}
    assert all(kinds[name] == "histogram" for name in HISTOGRAMS)
    assert all(kinds[name] == "counter" for name in COUNTERS)
    assert all(kinds[name] == "gauge" for name in GAUGES)


def test_two_applications_in_one_process_share_nothing():
    busy, idle = scripted_run(), build()
    apps = [create_app(Shown(harness), CARD, DEFAULT_LIMITS) for harness in (busy, idle)]
    for app in apps:
        scrape(app)
    first, second = (samples(scrape(app).text) for app in apps)
    assert first["vllm:generation_tokens_total", ()] == 12
    assert second["vllm:generation_tokens_total", ()] == 0
    scraped = ("http_requests_total", (("handler", "/metrics"), ("method", "GET"), ("status", "2xx")))
    assert first[scraped] == second[scraped] == 1


def test_open_metrics_is_spoken_to_those_who_ask_for_it():
    answer = scrape(
        create_app(Shown(build()), CARD, DEFAULT_LIMITS), accept="application/openmetrics-text; version=1.0.0"
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
