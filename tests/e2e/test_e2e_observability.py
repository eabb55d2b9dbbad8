"""What the default server tells of one real request: in its answer, in `/metrics`, and in its log."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from served import PATIENCE, serve

pytestmark = pytest.mark.model
SECRET = "Xylophones are my secret"


def metrics(url: str) -> dict[str, float]:
    return {each.name: each.value for each in samples(url)}


def kept(url: str) -> dict[str, float]:
    """Bytes by store."""
    return {each.labels["store"]: each.value for each in samples(url) if each.name == "penstock:memory_bytes"}


def samples(url: str) -> list[Sample]:
    page = httpx.get(f"{url}/metrics").text
    return [each for family in text_string_to_metric_families(page) for each in family.samples]


def test_one_request_is_told_alike_everywhere(tmp_path, default_model):
    with serve(tmp_path / "trace", "--log-requests", "--log-format", "json") as served:
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 6, "timings": True}
        answer = httpx.post(
            f"{served.url}/v1/chat/completions", json=body, headers={"x-request-id": "told-1"}, timeout=60
        )
        assert answer.headers["x-request-id"] == "told-1"
        usage, timings = answer.json()["usage"], answer.json()["timings"]
        values, last = metrics(served.url), time.monotonic() + PATIENCE
        # The last step is counted when its answer is on its way already.
        while values["vllm:num_requests_running"] and time.monotonic() < last:
            values = metrics(served.url)
        stores = kept(served.url)
        line = served.process.stdout.readline()

    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    parts = timings["queue_ms"] + timings["prompt_ms"] + timings["predicted_ms"]
    assert 0 < parts <= timings["total_ms"] + 0.01

    assert values["vllm:generation_tokens_total"] == usage["completion_tokens"]
    assert values["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert values["vllm:e2e_request_latency_seconds_count"] == 1
    assert values["vllm:e2e_request_latency_seconds_sum"] * 1000 == pytest.approx(timings["total_ms"], abs=0.01)
    assert values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"] == 0
    assert 0 < stores["recent_answers"] < 10_000
    assert stores["requests"] == 0

    told = json.loads(line)
    assert (told["id"], told["route"], told["status"]) == ("told-1", "/v1/chat/completions", 200)
    assert told["completion_tokens"] == usage["completion_tokens"]
    assert told["decode_ms"] == timings["predicted_ms"]
    assert told["ms"] >= timings["total_ms"]
    assert SECRET not in line
    assert answer.json()["choices"][0]["message"]["content"] not in line
