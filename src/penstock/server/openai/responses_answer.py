"""OpenAI's `response` object while it is being made, and its events.

A response is in_progress and then completed, incomplete, cancelled or failed. Its items have one order, reasoning,
message, calls, in whatever order the engine's outputs came; so calls are sent at the end. Every event carries the next
`sequence_number`. The object that is sent, the one that is stored and the one that the events build are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penstock.api_fields.answers import logprob_objects
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, TokenPiece, Usage
from penstock.contract.request import Message
from penstock.contract.tools import CallPiece, ToolCall, made_calls

__all__ = ["ResponsesFormatter", "usage_of"]

STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.TOOL_CALLS: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "failed",
}
LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
REASONING, MESSAGE = "reasoning", "message"
PREFIXES = {REASONING: "rs_", MESSAGE: "msg_"}
TEXT_EVENTS = {REASONING: "response.reasoning_text", MESSAGE: "response.output_text"}


class ResponsesFormatter:
    """One response. Owned by the task that makes it.

    Args:
        head: id, time, model and the request's fields that a response repeats.
        changed: called with the response object and the answer so far when it begins and when it ends.
        logprobs: whether the message has the log probabilities of all tokens behind the reasoning.
    """

    def __init__(
        self, head: JsonObject, changed: Callable[[JsonObject, Message], None], *, logprobs: bool = False
    ) -> None:
        self._head = head
        self._changed = changed
        self._stem = head["id"].removeprefix("resp_")
        self._said: dict[str, list[str]] = {REASONING: [], MESSAGE: []}
        self._pieces: list[CallPiece] = []
        self._logprobs = logprobs
        self._tokens: list[TokenPiece] = []
        self._reasoning_tokens = 0
        self._sent_tokens = 0  # of the message
        self._open = ""  # the kind of the item that is being sent
        self._items = 0  # sent so far
        self._sequence = 0
        self.ended = False

    def begin(self) -> JsonObject:
        """The response before it has any text."""
        return self._stored(self._object("in_progress", [], None))

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The complete response."""
        ((delta, finished),) = choices
        self._take(delta)
        return self._end(STATUSES[finished.reason], usage)

    def opening(self) -> Iterator[JsonObject]:
        """The response without any item."""
        response = self._object("in_progress", [], None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def piece(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        """More reasoning or text."""
        self._note_tokens(delta)
        for kind, text in ((REASONING, delta.reasoning), (MESSAGE, delta.text)):
            if text:
                yield from self._into(kind)
                self._said[kind].append(text)
                yield from self._say(kind, text)
        self._pieces += delta.calls

    def _say(self, kind: str, text: str) -> Iterator[JsonObject]:
        """The next piece of a part; a message's piece has the tokens that no event has had yet."""
        extras: JsonObject = {}
        if kind == MESSAGE:
            tokens = self._message_tokens()
            extras = {"logprobs": _in_events(tokens[self._sent_tokens :])}
            self._sent_tokens = len(tokens)
        yield self._event(f"{TEXT_EVENTS[kind]}.delta", delta=text, **extras, **self._place(kind))

    def closing(self, finished: ChoiceFinished, usage: Usage) -> Iterator[JsonObject]:
        """The end of the item, the calls, and the end of the response."""
        status, calls = STATUSES[finished.reason], made_calls(self._pieces)
        if not (self._items or calls):
            yield from self._into(MESSAGE)
        if self._open == MESSAGE and len(self._message_tokens()) > self._sent_tokens:
            yield from self._say(MESSAGE, "")
        yield from self._close("completed" if calls else status)
        for index, call in enumerate(calls):
            yield from self._call(index, call)
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

    def _take(self, delta: ChoiceDelta) -> None:
        self._said = {REASONING: [delta.reasoning], MESSAGE: [delta.text]}
        self._pieces = list(delta.calls)
        self._note_tokens(delta)

    def _note_tokens(self, delta: ChoiceDelta) -> None:
        if self._logprobs:
            self._tokens += delta.tokens
            self._reasoning_tokens += delta.reasoning_tokens

    def _message_tokens(self) -> list[TokenPiece]:
        return self._tokens[self._reasoning_tokens :]

    # --- items, as they are sent

    def _into(self, kind: str) -> Iterator[JsonObject]:
        """The events that lead from the present state into an item of this kind."""
        if self._open == kind:
            return
        yield from self._close("completed")
        self._open = kind
        self._items += 1
        yield self._event(
            "response.output_item.added", output_index=self._items - 1, item=self._item(kind, "in_progress", [])
        )
        yield self._event("response.content_part.added", part=_part(kind, "", []), **self._place(kind))

    def _close(self, status: str) -> Iterator[JsonObject]:
        """The events that end the open part and the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return
        text, place = self._text(kind), self._place(kind)
        extras: JsonObject = {"logprobs": _in_events(self._message_tokens())} if kind == MESSAGE else {}
        yield self._event(f"{TEXT_EVENTS[kind]}.done", text=text, **extras, **place)
        yield self._event("response.content_part.done", part=_part(kind, text, self._message_tokens()), **place)
        item = self._filled(kind, status)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _call(self, index: int, call: ToolCall) -> Iterator[JsonObject]:
        place = {"item_id": self._call_item_id(index), "output_index": self._items}
        begun = self._call_item(index, ToolCall(call.id, call.name, ""), "in_progress")
        yield self._event("response.output_item.added", output_index=self._items, item=begun)
        yield self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
        yield self._event("response.function_call_arguments.done", name=call.name, arguments=call.arguments, **place)
        done = self._call_item(index, call, "completed")
        yield self._event("response.output_item.done", output_index=self._items, item=done)
        self._items += 1

    def _place(self, kind: str) -> JsonObject:
        return {"item_id": PREFIXES[kind] + self._stem, "output_index": self._items - 1, "content_index": 0}

    # --- items, as they are

    def _output(self, status: str) -> list[JsonObject]:
        """The items. The last one of a cut answer is incomplete; calls are always whole."""
        calls = made_calls(self._pieces)
        spoken = [kind for kind in (REASONING, MESSAGE) if self._text(kind)]
        if not (spoken or calls):
            spoken = [MESSAGE]
        ends = ["completed"] * len(spoken)
        if not calls:
            ends[-1] = status
        items = [self._filled(kind, end) for kind, end in zip(spoken, ends, strict=True)]
        return items + [self._call_item(index, call, "completed") for index, call in enumerate(calls)]

    def _text(self, kind: str) -> str:
        return "".join(self._said[kind])

    def _filled(self, kind: str, status: str) -> JsonObject:
        ended = "completed" if status == "completed" else "incomplete"
        return self._item(kind, ended, [_part(kind, self._text(kind), self._message_tokens())])

    def _item(self, kind: str, status: str, content: list[JsonObject]) -> JsonObject:
        own: JsonObject = {"summary": []} if kind == REASONING else {"role": "assistant"}
        return {"id": PREFIXES[kind] + self._stem, "type": kind, "status": status, "content": content} | own

    def _call_item(self, index: int, call: ToolCall, status: str) -> JsonObject:
        what = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"id": self._call_item_id(index), "type": "function_call", "status": status} | what

    def _call_item_id(self, index: int) -> str:
        return f"fc_{self._stem}_{index}"

    # --- the response

    def _end(self, status: str, usage: Usage | None, error: JsonObject | None = None) -> JsonObject:
        self.ended = True
        response = self._object(status, self._output(status), usage)
        response["error"] = error
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._stored(response)

    def _stored(self, response: JsonObject) -> JsonObject:
        """`response`, once it was handed to `changed`."""
        answer = Message("assistant", self._text(MESSAGE), made_calls(self._pieces), reasoning=self._text(REASONING))
        self._changed(response, answer)
        return response

    def _object(self, status: str, output: list[JsonObject], usage: Usage | None) -> JsonObject:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if usage is None else usage_of(usage),
        }

    def _event(self, kind: str, **fields: object) -> JsonObject:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _part(kind: str, text: str, tokens: Sequence[TokenPiece]) -> JsonObject:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_objects(tokens)}


def _in_events(tokens: Sequence[TokenPiece]) -> list[JsonObject]:
    """As in items, without the bytes, which OpenAI's events do not have."""
    return [
        {name: value for name, value in each.items() if name != "bytes"}
        | {"top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in each["top_logprobs"]]}
        for each in logprob_objects(tokens)
    ]


def usage_of(usage: Usage) -> JsonObject:
    """Token counts as responses write them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
