"""Build OpenAI's `response` object and its events.

A response is in_progress and then completed, incomplete, cancelled or failed. Its items keep the order in which the
model wrote them: reasoning, then messages and calls; text after a call is a message of its own. Every event carries
the next `sequence_number`. The object that is sent, the one that is stored and the one that the events build are the
same, because a complete response is built as a streamed one and its events are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.api_fields.answers import logprob_objects
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, TokenPiece, Usage
from penstock.contract.places import START
from penstock.contract.request import Message
from penstock.contract.tools import CallPiece, ToolCall
from penstock.server.delivery.call_arguments import closed
from penstock.server.delivery.deliveries import NOTHING_MORE

__all__ = ["ResponsesFormatter", "usage_of"]

STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.TOOL_CALLS: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "failed",
}
LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"
PREFIXES = {REASONING: "rs_", MESSAGE: "msg_"}
TEXT_EVENTS = {REASONING: "response.reasoning_text", MESSAGE: "response.output_text"}


@dataclass
class _Item:
    """An output item in progress.

    Attributes:
        index: its index in the output.
        text: the pieces of its text, or of a call's arguments.
        call_id, name: the id and name of a call; "" in other items.
        first_token, end_token: the range of the choice's tokens in a message; the end is None until it is known.
    """

    kind: str
    id: str
    index: int
    text: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    first_token: int = 0
    end_token: int | None = None


class ResponsesFormatter:
    """Formats one response. Owned by the task that generates it.

    Args:
        head: id, time, model, and the fields of the request that a response repeats.
        changed: called with the response object and the answer so far when the response begins and when it ends.
        logprobs: whether messages include the log probabilities of all tokens after the reasoning.

    Attributes:
        place: how much of the choice the events so far cover; its tokens are counted only with `logprobs`.
        ended: whether the response has ended.
    """

    def __init__(
        self, head: JsonObject, changed: Callable[[JsonObject, Message], None], *, logprobs: bool = False
    ) -> None:
        self._head = head
        self._changed = changed
        self._stem = head["id"].removeprefix("resp_")
        self._items: list[_Item] = []
        self._open = False  # whether the last item is still being sent
        self._told = 0  # characters of messages so far
        self._logprobs = logprobs
        self._tokens: list[TokenPiece] = []
        self._reasoning_tokens = 0
        self._sent_tokens = 0
        self._sequence = 0
        self.place = START
        self.ended = False

    def begin(self) -> JsonObject:
        """Begin the response, and return it without any output."""
        return self._stored(self._object("in_progress", [], None))

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
        """The complete response."""
        ((delta, finished),) = choices
        for _ in (*self.piece(delta), *self._last_events(STATUSES[finished.reason])):
            pass
        return self._end(STATUSES[finished.reason], usage, more=more)

    def opening(self) -> Iterator[JsonObject]:
        """The events before any item."""
        response = self._object("in_progress", [], None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def piece(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        """The events for more reasoning, text, or call arguments."""
        if self._logprobs:
            self._tokens += delta.tokens
            self._reasoning_tokens += delta.reasoning_tokens
        if delta.reasoning:
            yield from self._into(REASONING)
            yield from self._say(delta.reasoning)
        heads = [call for call in delta.calls if call.id]
        for part in delta.in_order(self._told):
            if isinstance(part, CallPiece):
                if part.id:
                    yield from self._begin_call(heads.pop(0))
                yield from self._argue(part.arguments)
            else:
                yield from self._into(MESSAGE)
                yield from self._say(part, heads[0].tokens_before if heads else None)
        self._told += len(delta.text)

    def closing(self, finished: ChoiceFinished, usage: Usage, more: JsonObject = NOTHING_MORE) -> Iterator[JsonObject]:
        """The events that end the last item and the response."""
        status = STATUSES[finished.reason]
        yield from self._last_events(status)
        response = self._end(status, usage, more=more)
        yield self._event(LAST_EVENTS.get(status, "response.incomplete"), response=response)

    def _last_events(self, status: str) -> Iterator[JsonObject]:
        if not self._items:
            yield from self._into(MESSAGE)
        yield from self._close(status)

    def failing(self, error: JsonObject, usage: Usage) -> Iterator[JsonObject]:
        """The event that ends the response as failed."""
        yield self._event("response.failed", response=self.fail(error["error"]["message"], usage))

    def fail(self, message: str, usage: Usage) -> JsonObject:
        """End the response as failed."""
        return self._end("failed", usage, {"code": "server_error", "message": message})

    def cancel(self) -> None:
        """End the response as cancelled, if it has not ended."""
        if not self.ended:
            self._end("cancelled", None)

    # --- events of items

    def _into(self, kind: str) -> Iterator[JsonObject]:
        """The events that close the open item and open one of this kind, unless an item of this kind is open."""
        if self._open and self._items[-1].kind == kind:
            return
        yield from self._close("completed")
        earlier = sum(item.kind == kind for item in self._items)
        item_id = PREFIXES[kind] + self._stem + (f"_{earlier}" if earlier else "")
        first = max((item.end_token or 0 for item in self._items), default=0)
        item = _Item(kind, item_id, len(self._items), first_token=max(first, self._reasoning_tokens))
        yield self._added(item)
        yield self._event("response.content_part.added", part=self._part(item), content_index=0, **_place(item))

    def _added(self, item: _Item) -> JsonObject:
        self._items.append(item)
        self._open = True
        begun = self._object_of(item, "in_progress")
        begun |= {} if item.kind == CALL else {"content": []}
        return self._event("response.output_item.added", output_index=item.index, item=begun)

    def _say(self, text: str, end: int | None = None) -> Iterator[JsonObject]:
        """The event for more text of the last item; in a message, with the unsent tokens before `end`."""
        item = self._items[-1]
        item.text.append(text)
        extras: JsonObject = {}
        if item.kind == MESSAGE:
            tokens = self._tokens[max(item.first_token, self._sent_tokens) : end]
            self._sent_tokens = len(self._tokens) if end is None else end
            extras = {"logprobs": _in_events(tokens)}
            place = self.place.plus(text=len(text))
            self.place = place._replace(tokens=self._sent_tokens) if self._logprobs else place
        else:
            self.place = self.place.plus(reasoning=len(text))
        yield self._event(f"{TEXT_EVENTS[item.kind]}.delta", delta=text, **extras, content_index=0, **_place(item))

    def _begin_call(self, piece: CallPiece) -> Iterator[JsonObject]:
        yield from self._close("completed", piece.tokens_before)
        number = sum(item.kind == CALL for item in self._items)
        call_item = _Item(CALL, f"fc_{self._stem}_{number}", len(self._items), call_id=piece.id, name=piece.name)
        self.place = self.place.plus(calls=1)
        yield self._added(call_item)

    def _argue(self, arguments: str) -> Iterator[JsonObject]:
        if arguments:
            item = self._items[-1]
            item.text.append(arguments)
            self.place = self.place.plus(calls=len(arguments))
            yield self._event("response.function_call_arguments.delta", delta=arguments, **_place(item))

    def _close(self, status: str, end_token: int | None = None) -> Iterator[JsonObject]:
        """The events that close the open item, if there is one."""
        if not self._open:
            return
        item = self._items[-1]
        text = "".join(item.text)
        if item.kind == MESSAGE:
            known = len(self._tokens)
            item.end_token = known if end_token is None else min(end_token, known)
            if item.end_token > max(item.first_token, self._sent_tokens):
                yield from self._say("", item.end_token)
        self._open = False
        if item.kind == CALL:
            done = {"name": item.name, "arguments": text}
            yield self._event("response.function_call_arguments.done", **done, **_place(item))
        else:
            part = self._part(item)
            extras: JsonObject = {"logprobs": _in_events(self._tokens_of(item))} if item.kind == MESSAGE else {}
            where = _place(item) | {"content_index": 0}
            yield self._event(f"{TEXT_EVENTS[item.kind]}.done", text=text, **extras, **where)
            yield self._event("response.content_part.done", part=part, **where)
        done = self._object_of(item, status)
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    # --- item objects

    def _output(self, status: str) -> list[JsonObject]:
        """The items. The last one of a truncated answer is incomplete, unless it is a call with complete arguments."""
        items = self._items or [_Item(MESSAGE, PREFIXES[MESSAGE] + self._stem, 0)]
        return [self._object_of(item, status if item is items[-1] else "completed") for item in items]

    def _text(self, kind: str) -> str:
        return "".join(text for item in self._items if item.kind == kind for text in item.text)

    def _object_of(self, item: _Item, status: str) -> JsonObject:
        if status != "in_progress":
            whole = status == "completed" if item.kind != CALL else closed("".join(item.text)) == "".join(item.text)
            status = "completed" if whole else "incomplete"
        head: JsonObject = {"id": item.id, "type": item.kind, "status": status}
        if item.kind == CALL:
            return head | {"call_id": item.call_id, "name": item.name, "arguments": "".join(item.text)}
        own: JsonObject = {"summary": []} if item.kind == REASONING else {"role": "assistant"}
        return head | {"content": [self._part(item)]} | own

    def _part(self, item: _Item) -> JsonObject:
        text = "".join(item.text)
        if item.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = logprob_objects(self._tokens_of(item)) if text or item.end_token else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _tokens_of(self, item: _Item) -> list[TokenPiece]:
        return self._tokens[item.first_token : item.end_token]

    def _calls(self) -> tuple[ToolCall, ...]:
        """The calls for later turns of the conversation, with truncated arguments closed to valid JSON."""
        return tuple(
            ToolCall(item.call_id, item.name, closed("".join(item.text))) for item in self._items if item.kind == CALL
        )

    # --- the response

    def _end(
        self,
        status: str,
        usage: Usage | None,
        error: JsonObject | None = None,
        more: JsonObject = NOTHING_MORE,
    ) -> JsonObject:
        self.ended = True
        response = self._object(status, self._output(status), usage) | more
        response["error"] = error
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._stored(response)

    def _stored(self, response: JsonObject) -> JsonObject:
        """Pass `response` and the answer so far to `changed`, and return `response`."""
        answer = Message("assistant", self._text(MESSAGE), self._calls(), reasoning=self._text(REASONING))
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


def _place(item: _Item) -> JsonObject:
    return {"item_id": item.id, "output_index": item.index}


def _in_events(tokens: Sequence[TokenPiece]) -> list[JsonObject]:
    """Log probabilities as in items, but without `bytes`, which OpenAI's events do not have."""
    return [
        {name: value for name, value in each.items() if name != "bytes"}
        | {"top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in each["top_logprobs"]]}
        for each in logprob_objects(tokens)
    ]


def usage_of(usage: Usage) -> JsonObject:
    """The `usage` object of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
