"""`--normalize-prompts`: what changes from request to request moves to the end of the system prompt, or is removed."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_harness import running

from penstock.contract.request import ChatPrompt, Message
from penstock.server.delivery.changing_lines import DROPPED, MOVED, normalized
from penstock.server.http.access import Access

BILLING = "x-anthropic-billing-header: cc_version=2.1.88.a3f; cc_entrypoint=cli; cch=eb6c6;"
PAGE = Path(__file__).parents[2] / "docs" / "changing-lines.md"
LISTED = re.findall(r"^\| `([\w-]+)` \| (dropped|moved)[^|]*\| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)


def conversation(system: str) -> ChatPrompt:
    return ChatPrompt((Message("system", system), Message("user", "Hi")))


def system_of(text: str) -> tuple[str, tuple[str, ...]]:
    prompt, done = normalized(conversation(text))
    assert prompt.messages[-1] == Message("user", "Hi")
    return prompt.messages[0].content, done


def test_the_page_lists_every_pattern():
    assert {name for name, what, _ in LISTED if what == "dropped"} == set(DROPPED)
    assert {name for name, what, _ in LISTED if what == "moved"} == set(MOVED)


@pytest.mark.parametrize(("name", "what", "line"), LISTED)
def test_each_line_of_the_page_is_dropped_or_moved(name, what, line):
    content, done = system_of(f"{line}\nYou are an agent.\nBe brief.")
    assert done == (f"{what} {name}",)
    assert content == "You are an agent.\nBe brief." + (f"\n{line}" if what == "moved" else "")
    assert system_of(content) == (content, ()), "once is enough"


@pytest.mark.parametrize(
    "line",
    [
        "Today\u2019s date is Mon, 3 Aug 2026",
        "current datetime: 2026-08-03 14:05:06 UTC",
        "  Current date: 8/3/2026, 2:05 PM (Europe/Berlin)",
        "* Current time is 2:05 p.m. CEST",
        "TODAY'S DATE: 2026-08-03",
        "x-request-id: 0123456789abcdef",
        "Conversation ID is 7F0C9C1E-5A52-4A4B-9D0E-2F6C3A1B7E55",
    ],
)
def test_other_spellings_are_moved_too(line):
    assert system_of(f"You are an agent.\n{line}\nBe brief.")[0] == f"You are an agent.\nBe brief.\n{line}"


@pytest.mark.parametrize(
    "text",
    [
        "You are an agent.\nBe brief.",
        "Say today's date is 2026-08-03 when asked.",
        "Today's date is of no importance: 3 things are.",
        "The current date is what the user says it is.",
        "Current time limits: 30 seconds.",
        "Request ID: ask the user",
        "The session id=7 is yours.",
        "You are.\nx-anthropic-billing-header: cc_version=1; cch=2;\nBe brief.",
        "x-anthropic-billing-header: what is that?",
        "",
    ],
)
def test_what_is_something_else_stays(text):
    assert system_of(text) == (text, ())


def test_a_billing_header_is_dropped_with_whatever_is_in_it_and_nothing_behind_it():
    for header in (BILLING, BILLING.removesuffix(" cch=eb6c6;"), BILLING + " more=x;", BILLING.upper(), "\n" + BILLING):
        assert system_of(header + "\nYou are X.") == ("You are X.", ("dropped billing-header",))
    assert system_of(BILLING + "You are X; a=b.")[0] == "You are X; a=b."
    assert system_of(BILLING.removesuffix(";") + "\nYou are X.")[0] == "You are X."


def test_a_message_that_is_nothing_else_is_left_out():
    prompt, done = normalized(ChatPrompt((Message("system", BILLING), Message("system", "You are X."))))
    assert prompt.messages == (Message("system", "You are X."),)
    assert done == ("dropped billing-header",)
    alone, _ = normalized(ChatPrompt((Message("system", BILLING),)))
    assert alone.messages == (Message("system", ""),)


def test_only_a_system_message_in_front_is_looked_at():
    for messages in (
        (),
        (Message("user", BILLING),),
        (Message("user", "Hi"), Message("system", BILLING)),
        (Message("system", "You are X."), Message("user", BILLING + "\nCurrent time: 12:00")),
    ):
        prompt = ChatPrompt(messages)
        assert normalized(prompt) == (prompt, ())


ASKED = {
    "/v1/chat/completions": lambda text: {
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}]
    },
    "/v1/messages": lambda text: {
        "max_tokens": 5,
        "system": [{"type": "text", "text": part} for part in text.split("\n", 1)],
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "/v1/responses": lambda text: {"instructions": text, "input": "Hi"},
}


@pytest.mark.parametrize("endpoint", ASKED)
@pytest.mark.parametrize("wanted", [True, False])
def test_every_endpoint_of_conversations_does_it_and_says_so(endpoint, wanted):
    text, engine = f"{BILLING}\nCurrent time: 12:00\nYou are X.", ScriptedEngine()
    access = Access(normalize_prompts=wanted)
    with running(engine, access=access) as url, httpx.Client(base_url=url) as client:
        for stream in (False, True):
            answer = client.post(endpoint, json={**ASKED[endpoint](text), "stream": stream})
            assert answer.status_code == 200, answer.text
            (request,) = engine.requests[-1:]
            content = request.prompt.messages[0].content
            if wanted:
                assert answer.headers["x-normalized"] == "dropped billing-header, moved date"
                assert content == "You are X.\nCurrent time: 12:00"
            else:
                assert "x-normalized" not in answer.headers
                assert content == text
        plain = client.post(endpoint, json=ASKED[endpoint]("You are X."))
        assert "x-normalized" not in plain.headers
