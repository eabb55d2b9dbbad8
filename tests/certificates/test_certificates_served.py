"""Certificates and answers from the cache, over HTTP from a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import running
from sse_reader import read_events

from needs import COMPILED
from penstock.app import assemble
from penstock.certificates import read
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.engine import AnswerCache
from penstock.kernels import native
from penstock.verify import open_recomputing

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

SEEDED = {"prompt": "once upon a time", "seed": 5, "max_tokens": 9}
CHAT = {"messages": [{"role": "user", "content": "once"}], "temperature": 0, "max_tokens": 7}


def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), threads=1, kv_cache_memory=4_000_000, kv_store="off")


@pytest.fixture(scope="module")
def http(model) -> Iterator[httpx.Client]:
    assembly = assemble(config(model))
    client = assembly.start_client(answers=AnswerCache(1_000_000))
    try:
        with (
            running(client, card=assembly.card, limits=DEFAULT_LIMITS) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            yield http
    finally:
        client.close()
        assembly.close()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", SEEDED), ("/v1/chat/completions", CHAT)])
def test_what_is_served_can_be_verified_whole_or_streamed_or_out_of_the_cache(http, model, path, body):
    whole = http.post(path, json=body | {"certificate": True})
    text = whole.json()["certificate"]
    certificate = read(text.encode())
    assert whole.headers["x-penstock-certificate"] == f"sha256:{certificate.digest}"
    assert whole.headers["x-penstock-answer-cache"] == "miss"
    with open_recomputing(config(model), certificate.contract) as recomputing:
        assert recomputing.recompute(certificate).confirmed
    again = http.post(path, json=body | {"certificate": True})
    assert (again.headers["x-penstock-answer-cache"], again.json()["certificate"]) == ("hit", text)
    streamed = http.post(path, json=body | {"certificate": True, "stream": True})
    assert streamed.headers["x-penstock-answer-cache"] == "hit"
    assert int(streamed.headers["age"]) < 60
    *_, last, done = [event.data for event in read_events(streamed.content)]
    assert done == "[DONE]"
    assert text in httpx.Response(200, content=last).json()["certificate"]
    fresh = http.post(path, json=body | {"certificate": True}, headers={"cache-control": "no-cache"})
    assert (fresh.headers["x-penstock-answer-cache"], fresh.json()["certificate"]) == ("miss", text)


def without(answer: dict, *names: str) -> dict:
    return {name: value for name, value in answer.items() if name not in names}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SEEDED | {"logprobs": 3, "echo": True, "n": 2}),
        ("/v1/completions", SEEDED | {"prompt": ["a", "b"], "temperature": 0}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/generate", SEEDED),
        ("/v1/responses", {"input": "once", "temperature": 0, "max_output_tokens": 20, "store": False}),
    ],
)
def test_an_answer_out_of_the_cache_is_the_answer(http, path, body):
    first, second = http.post(path, json=body), http.post(path, json=body)
    assert first.status_code == 200, first.text
    assert [each.headers["x-penstock-answer-cache"] for each in (first, second)] == ["miss", "hit"]
    if path != "/v1/responses":  # whose parts have ids of their own
        names = ("id", "created")
        assert without(first.json(), *names) == without(second.json(), *names)
    else:
        ours, theirs = (each.json()["output"][-1]["content"] for each in (first, second))
        assert ours == theirs


def test_a_random_answer_without_a_seed_is_computed_each_time(http):
    answers = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 12}) for _ in range(2)]
    assert all("x-penstock-answer-cache" not in each.headers for each in answers)
    assert answers[0].json()["choices"] != answers[1].json()["choices"]


def test_the_metrics_count_it(http):
    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {each.name: each.value for family in families for each in family.samples if "answer_cache" in each.name}

    before = counted()
    for _ in range(3):
        http.post("/v1/completions", json=SEEDED | {"prompt": "counted"})
    after = counted()
    assert after["penstock:answer_cache_queries_total"] - before["penstock:answer_cache_queries_total"] == 3
    assert after["penstock:answer_cache_hits_total"] - before["penstock:answer_cache_hits_total"] == 2
    assert 0 < before["penstock:answer_cache_bytes"] < after["penstock:answer_cache_bytes"] <= 1_000_000
    assert after["penstock:answer_cache_evictions_total"] == 0


def test_a_model_whose_answers_vary_has_no_cache(model, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    assembly = assemble(config(model))
    try:
        with pytest.raises(ConfigError, match="answer_cache: cannot be used with this model: it needs the compiled"):
            assembly.start_client(answers=AnswerCache(1_000_000))
    finally:
        assembly.close()
