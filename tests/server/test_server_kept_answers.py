"""Stored answers and responses in the background, with a journal: what one server stored or began, the next one has."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from resuming import RESPONSES, blocks, id_of, resume
from scripted_engine import Script, ScriptedEngine, Until, Wait, always, delta, finished, stop
from server_harness import CARD, running

from penstock.contract.errors import EngineDead, Overloaded
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason
from penstock.contract.limits import ServerLimits
from penstock.contract.tools import CallPiece
from penstock.journal import AnswerJournal, StreamJournal
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.caller import Caller
from penstock.server.openai import responses_background
from penstock.server.openai.responses_background import MOST_STARTS

MODEL = CARD.name
HI = [{"role": "user", "content": "Hi"}]
DONE = always(delta("Hel"), delta("lo", start=3), stop(), finished())
HANGS = always(delta("Hel"), Wait())
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}


def keys(*names: str) -> Access:
    callers = (Caller(hashlib.sha256((name * 16).encode()).digest(), admin=False) for name in names)
    return Access(keys=ApiKeys(tuple(callers)))


@dataclass
class Machine:
    """Starts servers, one after another, that share a journal. Each has an engine of its own."""

    folder: Path
    engines: list[ScriptedEngine] = field(default_factory=list)

    @contextmanager
    def server(
        self, script: Script = DONE, key: str = "n", model: bytes = b"m", **options: Any
    ) -> Iterator[openai.OpenAI]:
        engine = ScriptedEngine(script)
        self.engines.append(engine)
        with closing(StreamJournal(self.folder)) as journal, closing(AnswerJournal(self.folder)) as answers:
            journal.model = answers.model = model
            with (
                running(engine, journal=journal, answers=answers, **options) as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key=key * 16, max_retries=0) as client,
            ):
                yield client

    def ended(self, client: openai.OpenAI, response_id: str) -> Any:
        """The response, once it is no longer in progress."""
        self.engines[-1].wait_until(lambda: client.responses.retrieve(response_id).status != "in_progress", 30)
        return client.responses.retrieve(response_id)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def background(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, **{"input": "Hi", "background": True} | fields)


def calls(request):
    pieces = (CallPiece(0, "call_1", "now", ""), CallPiece(0, "", "", '{"zone": "UTC"}'))
    yield ChoiceDelta(0, "Let me see.", (), reasoning="hm")
    yield ChoiceDelta(0, "", (), calls=pieces)
    yield ChoiceFinished(0, FinishReason.TOOL_CALLS)
    yield finished()


def test_stored_responses_are_found_again_with_all_that_is_said_of_them(machine):
    with machine.server(calls) as client:
        made = client.responses.create(model=MODEL, input="Wann? ü", tools=[NOW], metadata={"a": "b"}, instructions="I")
        machine.engines[-1].script = DONE
        second = client.responses.create(
            model=MODEL,
            input=[{"type": "function_call_output", "call_id": "call_1", "output": "noon"}],
            previous_response_id=made.id,
        )
        unkept = client.responses.create(model=MODEL, input="Hi", store=False)
        items = list(client.responses.input_items.list(second.id))
        turns = machine.engines[-1].requests[1].prompt.messages
    with machine.server() as client:
        assert client.responses.retrieve(made.id) == made
        assert client.responses.retrieve(second.id) == second
        assert list(client.responses.input_items.list(second.id)) == items
        with pytest.raises(openai.NotFoundError, match="in the journal"):
            client.responses.retrieve(unkept.id)
        client.responses.create(model=MODEL, input="And?", previous_response_id=second.id)
        asked = machine.engines[-1].requests[-1].prompt.messages
        assert asked[: len(turns)] == turns
        assert [message.content for message in asked[len(turns) :]] == ["Hello", "And?"]
        client.responses.delete(made.id)
    with machine.server() as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        assert client.responses.retrieve(second.id) == second


@pytest.mark.parametrize("stream", [False, True])
def test_stored_chats_are_found_again_and_changes_stay(machine, stream):
    with machine.server() as client:
        asked = {"model": MODEL, "messages": HI, "store": True, "stream": stream}
        for label in "abc":
            list(client.chat.completions.create(**asked, metadata={"label": label}))
        client.chat.completions.create(model=MODEL, messages=HI)
        first, second, third = client.chat.completions.list()
        client.chat.completions.update(first.id, metadata={"label": "new"})
        client.chat.completions.delete(second.id)
        messages = list(client.chat.completions.messages.list(third.id))
        kept = {each.id: each for each in client.chat.completions.list()}
    with machine.server() as client:
        assert {each.id: each for each in client.chat.completions.list()} == kept
        assert [each.id for each in client.chat.completions.list(metadata={"label": "new"})] == [first.id]
        assert list(client.chat.completions.messages.list(third.id)) == messages


def test_a_response_is_written_before_its_first_byte_is_sent(machine):
    """A client that has heard of it finds it, whenever the server is killed: it is in the journal by then."""
    seen: list[bytes] = []

    class Slow(AnswerJournal):
        async def settled(self) -> None:
            await asyncio.sleep(0.05)
            await super().settled()
            seen.extend(kept.content for kind in ("response", "completion") for kept in self.load(kind))

    engine = ScriptedEngine()
    with closing(Slow(machine.folder)) as answers, running(engine, answers=answers) as url:
        for path, body in (
            (RESPONSES, {"input": "Hi"}),
            (RESPONSES, {"input": "Hi", "stream": True}),
            ("/v1/chat/completions", {"messages": HI, "store": True}),
            ("/v1/chat/completions", {"messages": HI, "store": True, "stream": True}),
            (RESPONSES, {"input": "Hi", "background": True}),
        ):
            seen.clear()
            with httpx.stream("POST", url + path, json=body, timeout=30) as answer:
                got = b""
                for piece in answer.iter_raw():
                    got += piece
                    if b"response.completed" in got or b"[DONE]" in got:
                        break
                assert seen, (path, body)
                assert any(b"Hello" in content for content in seen) or body.get("background")


def test_only_who_stored_an_answer_finds_it_and_no_key_is_written(machine):
    with machine.server(key="a", access=keys("a", "b")) as client:
        made = client.responses.create(model=MODEL, input="Hi")
        chat = client.chat.completions.create(model=MODEL, messages=HI, store=True)
    with machine.server(key="b", access=keys("b", "a")) as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        assert not list(client.chat.completions.list())
        mine = client.with_options(api_key="a" * 16)
        assert mine.responses.retrieve(made.id) == made
        assert [each.id for each in mine.chat.completions.list()] == [chat.id]
    written = b"".join(path.read_bytes() for path in machine.folder.iterdir())
    assert b"a" * 16 not in written
    assert hashlib.sha256(b"a" * 16).digest() not in written


def test_a_response_in_the_background_is_made_again_from_the_same_request(machine):
    fields = {"temperature": 1.2, "instructions": "Be brief.", "tools": [NOW], "max_output_tokens": 9}
    with machine.server() as client:
        before = client.responses.create(model=MODEL, input="First")
        machine.engines[-1].script = HANGS
        made = background(client, previous_response_id=before.id, **fields)
        machine.engines[-1].wait_until(lambda: machine.engines[-1].yielded > 0)
        client.responses.delete(before.id)  # a response keeps what it was asked with
    with machine.server() as client:
        done = machine.ended(client, made.id)
        assert (done.status, done.output_text) == ("completed", "Hello")
        assert done.created_at == made.created_at
        (again,) = machine.engines[-1].requests
        assert again == machine.engines[0].requests[-1]
        assert again.drawn_seed is not None
        events = list(client.responses.retrieve(made.id, stream=True))
        assert events[-1].response == done
        rest = list(client.responses.retrieve(made.id, stream=True, starting_after=events[2].sequence_number))
        assert rest == events[3:]
        client.responses.create(model=MODEL, input="And?", previous_response_id=made.id)
    with machine.server() as client:
        assert client.responses.retrieve(made.id) == done
        assert not machine.engines[-1].requests


def test_its_caller_is_bound_anew(machine):
    with machine.server(HANGS, key="a", access=keys("a")) as client:
        made = background(client)
        machine.engines[-1].wait_until(lambda: machine.engines[-1].yielded > 0)
    with machine.server(key="a", access=keys("b", "a")) as client:
        assert machine.ended(client, made.id).status == "completed"
        assert machine.engines[-1].requests == machine.engines[0].requests


def test_events_that_are_waited_for_come_when_it_is_made(machine):
    with machine.server(HANGS) as client:
        made = background(client)
    go = threading.Event()
    with machine.server(always(delta("Hel"), Until(go), delta("lo"), stop(), finished())) as client:
        threading.Timer(0.05, go.set).start()
        events = list(client.responses.retrieve(made.id, stream=True))
        assert (events[-1].type, events[-1].response.output_text) == ("response.completed", "Hello")


def test_one_that_was_cancelled_stays_so(machine):
    with machine.server(HANGS) as client:
        made = background(client)
        assert client.responses.cancel(made.id).status == "cancelled"
    with machine.server() as client:
        assert client.responses.retrieve(made.id).status == "cancelled"
        assert not machine.engines[-1].requests


def test_one_that_waits_to_be_made_again_can_be_cancelled(machine, monkeypatch):
    monkeypatch.setattr(responses_background, "AGAIN_AT_ONCE", 1)
    with machine.server(HANGS) as client:
        first, second = background(client), background(client)
    go = threading.Event()
    with machine.server(always(Until(go), delta("a"), stop(), finished())) as client:
        assert client.responses.cancel(second.id).status == "cancelled"
        go.set()
        assert machine.ended(client, first.id).status == "completed"
        client.responses.create(model=MODEL, input="Hi")
        assert client.responses.retrieve(second.id).status == "cancelled"
        assert len(machine.engines[-1].requests) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [({"model": b"other"}, "another model"), ({"access": keys("b", "c")}, "the API key that asked for it")],
)
def test_one_that_would_be_another_answer_or_nobodys_fails(machine, options, said):
    with machine.server(HANGS, key="a", access=keys("a")) as client:
        made = background(client)
    with machine.server(key="a", **{"access": keys("a")} | options) as client:
        engine = machine.engines[-1]
        assert not engine.requests
    with machine.server(key="a", access=keys("a")) as client:  # and stays failed on a server that could make it
        failed = client.responses.retrieve(made.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert said in failed.error.message
        assert not machine.engines[-1].requests


def test_one_that_is_unfinished_again_and_again_fails_in_the_end(machine):
    with machine.server(HANGS) as client:
        made = background(client)
    for _ in range(MOST_STARTS - 1):
        with machine.server(HANGS) as client:
            assert client.responses.retrieve(made.id).status == "in_progress"
    with machine.server() as client:
        failed = client.responses.retrieve(made.id)
        assert failed.status == "failed"
        assert f"{MOST_STARTS} times" in failed.error.message


def test_one_waits_for_room_in_the_engine(machine, monkeypatch):
    monkeypatch.setattr(responses_background, "PAUSE_SECONDS", 0.01)
    with machine.server(HANGS) as client:
        made = background(client)
    full = iter(range(3))

    def script(request):
        return (Overloaded("The queue is full."),) if next(full, None) is not None else DONE(request)

    with machine.server(script) as client:
        assert machine.ended(client, made.id).output_text == "Hello"
        assert len(machine.engines[-1].requests) == 4


def test_one_whose_engine_dies_is_left_to_the_next_server(machine):
    with machine.server(always(EngineDead("dead"))) as client:
        made = background(client)
        machine.engines[-1].wait_until(lambda: not machine.engines[-1].live)
        assert client.responses.retrieve(made.id).status == "in_progress"
    with machine.server() as client:
        assert machine.ended(client, made.id).output_text == "Hello"


def test_a_keyed_one_is_begun_once_also_across_a_restart(machine):
    key = {"extra_headers": {"Idempotency-Key": "k"}}
    with machine.server(HANGS) as client:
        made = background(client, **key)
    with machine.server() as client:
        assert background(client, **key).id == made.id
        done = machine.ended(client, made.id)
        assert background(client, **key) == done
        assert len(machine.engines[-1].requests) == 1


def test_a_streamed_response_is_cancelled_by_the_end_and_completed_by_a_client_that_comes_back(machine):
    body = {"input": "Hi", "stream": True}
    with machine.server(HANGS) as client, httpx.stream("POST", f"{client.base_url}responses", json=body) as answer:
        events = blocks(next(answer.iter_raw()))
    response_id = id_of(events[0]).partition(":")[0]
    with machine.server() as client, httpx.Client(base_url=str(client.base_url).removesuffix("/v1/")) as http:
        assert client.responses.retrieve(response_id).status == "cancelled"
        url = f"{RESPONSES}/{response_id}?stream=true&starting_after="
        assert http.get(url + "2").json()["error"]["code"] == "stream_not_found"
        assert b"response.incomplete" in http.get(url + "-1").content
        assert resume(http, RESPONSES, body, id_of(events[-1])).status_code == 200
        done = client.responses.retrieve(response_id)
        assert (done.status, done.output_text) == ("completed", "Hello")
    with machine.server() as client:
        assert client.responses.retrieve(response_id) == done
        whole = list(client.responses.retrieve(response_id, stream=True))
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=whole[2].sequence_number))
        assert (whole[-1].response, rest) == (done, whole[3:])


def test_the_oldest_make_place_on_disk_too(machine):
    few = Access(limits=ServerLimits(max_stored_responses=2))
    with machine.server(access=few) as client:
        made = [client.responses.create(model=MODEL, input="Hi").id for _ in range(4)]
    with closing(AnswerJournal(machine.folder)) as answers:
        assert [kept.id for kept in answers.load("response")] == made[2:]
    with machine.server(access=Access(limits=ServerLimits(max_stored_responses=1))) as client:
        assert client.responses.retrieve(made[3]).id == made[3]
    with closing(AnswerJournal(machine.folder)) as answers:
        assert [kept.id for kept in answers.load("response")] == made[3:]


def test_bytes_are_bounded_with_what_is_asked(machine):
    long = "x" * 3000
    with machine.server(HANGS, access=Access(limits=ServerLimits(max_stored_bytes=20_000))) as client:
        made = [background(client, input=long).id for _ in range(3)]
    with closing(AnswerJournal(machine.folder)) as answers:
        kept = answers.load("response")
        assert [each.id for each in kept] == made[-1:]
        assert sum(len(each.content) for each in kept) < 20_000


def test_a_disk_that_fails_is_one_line_in_the_log_and_serving_goes_on(machine, caplog):
    engine = ScriptedEngine()
    with closing(AnswerJournal(machine.folder)) as answers, running(engine, answers=answers) as url:
        answers._thread.submit(answers._connection.close).result()  # nothing can be written any more
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client, caplog.at_level(logging.ERROR, logger="penstock.journal"):
            made = [client.responses.create(model=MODEL, input="Hi") for _ in range(3)]
            begun = background(client)
            engine.wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
            assert [client.responses.retrieve(each.id) for each in made] == made
            client.responses.delete(made[0].id)
    assert sum("given up" in record.message for record in caplog.records) == 1


def test_content_that_cannot_be_read_is_left_out_with_a_line_in_the_log(machine, caplog):
    with machine.server() as client:
        made = [client.responses.create(model=MODEL, input="Hi").id for _ in range(2)]
    with closing(AnswerJournal(machine.folder)) as answers:
        answers._thread.submit(
            lambda: answers._connection.execute(
                "UPDATE kept SET content = '{}' WHERE id = ?", (made[0],)
            ).connection.commit()
        ).result()
    with caplog.at_level(logging.WARNING, logger="penstock.server"), machine.server() as client:
        assert client.responses.retrieve(made[1]).id == made[1]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made[0])
    assert any(made[0] in record.getMessage() for record in caplog.records)
