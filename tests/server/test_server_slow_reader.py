"""What waited for a slow reader comes in events of bounded size, and says the same."""

from __future__ import annotations

import pytest
from resuming import CHAT, COMPLETIONS, MESSAGES, RESPONSES, blocks, id_of, resume, told
from scripted_engine import always, delta, finished, length
from sse_reader import read_events

from penstock.contract.events import ChoiceDelta, TokenPiece
from penstock.contract.places import MOST_TOKENS, START, Place, in_parts, split
from penstock.contract.tools import CallPiece
from penstock.engine.output_queue import merge

HI = [{"role": "user", "content": "Hi"}]
COUNT = 150
TOP = tuple(TokenPiece(each, b"top%d" % each, -1.0 - each) for each in range(20))
PLAIN = [ChoiceDelta(0, f"é{i} ", (TokenPiece(i, f"é{i} ".encode(), -0.5, TOP),)) for i in range(COUNT)]
THOUGHT = [ChoiceDelta(0, "", (TokenPiece(i, b"hm", -0.5, TOP),), "hm", (), 1) for i in range(COUNT)]


def placed(deltas: list[ChoiceDelta]) -> list[ChoiceDelta]:
    """Deltas whose tokens know where they begin, as the engine's do for plain text."""
    begun, found = 0, []
    for each in deltas:
        found.append(each._replace(tokens=tuple(token._replace(start=begun) for token in each.tokens)))
        begun += len(each.text)
    return found


def late(*deltas: ChoiceDelta) -> list[ChoiceDelta]:
    """All but the first merged into one, as for a reader that was away."""
    waiting: list = []
    merge(waiting, deltas[1:])
    return [deltas[0], *waiting]


CASES = {
    "plain": (CHAT, {"messages": HI}, placed(PLAIN)),
    "scored": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20}, placed(PLAIN)),
    "completion": (COMPLETIONS, {"prompt": "Hi", "logprobs": 20}, placed(PLAIN)),
    "thought": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20}, THOUGHT),
    "placed elsewhere": (RESPONSES, {"input": "Hi", "include": ["message.output_text.logprobs"]}, PLAIN),
    "messages": (MESSAGES, {"messages": HI, "max_tokens": 9, "model": "acme/tiny-1"}, THOUGHT),
}


@pytest.mark.parametrize("case", CASES)
def test_events_of_what_waited_are_bounded_and_say_the_same(served, case):
    path, fields, deltas = CASES[case]
    body = fields | {"stream": True}
    served.engine.script = always(*deltas, length(), finished())
    whole = told(path, served.http.post(path, json=body).content)
    served.engine.script = always(*late(*deltas), length(), finished())
    answer = served.http.post(path, json=body)
    assert told(path, answer.content) == whole
    said = [event for event in read_events(answer.content) if "elta" in event.data or "text_offset" in event.data]
    bound = MOST_TOKENS * 3000 if "logprobs" in fields or "include" in fields else 8000
    ends = {
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    }
    assert max(len(event.data) for event in said if event.type not in ends) < bound
    events = blocks(answer.content)
    rest = resume(served.http, path, body, id_of(events[3]))
    assert told(path, b"".join(events[:4]) + rest.content) == whole


def test_parts_add_up_and_calls_stay_with_their_text():
    (whole,) = late(*placed(PLAIN))[1:]
    parts = list(in_parts(whole, len(PLAIN[0].text)))
    assert [len(part.tokens) for part in parts] == [MOST_TOKENS] * 2 + [COUNT - 1 - 2 * MOST_TOKENS]
    assert "".join(part.text for part in parts) == whole.text
    assert all(part.text.encode() == b"".join(token.bytes for token in part.tokens) for part in parts)
    called = whole._replace(calls=(CallPiece(0, "c", "now", "{}", 3),))
    assert list(in_parts(called, 0)) == [called]


def test_a_choice_is_split_anywhere():
    pieces = (CallPiece(0, "a", "now", "{}", 2), CallPiece(1, "b", "now", ""), CallPiece(1, "", "", '{"x":1}'))
    whole = ChoiceDelta(0, "text", delta("t").tokens * 3, "thought", pieces, 2)
    everything = START.past(whole)
    assert everything == Place(3, 4, 7, 1 + 2 + 1 + 7)
    for calls in range(everything.calls + 1):
        place = Place(calls % 4, calls % 5, calls % 8, calls)
        before, after = split(0, [whole], place)
        assert START.past(before) == place
        assert place.past(after) == everything
        joined = before.then(after)
        assert (joined.text, joined.tokens, joined.reasoning) == (whole.text, whole.tokens, whole.reasoning)
        assert sum(bool(piece.id) for piece in (*before.calls, *after.calls)) == 2
