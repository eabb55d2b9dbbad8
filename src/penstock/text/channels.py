"""Parses answers made of messages in channels: gpt-oss's harmony format (OpenAI 2025, "Harmony Response Format").

A message is `<|start|>assistant<|channel|>NAME<|message|>BODY<|end|>`; the first one lacks what the prompt has already
written. The channel `analysis` holds reasoning; a message to a function (`to=functions.NAME` in its header) is a call,
with its arguments as the body; every other message is text. Text outside any message, such as an answer constrained by
a grammar, is text too.

Decides what each message is. A header is held back until it is complete; in a body, only a possible start of a tag is
held back; arguments are emitted as they arrive (`CallEntry`). Does not know tokens or call ids. Invariant: the parts
depend on the answer alone, not on how it is cut into pieces.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from penstock.text.call_entry import CallEntry, Judgement
from penstock.text.call_parser import CallPart
from penstock.text.json_scan import ScanState
from penstock.text.reasoning import partial_suffix

__all__ = ["CHANNEL_TAGS", "ChannelParser"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")

CHANNEL_TAGS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
"""The control tokens of the format."""

_OPENINGS = (_START, _CHANNEL, " to=")
"""How a header may begin; the last one if the prompt has written the role."""
_BODY_ENDS = (*_ENDS, _START, _CHANNEL)  # a model may forget to end a message
_END = re.compile("|".join(map(re.escape, _BODY_ENDS)))
_HEADER_END = re.compile("|".join(map(re.escape, (_MESSAGE, _START, *_ENDS))))
_LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_BETWEEN_MESSAGES = "\n\n"


class _Place(Enum):
    BEGINNING = auto()
    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()
    BETWEEN = auto()


class ChannelParser:
    """Parses one answer. Owned by the choice that it belongs to.

    Args:
        judgement: how the tools judge calls.
        splits: whether reasoning is separated from text.
        parallel: whether more than one call is wanted.

    Attributes:
        ended: the only call that was wanted is complete; further text is ignored.
        reasoning_end: length of the reasoning that the answer begins with, in characters, tags included.
        reasoning_over: whether that reasoning has ended.
    """

    def __init__(self, judgement: Judgement, *, splits: bool = True, parallel: bool = True) -> None:
        self.ended = False
        self.reasoning_end = 0
        self.reasoning_over = not splits
        self._judgement = judgement
        self._splits, self._parallel = splits, parallel
        self._place = _Place.BEGINNING
        self._held = ""  # may be part of a tag or a header
        self._seen = 0
        self._raw = ""  # header of a message that may be a call, and the space before its arguments
        self._entry = CallEntry("", judgement)  # the message's entry, if it may be a call
        self._begun = False  # whether the call's arguments have begun
        self._reasoned, self._said = _Gapped(), _Gapped()
        self._parts: list[CallPart] = []

    def push(self, text: str) -> tuple[str, str, list[CallPart]]:
        """Parse the next piece of the answer; return final reasoning, final text and parts of calls."""
        self._seen += len(text)
        text, self._held = self._held + text, ""
        while text and not self.ended:
            text = self._step(text)
        return self._result()

    def finish(self) -> tuple[str, str, list[CallPart]]:
        """End the answer; return what was held back. A header without a message is dropped."""
        held, self._held = self._held, ""
        if self._place is _Place.REASONING:
            self._reasoned.add(held)
        elif self._place is _Place.CALL and self._begun and not self._entry.called:
            self._fail("")
        elif self._place in (_Place.BEGINNING, _Place.BETWEEN, _Place.TEXT):
            self._said.add(held)
        return self._result()

    def _result(self) -> tuple[str, str, list[CallPart]]:
        if self._place is _Place.REASONING:
            self._end_reasoning(self._held)
        parts, self._parts = self._parts, []
        return self._reasoned.take(), self._said.take(), parts

    def _step(self, text: str) -> str:
        """Parse some of the text; return the rest."""
        match self._place:
            case _Place.BEGINNING | _Place.BETWEEN:
                return self._outside(text)
            case _Place.HEADER:
                return self._in_header(text)
            case _Place.REASONING | _Place.TEXT:
                return self._in_body(text)
            case _Place.CALL:
                return self._in_call(text)

    def _outside(self, text: str) -> str:
        if self._place is _Place.BETWEEN:
            text = text.lstrip()
        if text.startswith(_OPENINGS):
            self._place = _Place.HEADER
        elif any(opening.startswith(text) for opening in _OPENINGS):
            self._held, text = text, ""
        else:
            self._begin_text()
        return text

    def _in_header(self, text: str) -> str:
        end = _HEADER_END.search(text, 1, _LONGEST_HEADER)
        if end is not None and end.group() == _MESSAGE:
            self._begin_message(text[: end.end()])
            return text[end.end() :]
        if end is None and len(text) < _LONGEST_HEADER:
            self._held = text
            return ""
        self._begin_text()  # this is not a message's header
        stop = len(_START) if end is None else end.start()
        self._said.add(text[:stop])
        return text[stop:]

    def _begin_message(self, header: str) -> None:
        recipient = _RECIPIENT.search(header)
        channel = header.partition(_CHANNEL)[2]
        if recipient is not None:
            self._place, self._raw, self._begun = _Place.CALL, header, False
            self._entry = CallEntry(recipient[1].removeprefix(_FUNCTIONS), self._judgement)
            self.reasoning_over = True
        elif self._splits and channel.startswith("analysis"):
            self._place = _Place.REASONING
            self._reasoned.part()
        else:
            self._begin_text()

    def _begin_text(self) -> None:
        self._place = _Place.TEXT
        self.reasoning_over = True
        self._said.part()

    def _in_body(self, text: str) -> str:
        out = self._reasoned if self._place is _Place.REASONING else self._said
        end = _END.search(text)
        if end is None:
            final = len(text) - partial_suffix(text, _BODY_ENDS)
            out.add(text[:final])
            self._held = text[final:]
            return ""
        out.add(text[: end.start()])
        text = text[end.end() if end.group() in _ENDS else end.start() :]
        if self._place is _Place.REASONING:
            self._end_reasoning(text)
        self._place = _Place.BETWEEN
        return text

    def _end_reasoning(self, rest: str) -> None:
        """Count all text seen so far as reasoning, except `rest`."""
        if not self.reasoning_over:
            self.reasoning_end = self._seen - len(rest)

    def _in_call(self, text: str) -> str:
        entry = self._entry
        if not self._begun:
            begun = text.lstrip()
            self._raw += text[: len(text) - len(begun)]
            text = begun
            if not text:  # the next character shows whether it is a call
                return ""
            if text[0] != "{":
                return self._fail(text)
            self._begun = True
        end = entry.take(text, 0)
        self._add(entry)
        if entry.state is ScanState.OPEN:
            return text[end:]
        if not entry.called:
            return self._fail(text[end:])
        self.ended = not self._parallel
        if entry.state is ScanState.DONE:
            self._place = _Place.BETWEEN
        else:
            self._begin_text()
        return text[end:]

    def _add(self, entry: CallEntry) -> None:
        for found in entry.found():
            if found.name:
                self._parts.append(CallPart(found.name, "", self._said.chars))
            elif self._parts and not self._parts[-1].name:
                self._parts[-1] = CallPart("", self._parts[-1].arguments + found.arguments)
            else:
                self._parts.append(CallPart("", found.arguments))

    def _fail(self, text: str) -> str:
        """Release what was held back as text, header included: it is not a call."""
        self._begin_text()
        self._said.add(self._raw + self._entry.raw)
        return text


class _Gapped:
    """Text of several messages, with a blank line between them."""

    def __init__(self) -> None:
        self.chars = 0
        self._out: list[str] = []
        self._gap = False

    def part(self) -> None:
        """Begin another message."""
        self._gap = self.chars > 0

    def add(self, text: str) -> None:
        """Add text to the message."""
        if not text:
            return
        text = _BETWEEN_MESSAGES + text if self._gap else text
        self._gap = False
        self._out.append(text)
        self.chars += len(text)

    def take(self) -> str:
        """Take the text added since the last `take`."""
        out, self._out = "".join(self._out), []
        return out
