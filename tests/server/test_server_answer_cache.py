"""`Cache-Control` of a request, and what an answer says of the cache."""

from __future__ import annotations

import pytest
from scripted_engine import always, delta, finished, stop

from penstock.contract.events import CacheLookup
from penstock.contract.request import AnswerCaching
from penstock.server.http.cache_control import answer_caching

ANYTHING = AnswerCaching()


@pytest.mark.parametrize(
    ("header", "caching"),
    [
        ("", ANYTHING),
        ("no-cache", AnswerCaching(most_age=-1.0)),
        ("no-store", AnswerCaching(keep=False)),
        ("No-Store, NO-CACHE", AnswerCaching(-1.0, keep=False)),
        ("max-age=30", AnswerCaching(most_age=30.0)),
        ('max-age="30"', AnswerCaching(most_age=30.0)),
        ("max-age=0, max-age=7", AnswerCaching(most_age=0.0)),
        ("max-age=soon", AnswerCaching(most_age=0.0)),
        ("max-age=-5", AnswerCaching(most_age=0.0)),
        ("no-transform, only-if-cached, ,=", ANYTHING),
    ],
)
def test_the_header_says_what_the_cache_may_do(header, caching):
    assert answer_caching({"cache-control": header}) == caching


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "model": "acme/tiny-1", "max_tokens": 4}),
        ("/generate", {"prompt": "Hi"}),
    ],
)
def test_every_endpoint_that_generates_passes_it_on(served, path, body):
    served.http.post(path, json=body)
    assert {each.answer_caching for each in served.engine.requests} == {ANYTHING}
    served.engine.requests.clear()
    served.http.post(path, json=body, headers={"cache-control": "no-store, max-age=5"})
    assert {each.answer_caching for each in served.engine.requests} == {AnswerCaching(5.0, keep=False)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("lookup", "said"), [(None, (None, None)), (CacheLookup(None), ("miss", None)), (CacheLookup(12.9), ("hit", "12"))]
)
def test_an_answer_says_where_it_comes_from(served, stream, lookup, said):
    served.engine.script = always(*([] if lookup is None else [lookup]), delta("Hi"), stop(), finished())
    for answer in (served.chat(stream=stream), served.complete(stream=stream), served.generate(stream=stream)):
        assert (answer.headers.get("x-penstock-answer-cache"), answer.headers.get("age")) == said
        assert "Hi" in answer.text


def test_an_answer_to_several_prompts_comes_from_the_cache_if_all_of_it_does(served):
    ages = iter([3.0, 5.0, 3.0, None])
    served.engine.script = lambda request: (CacheLookup(next(ages)), delta("Hi"), stop(), finished())
    answer = served.complete(prompt=["a", "b"])
    assert (answer.headers["x-penstock-answer-cache"], answer.headers["age"]) == ("hit", "5")
    answer = served.complete(prompt=["a", "b"])
    assert answer.headers["x-penstock-answer-cache"] == "miss"
    assert "age" not in answer.headers
