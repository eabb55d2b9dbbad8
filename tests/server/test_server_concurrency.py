"""How many requests one API key may have at once (`concurrent=2` in the key file), and that none counts for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from scripted_engine import HELLO, ScriptedEngine, Until, Wait, always, delta, failed
from server_harness import running

from penstock.contract.errors import Overloaded
from penstock.server.delivery.concurrency import Concurrency
from penstock.server.http.access import Access, read_keys

TWO, FREE = "a-key-that-may-have-two", "a-key-that-may-have-any"
PATIENCE = 30
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Limited:
    """A server with a key that may have two requests at once, and one that may have any number."""

    http: httpx.Client
    engine: ScriptedEngine
    threads: ThreadPoolExecutor
    go_on: threading.Event = field(default_factory=threading.Event)

    def ask(self, path: str = "/v1/completions", key: str = TWO, **fields) -> httpx.Response:
        body = fields if "input" in fields else {"prompt": "Hi"} | fields
        return self.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

    def begin(self, **fields) -> Future[httpx.Response]:
        """A request that is answered when `go_on` is set; returns when the engine has it."""
        begun = threading.Event()

        def held(request):
            begun.set()
            return Until(self.go_on), *HELLO(request)

        self.engine.script = held
        answer = self.threads.submit(self.ask, **fields)
        assert begun.wait(PATIENCE)
        return answer

    def ask_until_taken(self) -> httpx.Response:
        """An answer, once requests that ended just now are no longer counted."""
        self.engine.script = HELLO
        end = time.monotonic() + PATIENCE
        while (answer := self.ask()).status_code == 429 and time.monotonic() < end:
            time.sleep(0.01)
        return answer


@pytest.fixture
def limited(tmp_path) -> Iterator[Limited]:
    path = tmp_path / "keys"
    path.write_text(f"{TWO} concurrent=2\n{FREE}\n")
    path.chmod(0o600)
    engine = ScriptedEngine()
    with (
        running(engine, access=Access(keys=read_keys(str(path), {}))) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
        ThreadPoolExecutor(8) as threads,
    ):
        all_of_it = Limited(http, engine, threads)
        yield all_of_it
        all_of_it.go_on.set()


def test_more_than_a_key_may_have_are_refused_and_others_are_not(limited):
    running = [limited.begin(), limited.begin(stream=True)]
    refused = limited.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.json()["error"]["message"] == (
        "2 requests with this API key are being answered already; it may have no more at once."
    )
    assert len(limited.engine.requests) == 2
    others = [limited.begin(key=FREE) for _ in range(4)]
    limited.go_on.set()
    assert {each.result(PATIENCE).status_code for each in (*running, *others)} == {200}
    assert [limited.ask_until_taken().status_code for _ in range(3)] == [200, 200, 200]


def test_what_computes_nothing_is_always_answered(limited):
    for _ in range(2):
        limited.begin()
    assert limited.http.get("/v1/models", headers={"x-api-key": TWO}).status_code == 200
    assert limited.ask("/tokenize").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT | {"model": "acme/tiny-1", "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/generate", {"prompt": "Hi"}),
    ],
)
def test_every_endpoint_that_computes_counts(limited, path, body):
    for _ in range(2):
        limited.begin()
    assert limited.http.post(path, json=body, headers={"x-api-key": TWO}).status_code == 429


def test_an_answer_with_many_prompts_is_one_request(limited):
    limited.begin()
    many = limited.begin(input=["a", "b", "c", "d"], path="/v1/embeddings")
    assert limited.ask().status_code == 429
    limited.go_on.set()
    assert many.result(PATIENCE).status_code == 200
    assert limited.ask_until_taken().status_code == 200


@contextmanager
def a_client_that_leaves(limited: Limited) -> Iterator[None]:
    body = {"prompt": "Hi", "stream": True}
    with limited.http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": TWO}) as answer:
        pieces = answer.iter_raw()
        assert next(pieces)
        yield


def test_a_client_that_leaves_is_counted_no_more(limited):
    limited.begin()
    limited.engine.script = always(delta("x"), Wait())
    with a_client_that_leaves(limited):
        assert limited.ask().status_code == 429
    assert limited.ask_until_taken().status_code == 200


@pytest.mark.parametrize(
    "script", [always(failed()), always(delta("x"), RuntimeError("A bug.")), always(Overloaded("Full."))]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_is_counted_no_more(limited, script, stream):
    limited.begin()
    for _ in range(5):
        limited.engine.script = script
        limited.ask(stream=stream)
        assert limited.ask_until_taken().status_code == 200


def test_a_request_whose_time_is_up_is_counted_no_more(limited):
    limited.begin()
    limited.engine.script = always(Wait())
    headers = {"x-api-key": TWO, "x-request-timeout": "0.05"}
    assert limited.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 504
    assert limited.ask_until_taken().status_code == 200


def background(limited: Limited) -> httpx.Response:
    return limited.ask("/v1/responses", input="Hi", background=True)


def status_of(limited: Limited, begun: httpx.Response) -> str:
    path = f"/v1/responses/{begun.json()['id']}"
    return limited.http.get(path, headers={"x-api-key": TWO}).json()["status"]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_background_response_counts_until_it_is_finished(limited):
    limited.engine.script = lambda request: (Until(limited.go_on), *HELLO(request))
    begun = [background(limited), background(limited)]
    assert [each.status_code for each in begun] == [200, 200]
    assert background(limited).status_code == limited.ask().status_code == 429
    limited.go_on.set()
    wait_for(lambda: [status_of(limited, each) for each in begun] == ["completed", "completed"])
    assert limited.ask_until_taken().status_code == 200


def test_a_background_response_that_is_cancelled_or_fails_counts_no_more(limited):
    limited.engine.script = always(failed())
    begun = [background(limited) for _ in range(2)]
    wait_for(lambda: all(status_of(limited, each) == "failed" for each in begun))
    assert limited.ask_until_taken().status_code == 200
    limited.engine.script = always(Wait())
    headers = {"x-api-key": TWO, "x-request-timeout": "0.05"}
    ended = limited.http.post("/v1/responses", json={"input": "Hi", "background": True}, headers=headers)
    wait_for(lambda: status_of(limited, ended) == "failed")
    assert limited.ask_until_taken().status_code == 200


def test_counts_are_of_each_key_and_leave_nothing_behind():
    counts = Concurrency()
    with counts.one_more("a", 1), counts.one_more("b", 1), counts.one_more("", 0), counts.one_more("", 0):
        with pytest.raises(Overloaded, match="1 requests"), counts.one_more("a", 1):
            pytest.fail("it was let in")
        with counts.one_more("a", 2):
            pass
    assert not counts._counts
