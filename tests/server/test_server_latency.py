"""Where a request's time went, as the server tells it: in the answer, in spans, and later by its id."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

import httpx
import pytest
from scripted_engine import ScriptedEngine, always, delta, stop
from server_harness import running

from penstock.contract.events import RequestFinished, Usage
from penstock.contract.measurements import NEXT_STEP, PARTS, LatencyParts, Timings
from penstock.contract.request import EngineRequest, TokenPrompt
from penstock.server.admin.latency import RecentLatencies
from penstock.server.delivery.observation import RequestRecord
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.caller import Caller

PIECES = LatencyParts(queue=0.001, queue_for=((NEXT_STEP, 0.001),), decode=0.002, text=0.0005, behind=("somebody/0",))


class Timed(ScriptedEngine):
    """An engine that took 3.5 ms for each answer, by the clock of the server."""

    async def generate(self, request):
        arrived = time.monotonic()
        time.sleep(0.004)
        life = Timings(arrived, arrived + 0.001, arrived + 0.002, arrived + 0.003, arrived + 0.003, parts=PIECES)
        self.script = always(delta("Hi"), stop(), RequestFinished(Usage(3, 1), life))
        async for output in super().generate(request):
            yield output


def keys(*named: tuple[str, bool]) -> Access:
    callers = tuple(Caller(hashlib.sha256(key.encode()).digest(), admin) for key, admin in named)
    return Access(keys=ApiKeys(callers))


def post(url: str, key: str = "", **fields) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"messages": [{"role": "user", "content": "Hi"}], "timings": True} | fields
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)


def told(url: str, named: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{url}/v1/requests/{named}/latency", headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_and_the_server_say_the_same_parts(stream):
    with running(Timed()) as url:
        answer = post(url, stream=stream)
        named = answer.headers["x-request-id"]
        found = told(url, named).json()
        assert told(url, found["id"]).json() == found
        if not stream:
            ms = answer.json()["timings"]["parts_ms"]
            assert list(ms) == [*PARTS, "total", "queue_for"]
            assert (ms["queue"], ms["decode"], ms["text"]) == (1.0, 2.0, 0.5)
            assert ms["queue_for"] == {NEXT_STEP: 1.0}
            assert sum(ms[name] for name in PARTS) == pytest.approx(ms["total"], abs=0.02)
            assert ms["intake"] > 0.0
    assert found["request_id"] == named
    assert (found["route"], found["status"], found["behind"]) == ("/v1/chat/completions", 200, ["somebody/0"])
    assert found["parts_ms"]["total"] == pytest.approx(found["wall_ms"], abs=0.002)


def test_a_caller_is_told_of_its_own_requests_and_an_admin_of_all():
    access = keys(("first-key-of-all", False), ("second-key-of-all", False), ("admin-key-of-all", True))
    with running(Timed(), access=access) as url:
        named = post(url, "first-key-of-all").json()["id"]
        own, other = told(url, named, "first-key-of-all"), told(url, named, "second-key-of-all")
        admin = told(url, named, "admin-key-of-all")
        assert told(url, named).status_code == 401
    assert "behind" not in own.json()
    assert admin.json() == own.json() | {"behind": ["somebody/0"]}
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "request_not_found"


def test_an_engine_that_says_nothing_leaves_nothing_to_tell(served):
    answer = served.chat(timings=True)
    assert answer.json()["timings"]["parts_ms"] is None
    assert served.http.get(f"/v1/requests/{answer.json()['id']}/latency").status_code == 404


def test_the_oldest_is_forgotten():
    record = RequestRecord("", "POST", "/x", 200, True, 0, 0.1, None, None, {}, parts=PIECES)
    recent = RecentLatencies(most=2)
    recent(record)  # a record of no request to the engine
    for number in range(4):
        recent(replace(record, id=f"request-{number % 3}", parsed=_parsed(f"answer-{number}")))
    assert [recent.find(f"answer-{number}") is not None for number in range(4)] == [False, False, True, True]
    assert recent.find("request-0").id == "answer-3"
    assert recent.find("request-1") is None
    assert recent.find("request-2").id == "answer-2"


def _parsed(answer_id: str):
    return ParsedRequest(answer_id, (EngineRequest(answer_id, TokenPrompt((1,))),))
