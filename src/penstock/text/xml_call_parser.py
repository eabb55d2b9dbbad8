"""Finds tool calls whose arguments are tagged one by one: the format of Qwen3-Coder and Qwen 3.5.

A call is `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`. A line break at either
end of a value is not part of it; the outer tags may be missing. Values have no quotes: if the schema says that a
parameter is a string, the value is taken as it is; any other value is read as JSON, or as a string if it is not JSON.

Text that may still be a call is held back, as in `CallParser`. If the named tool streams (`Judgement.streams`), its
name makes the call certain, and arguments are emitted as JSON from then on, strings as they arrive; a call of any
other tool is emitted when it is complete. Does not know tokens or call ids. Invariant: calls and text depend on the
answer alone, not on how it is cut into pieces.
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

__all__ = ["XML_CALL_TAGS", "TakesText", "XmlCallParser"]

TakesText = Callable[[str, str], bool]
"""(tool, parameter) -> whether the parameter's value is a string, whatever the model writes."""

_OUTER, _OUTER_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

XML_CALL_TAGS = (_OUTER, _OUTER_END, _FUNCTION_END, _PARAMETER_END)
"""Tags for which a vocabulary may have control tokens."""

_OPENING = re.compile(f"{_OUTER}|{_FUNCTION}")
_OPENINGS = (_OUTER, _FUNCTION)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LONGEST_NAME = 256


class _Place(Enum):
    TEXT = auto()
    OPENED = auto()
    """After the outer opening tag."""
    NAME = auto()
    BODY = auto()
    """In a function, between its parameters."""
    KEY = auto()
    VALUE = auto()
    TAIL = auto()
    """Between the function's closing tag and the outer one."""


class XmlCallParser:
    """Parses one answer. Owned by the choice that it belongs to.

    Args:
        judgement: how the tools judge calls.
        takes_text: whether a tool's parameter is a string.
        known: whether there is a tool of this name.
        parallel: whether more than one call is wanted.

    Attributes:
        ended: the only call that was wanted is complete; further text is ignored.
    """

    def __init__(
        self, judgement: Judgement, takes_text: TakesText, known: Callable[[str], bool], *, parallel: bool = True
    ) -> None:
        self.ended = False
        self._judgement, self._takes_text, self._known = judgement, takes_text, known
        self._parallel = parallel
        self._place = _Place.TEXT
        self._held = ""  # not parsed yet
        self._text = TextBesideCalls()
        self._begin_unit()
        self._parts: list[CallPart] = []

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """Parse the next piece of the answer; return final text and parts of calls."""
        text, self._held = self._held + text, ""
        while text and not self.ended:
            rest = self._step(text)
            if rest is None:
                self._held = text
                break
            text = rest
        return self._result()

    def finish(self) -> tuple[str, list[CallPart]]:
        """End the answer; return what was held back. A call that was emitted stands, even if its end is missing."""
        held, self._held = self._held, ""
        if self.ended:
            return self._result()
        if self._place is _Place.TEXT or not (self._called or self._place is _Place.TAIL):
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
            case _Place.OPENED:
                return self._expect(text, {_FUNCTION: _Place.NAME})
            case _Place.NAME:
                return self._in_name(text)
            case _Place.BODY:
                return self._expect(text, {_PARAMETER: _Place.KEY, _FUNCTION_END: _Place.TAIL})
            case _Place.KEY:
                return self._in_key(text)
            case _Place.VALUE:
                return self._in_value(text)
            case _Place.TAIL:
                return self._expect(text, {_OUTER_END: _Place.TEXT}) if self._outer else self._leave(text)

    def _begin_unit(self) -> None:
        self._raw: list[str] = []  # text of a possible call, until it is one
        self._outer = False
        self._name = self._key = ""
        self._called = False
        self._arguments: list[str] = []  # of a call that does not stream, until it is emitted
        self._count = 0
        self._value: list[str] = []  # of a parameter that is not a string
        self._fresh = False  # the value has not begun

    # --- text

    def _in_text(self, text: str) -> str | None:
        opening = _OPENING.search(text)
        if opening is None:
            final = len(text) - partial_suffix(text, _OPENINGS)
            self._text.say(text[:final])
            return None if final < len(text) and not final else self._hold(text[final:])
        self._text.say(text[: opening.start()])
        self._begin_unit()
        self._raw.append(opening.group())
        self._outer = opening.group() == _OUTER
        self._place = _Place.OPENED if self._outer else _Place.NAME
        return text[opening.end() :]

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def _fail(self) -> None:
        """Release what was held back as text: it is not a call. If a call was emitted, only its rest is text."""
        raw = "".join(self._raw)
        self._begin_unit()
        self._place = _Place.TEXT
        self._text.say(raw)

    # --- a call

    def _keep(self, text: str) -> None:
        if not self._called:
            self._raw.append(text)

    def _expect(self, text: str, tags: dict[str, _Place]) -> str | None:
        """Parse white space, then one of the tags; anything else is not a call, or ends one that only lacks a tag."""
        begun = text.lstrip()
        for tag, place in tags.items():
            if begun.startswith(tag):
                self._keep(text[: len(text) - len(begun) + len(tag)])
                self._place = place
                if place is _Place.TAIL:
                    self._end_function()
                elif place is _Place.TEXT:
                    self._begin_unit()
                return begun[len(tag) :]
        if any(tag.startswith(begun) for tag in tags):
            return None
        if self._place is _Place.TAIL:
            return self._leave(text)
        self._fail()
        return text

    def _in_name(self, text: str) -> str | None:
        name, end, rest = text.partition(">")
        if not end and len(name) <= _LONGEST_NAME and "<" not in name:
            return None
        if not end or not _NAME.fullmatch(name) or not self._known(name):
            self._fail()
            return text
        self._keep(name + end)
        self._name, self._place = name, _Place.BODY
        if self._judgement.streams(name):
            self._call()
        self._emit("{")
        return rest

    def _call(self) -> None:
        self._called, self._raw = True, []
        self._text.call_begins()
        self._parts.append(CallPart(self._name, "", self._text.chars))

    def _in_key(self, text: str) -> str | None:
        key, end, rest = text.partition(">")
        if not end and len(key) <= _LONGEST_NAME:
            return None
        if not end or not key or len(key) > _LONGEST_NAME:
            self._fail()
            return text
        self._keep(key + end)
        self._key, self._place, self._value, self._fresh = key, _Place.VALUE, [], True
        if self._takes_text(self._name, key):
            self._emit_key()
            self._emit('"')
        return rest

    def _in_value(self, text: str) -> str | None:
        if self._fresh:
            if text[0] == "\n":
                self._keep("\n")
            self._fresh = False
            return text.removeprefix("\n") or self._hold("")
        value, end, rest = text.partition(_PARAMETER_END)
        if not end:
            held = partial_suffix(text, ("\n" + _PARAMETER_END, _PARAMETER_END))
            self._more_value(text[: len(text) - held])
            return None if held == len(text) else self._hold(text[len(text) - held :])
        self._more_value(value.removesuffix("\n"))
        self._keep(("\n" if value.endswith("\n") else "") + end)
        self._end_value()
        return rest

    def _more_value(self, text: str) -> None:
        self._keep(text)
        if self._takes_text(self._name, self._key):
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._place = _Place.BODY
        if self._takes_text(self._name, self._key):
            self._emit('"')
        else:
            self._emit_key()
            self._emit(_as_json("".join(self._value)))

    def _emit_key(self) -> None:
        self._emit(", " if self._count else "")
        self._emit(json.dumps(self._key, ensure_ascii=False) + ": ")
        self._count += 1

    def _emit(self, arguments: str) -> None:
        if not self._called:
            self._arguments.append(arguments)
        elif not arguments:
            return
        elif self._parts and not self._parts[-1].name:
            self._parts[-1] = CallPart("", self._parts[-1].arguments + arguments)
        else:
            self._parts.append(CallPart("", arguments))

    def _end_function(self) -> None:
        self._emit("}")
        if not self._called:
            arguments = "".join(self._arguments)
            if not self._judgement.accepts(self._name, json.loads(arguments)):
                self._fail()
                return
            self._call()
            self._emit(arguments)
        self._called = False  # the call is over; nothing of it is held back
        self.ended = not self._parallel

    def _leave(self, text: str) -> str:
        """End a call that has no outer closing tag."""
        self._begin_unit()
        self._place = _Place.TEXT
        return text


def _as_json(value: str) -> str:
    """A value as JSON text: unchanged in meaning if it is JSON, else as a JSON string."""
    try:
        text = json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):  # not JSON, or JSON that cannot be passed on
        return json.dumps(value, ensure_ascii=False)
    return text
