"""OpenAI's `response` object while it is being made, and the events that tell of it.

Decides a response's states (in_progress, then completed, incomplete, cancelled or failed), the order of its events, and
that every event carries the next `sequence_number`. The same object is sent, stored and built from events, so all say
the same. Knows no HTTP and no store: whoever makes one is told of each state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, Usage
from penstock.server.strict_json import JsonObject

__all__ = ["ResponseScript"]

STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "failed",
}
LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
PLACE = {"output_index": 0, "content_index": 0}


class ResponseScript:
    """One response. Owned by the task that makes it.

    Args:
        head: id, time, model and what is repeated of the request.
        changed: called with the response object and its text when it begins and when it ends.
    """

    def __init__(self, head: JsonObject, changed: Callable[[JsonObject, str], None]) -> None:
        self._head = head
        self._changed = changed
        self._item_id = "msg_" + head["id"].removeprefix("resp_")
        self._text: list[str] = []
        self._sequence = 0
        self.ended = False

    def begin(self) -> JsonObject:
        """The response before it has any text."""
        return self._told(self._object("in_progress", [], None))

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The complete response."""
        ((delta, finished),) = choices
        self._text = [delta.text]
        return self._end(STATUSES[finished.reason], usage)

    def opening(self) -> Iterator[JsonObject]:
        """The response, its one item and its one part, all empty."""
        response = self._object("in_progress", [], None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", item_id=self._item_id, part=_part(""), **PLACE)

    def piece(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        """More text."""
        self._text.append(delta.text)
        if delta.text:
            more = {"item_id": self._item_id, "delta": delta.text, "logprobs": []}
            yield self._event("response.output_text.delta", **more, **PLACE)

    def closing(self, finished: ChoiceFinished, usage: Usage) -> Iterator[JsonObject]:
        """The ends of the part, the item and the response."""
        text, status = "".join(self._text), STATUSES[finished.reason]
        place = {"item_id": self._item_id, **PLACE}
        yield self._event("response.output_text.done", text=text, logprobs=[], **place)
        yield self._event("response.content_part.done", part=_part(text), **place)
        yield self._event("response.output_item.done", output_index=0, item=self._filled_item(status))
        response = self._end(status, usage)
        yield self._event(LAST_EVENTS.get(status, "response.incomplete"), response=response)

    def failing(self, error: JsonObject, usage: Usage) -> Iterator[JsonObject]:
        """The failed response."""
        yield self._event("response.failed", response=self.fail(error["error"]["message"], usage))

    def fail(self, message: str, usage: Usage) -> JsonObject:
        """End the response as failed."""
        return self._end("failed", usage, {"code": "server_error", "message": message})

    def cancel(self) -> None:
        """End the response because nobody waits for it any more."""
        if not self.ended:
            self._end("cancelled", None)

    def _end(self, status: str, usage: Usage | None, error: JsonObject | None = None) -> JsonObject:
        self.ended = True
        response = self._object(status, [self._filled_item(status)], usage)
        response["error"] = error
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._told(response)

    def _told(self, response: JsonObject) -> JsonObject:
        self._changed(response, "".join(self._text))
        return response

    def _object(self, status: str, output: list[JsonObject], usage: Usage | None) -> JsonObject:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }

    def _filled_item(self, status: str) -> JsonObject:
        return self._item("completed" if status == "completed" else "incomplete", [_part("".join(self._text))])

    def _item(self, status: str, content: list[JsonObject]) -> JsonObject:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _event(self, kind: str, **fields: object) -> JsonObject:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
