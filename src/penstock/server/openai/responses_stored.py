"""List the input items of a stored response, and rebuild its events.

The events are the same as in its stream, except that the text of each part is in one delta. A client that builds the
response from them gets the stored one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.request import Message

__all__ = ["input_items", "stored_events"]

LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
TEXT_EVENTS = {"reasoning_text": "response.reasoning_text", "output_text": "response.output_text"}


def input_items(messages: Sequence[Message], stem: str) -> list[JsonObject]:
    """A conversation as items, in order; their ids contain `stem`."""
    items = [item for message in messages for item in _items(message)]
    return [{"id": f"{item['type'][:2]}_{stem}_in{index}"} | item for index, item in enumerate(items)]


def _items(message: Message) -> Iterator[JsonObject]:
    if message.role == "tool":
        yield {
            "type": "function_call_output",
            "call_id": message.tool_call_id,
            "output": message.content,
            "status": "completed",
        }
        return
    if message.reasoning:
        parts = [{"type": "reasoning_text", "text": message.reasoning}]
        yield {"type": "reasoning", "summary": [], "content": parts, "status": "completed"}
    if message.content or not (message.tool_calls or message.reasoning):
        kind = "output_text" if message.role == "assistant" else "input_text"
        part: JsonObject = {"type": kind, "text": message.content}
        part |= {"annotations": []} if message.role == "assistant" else {}
        yield {"type": "message", "role": message.role, "content": [part], "status": "completed"}
    for call in message.tool_calls:
        what = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        yield {"type": "function_call", "status": "completed"} | what


def stored_events(body: JsonObject) -> Iterator[JsonObject]:
    """The events of a response; only the first two while it is in progress."""
    for sequence, event in enumerate(_events(body)):
        yield {"type": event.pop("type"), "sequence_number": sequence} | event


def _events(body: JsonObject) -> Iterator[JsonObject]:
    begun = body | {"status": "in_progress", "output": [], "usage": None, "error": None, "incomplete_details": None}
    begun |= {"certificate": None} if "certificate" in body else {}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    if body["status"] == "in_progress":
        return
    for index, item in enumerate(body["output"]):
        yield from _item_events(index, item)
    yield {"type": LAST_EVENTS.get(body["status"], "response.incomplete"), "response": body}


def _item_events(index: int, item: JsonObject) -> Iterator[JsonObject]:
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        empty = item | {"arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"], **place}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **done, **place}
    else:
        empty = item | {"content": [], "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        for number, part in enumerate(item["content"]):
            yield from _part_events(part, place | {"content_index": number})
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_events(part: JsonObject, place: JsonObject) -> Iterator[JsonObject]:
    name = TEXT_EVENTS[part["type"]]
    begun = part | {"text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    extras: JsonObject = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", "part": begun, **place}
    yield {"type": f"{name}.delta", "delta": part["text"], **extras, **place}
    yield {"type": f"{name}.done", "text": part["text"], **extras, **place}
    yield {"type": "response.content_part.done", "part": part, **place}
