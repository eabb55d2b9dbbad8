"""What the server shows of the engine's inside, to whom, and what it keeps to itself."""

from __future__ import annotations

import hashlib
import time

import httpx
import pytest
from scripted_engine import ScriptedEngine, always, delta, stop
from server_harness import running

from penstock.contract.engine_views import OwnPart, PrefixNode, PrefixTree, StepStall, StepView, TenantShare
from penstock.contract.errors import RequestError
from penstock.contract.events import RequestFinished, Usage
from penstock.contract.measurements import LatencyParts, Timings
from penstock.contract.plan import StallReason
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.caller import Caller
from penstock.server.page import engine_views

FIRST, SECOND, ADMIN = "first-key-of-all", "second-key-of-all", "admin-key-of-all"


def step(number: int, **fields) -> StepView:
    known = {"decode": 0.002, "prompts": 0.0, "drafting": 0.0, "restored": 0.0, "engine": 0.0001, "foreseen": 0.0019}
    known |= {"decoding": 2, "drafted": 1, "chunk": 0, "read": 0, "waiting": 0, "stall": None}
    return StepView(**{"step": number, "at": number / 100, **known, **fields})


def caller_with(key: str, *, admin: bool = False) -> Caller:
    return Caller(hashlib.sha256(key.encode()).digest(), admin)


def locked() -> Access:
    return Access(keys=ApiKeys((caller_with(FIRST), caller_with(SECOND), caller_with(ADMIN, admin=True))))


def ask(url: str, path: str, key: str = "") -> httpx.Response:
    return httpx.get(url + path, headers={"authorization": f"Bearer {key}"} if key else {})


# ---- steps


def test_a_step_is_told_in_milliseconds_and_counts(served):
    served.engine.steps = [step(7, waiting=3, stall=StepStall(StallReason.NO_BLOCKS, 5, 2))]
    (told,) = served.http.get("/engine/steps").json()["data"]
    assert told == {
        "step": 7,
        "at": 0.07,
        "decode_ms": 2.0,
        "prompts_ms": 0.0,
        "drafting_ms": 0.0,
        "restored_ms": 0.0,
        "engine_ms": 0.1,
        "foreseen_ms": 1.9,
        "decoding": 2,
        "drafted": 1,
        "chunk": 0,
        "read": 0,
        "waiting": 3,
        "stall": {"reason": "no_blocks", "need": 5, "have": 2},
    }


def test_who_has_seen_some_is_told_the_later_ones(served):
    served.engine.steps = [step(number) for number in range(9)]
    assert [each["step"] for each in served.http.get("/engine/steps").json()["data"]] == list(range(9))
    assert [each["step"] for each in served.http.get("/engine/steps?after=6").json()["data"]] == [7, 8]
    assert served.http.get("/engine/steps?after=8").json() == {"object": "list", "data": []}


@pytest.mark.parametrize("after", ["x", "", "-2", "1.5", "9" * 30, "\u0663"])
def test_a_step_that_cannot_be_is_refused_by_name(served, after):
    answer = served.http.get("/engine/steps", params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


@pytest.mark.parametrize("path", ["/engine/steps?before=3", "/engine/prefixes?depth=3", "/engine/tenants?all=1"])
def test_a_parameter_that_means_nothing_is_refused(served, path):
    answer = served.http.get(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("view", ["steps", "prefixes", "tenants"])
def test_an_adapter_is_looked_at_as_the_engine_that_has_it(served, view):
    served.engine.steps = [step(7)]
    assert served.http.get(f"/engine/{view}?model=poet").json() == served.http.get(f"/engine/{view}").json()


# ---- a request's steps


class Timed(ScriptedEngine):
    """An engine that says where a request's time went, and so is asked about its steps."""

    async def generate(self, request):
        now = time.monotonic()
        life = Timings(now, now, now, now, now, parts=LatencyParts(decode=0.002))
        self.script = always(delta("Hi"), stop(), RequestFinished(Usage(3, 1), life))
        async for output in super().generate(request):
            yield output


def post(url: str, key: str = "") -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).json()["id"]


def test_a_request_is_shown_its_own_part_of_the_steps_it_lived_through():
    engine = Timed(steps=[step(1), step(2, own=OwnPart(0.0005, 0.0, 1)), step(3, own=OwnPart(0.0, 0.001, 2))])
    with running(engine) as url:
        named = post(url)
        told = ask(url, f"/v1/requests/{named}/steps").json()
    assert (told["id"], told["cut"]) == (named, False)
    own = ("step", "own_decode_ms", "own_prompts_ms", "own_positions")
    assert [tuple(each[name] for name in own) for each in told["steps"]] == [(2, 0.5, 0, 1), (3, 0, 1.0, 2)]


def test_a_caller_is_shown_the_steps_of_its_own_requests_and_an_admin_those_of_all():
    engine = Timed(steps=[step(2, own=OwnPart(0.0005, 0.0, 1))])
    with running(engine, access=locked()) as url:
        path = f"/v1/requests/{post(url, FIRST)}/steps"
        assert ask(url, path).status_code == 401
        assert ask(url, path, SECOND).json()["error"]["code"] == "request_not_found"
        assert ask(url, path, FIRST).json() == ask(url, path, ADMIN).json()
        assert len(ask(url, path, FIRST).json()["steps"]) == 1


def test_steps_that_are_forgotten_are_said_to_be(served):
    with running(Timed()) as url:
        answer = ask(url, f"/v1/requests/{post(url)}/steps")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "steps_not_found"
    assert served.http.get("/v1/requests/nobody/steps").json()["error"]["code"] == "request_not_found"


# ---- the prefix cache

TREE = PrefixTree(16, 12, (PrefixNode(-1, 0, 3, 1, 4, 192, 2, 7), PrefixNode(0, 48, 5, 0, 0, 0, 9, 0)), 4)


def test_the_prefix_cache_is_told_as_a_tree_of_counts():
    with running(ScriptedEngine(prefixes=TREE)) as url:
        told = ask(url, "/engine/prefixes").json()
    assert told == {
        "block_size": 16,
        "blocks": 12,
        "left_out": 4,
        "nodes": [
            {"parent": -1, "start": 0, "blocks": 3, "held": 1, "hits": 4, "hit_tokens": 192, "idle": 2, "below": 7},
            {"parent": 0, "start": 48, "blocks": 5, "held": 0, "hits": 0, "hit_tokens": 0, "idle": 9, "below": 0},
        ],
    }


def test_a_tree_is_made_once_for_all_who_look_within_its_time(monkeypatch):
    monkeypatch.setattr(engine_views, "TREE_SECONDS", 60.0)
    engine = ScriptedEngine(prefixes=TREE)
    with running(engine) as url:
        assert ask(url, "/engine/prefixes").json() == ask(url, "/engine/prefixes").json()
    assert engine.looks == ["prefixes"]
    monkeypatch.setattr(engine_views, "TREE_SECONDS", 0.0)
    with running(engine) as url:
        assert ask(url, "/engine/prefixes").json() == ask(url, "/engine/prefixes").json()
    assert engine.looks == ["prefixes"] * 3


# ---- tenants


def shares() -> tuple[TenantShare, ...]:
    names = [caller_with(key).name for key in (FIRST, SECOND, ADMIN)]
    return (
        TenantShare(names[0], 1.0, 2, 1, 40, 500),
        TenantShare(names[1], 2.0, 3, 0, 0, 700),
        TenantShare(names[2], 1.0, 0, 4, 9, 30),
    )


def test_an_admin_sees_each_tenant_and_any_other_caller_all_others_as_one():
    engine = ScriptedEngine(tenants=shares())
    with running(engine, access=locked()) as url:
        assert ask(url, "/engine/tenants").status_code == 401
        admin = ask(url, "/engine/tenants", ADMIN).json()["data"]
        first = ask(url, "/engine/tenants", FIRST).json()["data"]
    assert [(each["tenant"], each["own"]) for each in admin] == [
        (each.tenant, each is engine.tenants[2]) for each in engine.tenants
    ]
    own, others = first
    assert own == engine.tenants[0]._asdict() | {"own": True}
    assert others == {
        "tenant": "",
        "share": 3.0,
        "running": 3,
        "waiting": 4,
        "waiting_tokens": 9,
        "tokens": 730,
        "own": False,
    }


def test_without_keys_there_are_no_tenants_and_nobody_is_asked(served):
    served.engine.tenants = shares()
    assert served.http.get("/engine/tenants").json() == {"object": "list", "data": []}
    assert served.engine.looks == []


# ---- for everybody


@pytest.mark.parametrize("path", ["/engine/steps", "/engine/prefixes", "/engine/tenants"])
def test_a_view_needs_a_key_where_the_stream_of_events_does(path):
    with running(ScriptedEngine(), access=locked()) as url:
        assert ask(url, path).status_code == 401
        assert ask(url, path, SECOND).status_code == 200


class Refusing(ScriptedEngine):
    """Refuses as a fleet does, which is several engines."""

    async def recent_steps(self, after=-1, requests=frozenset()):
        raise RequestError("It is for one engine.", code="views_off")

    async def cached_prefixes(self):
        raise RequestError("It is for one engine.", code="views_off")


@pytest.mark.parametrize("path", ["/engine/steps", "/engine/prefixes"])
def test_an_engine_that_has_no_such_view_says_why(path):
    with running(Refusing()) as url:
        answer = ask(url, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "views_off"
    assert answer.json()["error"]["message"] == "It is for one engine."
