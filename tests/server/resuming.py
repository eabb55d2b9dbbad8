"""Streams that are cut and resumed, and what their events say: shared by the tests of several rooms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
from sse_reader import read_events

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def blocks(wire: bytes) -> list[bytes]:
    """The events of a stream, each with the blank line that ends it."""
    return [each + b"\n\n" for each in wire.split(b"\n\n")[:-1]]


def id_of(block: bytes) -> str:
    (event,) = read_events(block)
    assert event.id, block
    return event.id


def cut(http: httpx.Client, path: str, body: dict, count: int) -> bytes:
    """The first `count` events of a stream; then its connection is closed."""
    wire = b""
    with http.stream("POST", path, json=body) as response:
        for piece in response.iter_raw():
            wire += piece
            if wire.count(b"\n\n") >= count:
                break
    return b"".join(blocks(wire)[:count])


def resume(http: httpx.Client, path: str, body: dict, last: str, **headers: str) -> httpx.Response:
    return http.post(path, json=body, headers={"Last-Event-ID": last, **headers})


def nameless(wire: bytes) -> bytes:
    """A stream without the ids and times that differ between equal answers."""
    wire = re.sub(rb"[0-9a-f]{32}", b"ID", wire)
    return re.sub(rb'"created(_at)?":\d+', b'"created":0', wire)


def told(path: str, wire: bytes) -> list[object]:
    """What a stream says, however it is cut into pieces."""
    events = [event for event in read_events(nameless(wire)) if event.data != "[DONE]"]
    datas = [json.loads(event.data) for event in events]
    if path == RESPONSES:
        assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    named = path in (RESPONSES, MESSAGES)
    return list(_named(datas)) if named else _chunks(datas)


def _named(datas: list[dict]) -> Iterator[object]:
    """Events in order, with consecutive deltas as one."""
    sum_: dict | None = None
    for data in datas:
        data.pop("sequence_number", None)
        said = data["delta"] if isinstance(data.get("delta"), str) else None
        if data["type"] == "content_block_delta":
            (said,) = (value for key, value in data["delta"].items() if key != "type")
        if said is None:
            if sum_ is not None:
                yield sum_
            sum_ = None
            yield data
            continue
        where = (data["type"], data.get("index"), data.get("item_id"))
        if sum_ is None or sum_["where"] != where:
            if sum_ is not None:
                yield sum_
            sum_ = {"where": where, "said": "", "logprobs": []}
        sum_["said"] += said
        sum_["logprobs"] += data.get("logprobs", [])
    if sum_ is not None:
        yield sum_


def _chunks(datas: list[dict]) -> list[object]:
    """Each choice's texts, calls, log probabilities and end, and the usage."""
    found: dict[object, dict] = {}
    for data in datas:
        if data["choices"] == []:
            found["usage"] = data
            continue
        (choice,) = data["choices"]
        said = found.setdefault(choice["index"], {"roles": 0, "text": "", "thought": "", "calls": {}, "logprobs": {}})
        assert "end" not in said, "nothing comes after a choice's end"
        piece = choice.get("delta", choice)
        said["roles"] += "role" in piece
        said["text"] += piece.get("content") or piece.get("text") or ""
        said["thought"] += piece.get("reasoning_content", "")
        for call in piece.get("tool_calls", ()):
            known = said["calls"].setdefault(call["index"], {"heads": [], "arguments": ""})
            known["heads"] += [(call["id"], call["function"]["name"])] if "id" in call else []
            known["arguments"] += call["function"]["arguments"]
        for name, values in (choice["logprobs"] or {}).items():
            said["logprobs"].setdefault(name, []).extend(values or [])
        if choice["finish_reason"] is not None:
            said["end"] = choice["finish_reason"], choice["stop_reason"]
    return sorted(found.items(), key=lambda each: str(each[0]))
