"""What gateways read of `/metrics`, as they read it."""

from __future__ import annotations

from dataclasses import dataclass

from engine_harness import build
from prometheus_client.parser import text_string_to_metric_families
from test_engine_metrics_page import CARD, Shown, scrape

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.server import create_app


@dataclass
class EndpointMetrics:
    """What the endpoint picker of the Gateway API Inference Extension keeps of one model server."""

    queued: int = -1
    running: int = -1
    kv_usage: float = -1.0
    block_size: int = -1
    num_blocks: int = -1


def picked(text: str) -> EndpointMetrics:
    """Read a page as the extension's scraper does (its proposal 003): gauges by name, the newest of several series;
    sizes from the labels of an info metric. It refuses a page on which a name has no family or a family no series."""
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def newest(name: str):
        family = families[name]
        assert family.type == "gauge"
        return max(family.samples, key=lambda sample: sample.timestamp or 0)

    sizes = newest("vllm:cache_config_info").labels
    return EndpointMetrics(
        int(newest("vllm:num_requests_waiting").value),
        int(newest("vllm:num_requests_running").value),
        newest("vllm:kv_cache_usage_perc").value,
        int(sizes["block_size"]),
        int(sizes["num_gpu_blocks"]),
    )


def test_a_gateway_can_pick_an_endpoint_by_them():
    harness = build()
    idle = picked(scrape(create_app(Shown(harness), CARD, DEFAULT_LIMITS)).text)
    assert idle == EndpointMetrics(0, 0, 0.0, 4, 64)
    for _ in range(10):
        harness.submit("abcdefgh", max_tokens=20)
    harness.step()
    busy = picked(scrape(create_app(Shown(harness), CARD, DEFAULT_LIMITS)).text)
    stats = harness.engine.health()
    assert (busy.queued, busy.running) == (stats.waiting, stats.running)
    assert busy.queued + busy.running == 10
    assert busy.running > 0
    assert 0 < busy.kv_usage == 1 - stats.free_blocks / 64 < 1
