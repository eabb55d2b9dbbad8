"""Scores and rankings: cosines of embeddings, in vLLM's and Jina's shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_engine import Wait, always, finished, stop, vector
from server_harness import CARD, LIMITS

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.server.openai.scoring import parse_rerank, parse_score

VECTORS = {"q": (1.0, 0.0), "near": (0.8, 0.6), "far": (-1.0, 0.0), "same": (1.0, 0.0), "long": (1.5, 0.0)}


@pytest.fixture
def scored(served):
    served.engine.script = lambda request: (
        vector(*VECTORS[request.prompt.text]),
        stop(),
        finished(prompt=3, completion=0),
    )
    return served


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_a_text_is_compared_with_each_of_the_others(scored, path):
    answer = scored.http.post(path, json={"text_1": "q", "text_2": ["near", "far"]}).json()
    assert [round(item.pop("score"), 6) for item in answer["data"]] == [0.8, -1.0]
    assert answer["data"] == [{"index": 0, "object": "score"}, {"index": 1, "object": "score"}]
    assert (answer["object"], answer["model"]) == ("list", "acme/tiny-1")
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert [request.prompt.text for request in scored.engine.requests] == ["q", "near", "far"]


def test_texts_are_compared_in_pairs(scored):
    answer = scored.http.post("/v1/score", json={"text_1": ["q", "near"], "text_2": ["far", "near"]}).json()
    assert [round(item["score"], 6) for item in answer["data"]] == [-1.0, 1.0]


def test_rounding_takes_no_score_out_of_its_range(scored):
    assert scored.http.post("/v1/score", json={"text_1": "q", "text_2": "long"}).json()["data"][0]["score"] == 1.0


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_put_in_order(scored, path):
    body = {"query": "q", "documents": ["far", {"text": "near"}, "same"], "top_n": 2}
    answer = scored.http.post(path, json=body).json()
    assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [(2, "same"), (1, "near")]
    assert answer["results"][0]["relevance_score"] == 1.0
    plain = scored.http.post(path, json=body | {"return_documents": False, "top_n": 0}).json()
    assert [sorted(item) for item in plain["results"]] == [["index", "relevance_score"]] * 3
    assert [item["index"] for item in plain["results"]] == [2, 1, 0]


def test_texts_are_pooled_as_the_models_files_say_and_scaled():
    card = replace(CARD, embedding=EmbeddingSpec(Pooling.LAST, normalize=False))
    for parse, body in (
        (parse_score, {"text_1": "q", "text_2": "near"}),
        (parse_rerank, {"query": "q", "documents": ["near"]}),
    ):
        requests = parse(body, "id", card, LIMITS).parsed.requests
        assert [request.embedding for request in requests] == [EmbeddingSpec(Pooling.LAST)] * 2


def test_of_equal_documents_the_first_comes_first(scored):
    answer = scored.http.post("/v1/rerank", json={"query": "q", "documents": ["same"] * 4}).json()
    assert [item["index"] for item in answer["results"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "q"}, "text_2"),
        ("/v1/score", {"text_1": ["q", "near"], "text_2": ["q"]}, "text_1"),
        ("/v1/score", {"text_1": "q", "text_2": ["near", ""]}, "text_2.1"),
        ("/v1/score", {"text_1": "q", "text_2": ["near"] * 40}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": "near", "softmax": True}, "softmax"),
        ("/v1/rerank", {"documents": ["near"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["near", {"image": "x"}]}, "documents.1.image"),
        ("/v1/rerank", {"query": "q", "documents": ["near", 3]}, "documents.1"),
        ("/v1/rerank", {"query": "q", "documents": ["near"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q" * 5000, "documents": ["near"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["near"], "model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(scored, path, body, param):
    answer = scored.http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert not scored.engine.requests


def test_no_more_are_in_the_engine_than_the_limit(served):
    served.engine.script = always(Wait(0.01), vector(1.0, 0.0), stop(), finished())
    assert served.http.post("/v1/rerank", json={"query": "q", "documents": ["x"] * 30}).status_code == 200
    assert len(served.engine.requests) == 31
    assert LIMITS.max_sequences < 31
