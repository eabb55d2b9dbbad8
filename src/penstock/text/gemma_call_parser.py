"""Finds tool calls in Gemma 4's notation, and writes their arguments as JSON.

A call is `<|tool_call>call:NAME{key:value,...}<tool_call|>`; a value is a string between two `<|"|>`, a number, `true`,
`false`, `null`, an object with keys without quotes, or a list. Anything else without quotes is read as a string.

Text that may still be a call is held back, as in `CallParser`. If the named tool streams (`Judgement.streams`), the
brace after its name makes the call certain, and arguments are emitted as they arrive; a call of any other tool is
emitted when it is complete. Does not know tokens or call ids. Invariant: calls and text depend on the answer alone, not
on how it is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from penstock.text.call_entry import Judgement
from penstock.text.call_parser import CallPart
from penstock.text.reasoning import partial_suffix
from penstock.text.text_beside_calls import TextBesideCalls

__all__ = ["GemmaCallParser"]

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_CALL = "call:"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_LONGEST_NAME, _LONGEST_KEY, _LONGEST_SCALAR, _DEEPEST = 64, 256, 256, 64


class _BrokenError(Exception):
    """The text is not a call."""


class _Place(Enum):
    TEXT = auto()
    HEAD = auto()
    """Between the opening and the brace."""
    ARGUMENTS = auto()
    TAIL = auto()
    """After the arguments, where the closing may follow."""


class _Next(Enum):
    FIRST = auto()
    """A first key or value, or the end of the object or list that has just begun."""
    KEY = auto()
    VALUE = auto()
    STRING = auto()
    """More of a string."""
    MORE = auto()
    """A comma, or the end of the open object or list."""
    NOTHING = auto()


class _Arguments:
    """Reads one object, from after its opening brace. The results of `take_json`, joined, are the object as JSON."""

    def __init__(self) -> None:
        self._written = ["{"]
        self._ends = ["}"]
        self._next = _Next.FIRST

    @property
    def done(self) -> bool:
        """Whether the object has ended."""
        return self._next is _Next.NOTHING

    def take_json(self) -> str:
        """Take the JSON written since the last `take_json`."""
        written, self._written = "".join(self._written), []
        return written

    def step(self, text: str) -> str | None:
        """Parse some of the text, which is not empty; return the rest, or None if more text is needed first.

        Raises:
            _BrokenError: the text is not a valid continuation.
        """
        if self._next is _Next.STRING:
            return self._in_string(text)
        begun = text.lstrip()
        if not begun:
            return ""
        if self._next in (_Next.FIRST, _Next.MORE) and begun[0] == self._ends[-1]:
            return self._end(begun[1:])
        if self._next is _Next.MORE:
            if begun[0] != ",":
                raise _BrokenError
            self._written.append(", ")
            self._next = _Next.KEY if self._ends[-1] == "}" else _Next.VALUE
            return begun[1:]
        in_object = self._ends[-1] == "}"
        return self._key(begun) if in_object and self._next is not _Next.VALUE else self._value(begun)

    def _end(self, rest: str) -> str:
        self._written.append(self._ends.pop())
        self._next = _Next.MORE if self._ends else _Next.NOTHING
        return rest

    def _key(self, begun: str) -> str | None:
        key, colon, rest = begun.partition(":")
        if len(key) > _LONGEST_KEY or any(each in key for each in "{}[],"):
            raise _BrokenError
        if not colon:
            return None
        key = key.strip().removeprefix(_QUOTE).removesuffix(_QUOTE)
        if not key:
            raise _BrokenError
        self._written.append(json.dumps(key, ensure_ascii=False) + ": ")
        self._next = _Next.VALUE
        return rest

    def _value(self, begun: str) -> str | None:
        if begun.startswith(_QUOTE):
            self._written.append('"')
            self._next = _Next.STRING
            return begun[len(_QUOTE) :]
        if _QUOTE.startswith(begun):
            return None
        if begun[0] in "{[":
            if len(self._ends) == _DEEPEST:
                raise _BrokenError
            self._written.append(begun[0])
            self._ends.append("}" if begun[0] == "{" else "]")
            self._next = _Next.FIRST
            return begun[1:]
        return self._scalar(begun)

    def _scalar(self, begun: str) -> str | None:
        end = next((index for index, each in enumerate(begun) if each in ",]}"), None)
        if (len(begun) if end is None else end) > _LONGEST_SCALAR or end == 0:
            raise _BrokenError
        if end is None:
            return None
        self._written.append(_as_json(begun[:end].strip()))
        self._next = _Next.MORE
        return begun[end:]

    def _in_string(self, text: str) -> str | None:
        body, end, rest = text.partition(_QUOTE)
        held = 0 if end else partial_suffix(text, (_QUOTE,))
        self._written.append(json.dumps(body[: len(body) - held], ensure_ascii=False)[1:-1])
        if not end:
            return None if held == len(text) else text[len(text) - held :]
        self._written.append('"')
        self._next = _Next.MORE
        return rest


class GemmaCallParser:
    """Parses one answer. Owned by the choice that it belongs to.

    Args:
        judgement: how the tools judge calls.
        known: whether there is a tool of this name.
        parallel: whether more than one call is wanted.

    Attributes:
        ended: the only call that was wanted is complete; further text is ignored.
    """

    def __init__(self, judgement: Judgement, known: Callable[[str], bool], *, parallel: bool = True) -> None:
        self.ended = False
        self._judgement, self._known, self._parallel = judgement, known, parallel
        self._held = ""  # not parsed yet
        self._text = TextBesideCalls()
        self._raw: list[str] = []  # text of a possible call, until it is one
        self._leave()
        self._parts: list[CallPart] = []

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """Parse the next piece of the answer; return final text and parts of calls."""
        text, self._held = self._held + text, ""
        while text and not self.ended:
            rest = self._step(text)
            if rest is None:
                self._held = text
                break
            self._keep(text[: len(text) - len(rest)])
            text = rest
        return self._result()

    def finish(self) -> tuple[str, list[CallPart]]:
        """End the answer; return what was held back. A call that was emitted stands, even if its end is missing."""
        held, self._held = self._held, ""
        if self.ended:
            return self._result()
        if not self._called and self._place is not _Place.TAIL:
            self._fail()
            self._text.say(held)
        self._text.end()
        return self._result()

    def _result(self) -> tuple[str, list[CallPart]]:
        parts, self._parts = self._parts, []
        return self._text.take(), parts

    def _step(self, text: str) -> str | None:
        """Parse some of the text; return the rest, or None if more text is needed first."""
        match self._place:
            case _Place.TEXT:
                return self._in_text(text)
            case _Place.HEAD:
                return self._in_head(text)
            case _Place.ARGUMENTS:
                return self._in_arguments(text)
            case _Place.TAIL:
                return self._in_tail(text)

    # --- text

    def _in_text(self, text: str) -> str | None:
        before, opening, rest = text.partition(_OPENING)
        if opening:
            self._text.say(before)
            self._place, self._raw = _Place.HEAD, [opening]
            self._skips = len(before) + len(opening)  # kept already
            return rest
        final = len(text) - partial_suffix(text, (_OPENING,))
        self._text.say(text[:final])
        return None if final == 0 else text[final:]

    # --- a call

    def _leave(self) -> None:
        self._place = _Place.TEXT
        self._raw = []
        self._skips = 0
        self._name, self._called = "", False
        self._arguments = _Arguments()
        self._whole: list[str] = []  # arguments of a call that does not stream, until it is emitted

    def _keep(self, text: str) -> None:
        if self._place in (_Place.HEAD, _Place.ARGUMENTS) and not self._called:
            self._raw.append(text[self._skips :])
            self._skips = 0

    def _fail(self) -> None:
        """Release what was held back as text: it is not a call. If a call was emitted, only its rest is text."""
        raw = "".join(self._raw)
        self._leave()
        self._text.say(raw)

    def _in_head(self, text: str) -> str | None:
        begun = text.lstrip()
        if not begun:
            return ""
        if _CALL.startswith(begun):
            return None
        found = _NAME.match(begun, len(_CALL)) if begun.startswith(_CALL) else None
        if found is None or found.end() - len(_CALL) > _LONGEST_NAME:
            self._fail()
            return text
        if found.end() == len(begun):
            return None
        if begun[found.end()] != "{" or not self._known(found.group()):
            self._fail()
            return text
        self._name, self._place = found.group(), _Place.ARGUMENTS
        if self._judgement.streams(self._name):
            self._call()
        return begun[found.end() + 1 :]

    def _call(self) -> None:
        self._called, self._raw = True, []
        self._text.call_begins()
        self._parts.append(CallPart(self._name, "", self._text.chars))

    def _in_arguments(self, text: str) -> str | None:
        try:
            rest = self._arguments.step(text)
        except _BrokenError:
            self._emit(self._arguments.take_json())
            self._fail()
            return text
        self._emit(self._arguments.take_json())
        return self._end_arguments(rest, text) if self._arguments.done and rest is not None else rest

    def _end_arguments(self, rest: str, text: str) -> str:
        if not self._called:
            arguments = "".join(self._whole)
            if not self._judgement.accepts(self._name, json.loads(arguments)):
                self._keep(text[: len(text) - len(rest)])
                self._fail()
                return rest
            self._call()
            self._emit(arguments)
        self.ended = not self._parallel
        self._place, self._called = _Place.TAIL, False
        return rest

    def _emit(self, arguments: str) -> None:
        if not self._called:
            self._whole.append(arguments)
        elif not arguments:
            return
        elif self._parts and not self._parts[-1].name:
            self._parts[-1] = CallPart("", self._parts[-1].arguments + arguments)
        else:
            self._parts.append(CallPart("", arguments))

    def _in_tail(self, text: str) -> str | None:
        begun = text.lstrip()
        if not begun:
            return ""
        if _CLOSING.startswith(begun) and begun != _CLOSING:
            return None
        self._leave()
        return begun.removeprefix(_CLOSING)


def _as_json(value: str) -> str:
    """An unquoted value as JSON text: a number, true, false or null, else a string."""
    try:
        text = json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text
