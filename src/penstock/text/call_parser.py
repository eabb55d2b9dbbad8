"""Finds tool calls in a streamed answer; whatever turns out not to be a call is text.

Decides where a call begins and ends, by the model's `CallFormat`. Only text that may still be a call is held back: the
first character that rules a call out releases all of it as text. Once a call is certain, its arguments are emitted as
they arrive (`CallEntry`). Each entry of a list is judged by itself. White space next to a call belongs to the format
and is dropped.

Does not know tokens, call ids or HTTP. Invariants: each character is looked at a bounded number of times; calls and
text depend on the answer alone, not on how it is cut into pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from penstock.text.call_entry import CallEntry, Judgement
from penstock.text.call_format import CallFormat
from penstock.text.json_scan import ScanState
from penstock.text.reasoning import partial_suffix

__all__ = ["CallParser", "CallPart"]

_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_.-]")
_LONGEST_NAME = 64
_SPACE = " \t\n\r"  # JSON's white space


class _Place(Enum):
    TEXT = auto()
    HEAD = auto()
    """Between an opening and its JSON."""
    NAME = auto()
    MARK = auto()
    """In the mark between a name and its JSON, or in the mark before an id."""
    ID = auto()
    """In the id between a name and its JSON."""
    ENTRY = auto()
    """In a call's JSON object."""
    LIST = auto()
    """In a list of such objects, between two of them."""
    TAIL = auto()
    """Between the JSON and the end of the closing."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call: first its name, then its arguments without a name.

    Attributes:
        text_before: with a name: number of characters of the answer's text before the call.
    """

    name: str
    arguments: str
    text_before: int = 0


class CallParser:
    """Parses one answer. Owned by the choice that it belongs to.

    Args:
        form: how the model writes calls.
        judgement: how the tools judge calls.
        parallel: whether more than one call is wanted.
        arguments_of: the tool whose arguments are the whole answer; "" if calls name their tools.

    Attributes:
        ended: the only call that was wanted is complete; further text is ignored.
    """

    def __init__(
        self,
        form: CallFormat,
        judgement: Judgement,
        *,
        parallel: bool = True,
        arguments_of: str = "",
    ) -> None:
        self.ended = False
        self._form = form
        self._judgement = judgement
        self._parallel = parallel
        self._arguments_of = arguments_of
        self._opening = re.compile("|".join(map(re.escape, form.openings)) or "(?!)")
        self._gap = re.compile(rf"(?:\s|{re.escape(form.separator)})*" if form.separator else r"\s*")
        self._marks = (*form.openings, form.separator) if form.separator else form.openings
        self._place = _Place.TEXT
        self._tail = ""  # may be the start of an opening
        self._space: list[str] = []  # white space, emitted only if no call follows
        self._fresh = True  # nothing but white space so far
        self._after_call = False
        self._start_unit()
        self._said: list[str] = []
        self._said_chars = 0
        self._parts: list[CallPart] = []

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """Parse the next piece of the answer; return final text and parts of calls."""
        at = 0
        while at < len(text) and not self.ended:
            at = self._step(text, at)
        return self._result()

    def finish(self) -> tuple[str, list[CallPart]]:
        """End the answer; return what was held back. A call that was emitted stands, even if its end is missing."""
        if self.ended:
            return self._result()
        if self._place is not _Place.TEXT and not self._only_syntax_lacks():
            self._fail()
        self._say(self._tail)
        self._tail = ""
        if not self._after_call:
            self._let_out(self._space)
        self._space = []
        return self._result()

    def _only_syntax_lacks(self) -> bool:
        if self._place is _Place.ENTRY:
            return self._entry.called
        return self._place in (_Place.TAIL, _Place.LIST) and self._unit_called

    def _result(self) -> tuple[str, list[CallPart]]:
        said, parts = "".join(self._said), self._parts
        self._said, self._parts = [], []
        return said, parts

    def _step(self, text: str, at: int) -> int:
        """Parse some characters from `at` on; return where to continue."""
        match self._place:
            case _Place.TEXT:
                return self._in_text(text, at)
            case _Place.HEAD:
                return self._in_head(text, at)
            case _Place.NAME:
                return self._in_name(text, at)
            case _Place.MARK:
                return self._in_mark(text, at)
            case _Place.ID:
                return self._in_id(text, at)
            case _Place.ENTRY:
                return self._in_entry(text, at)
            case _Place.LIST:
                return self._in_list(text, at)
            case _Place.TAIL:
                return self._in_tail(text, at)

    # --- text

    def _in_text(self, text: str, at: int) -> int:
        buffer = self._tail + text[at:]
        origin = at - len(self._tail)  # the buffer's start, as an index into `text`
        self._tail = ""
        bare = self._bare_start(buffer)
        if bare is not None:
            self._say(buffer[:bare])
            return self._begin_json(buffer[bare], origin + bare)
        opening = self._opening.search(buffer)
        if opening is not None:
            self._say(buffer[: opening.start()])
            self._raw.append(opening.group())
            self._place = _Place.HEAD
            return origin + opening.end()
        final = len(buffer) - partial_suffix(buffer, self._marks)
        self._say(buffer[:final])
        self._tail = buffer[final:]
        return len(text)

    def _bare_start(self, buffer: str) -> int | None:
        if not (self._form.bare and self._fresh):
            return None
        begun = self._without_gap(buffer)
        return len(buffer) - len(begun) if begun[:1] in ("{", "[") else None

    def _without_gap(self, text: str) -> str:
        """`text` without its leading white space; directly after a call, also without separators."""
        return text[self._gap.match(text).end() :] if self._after_call else text.lstrip()  # type: ignore[union-attr]

    def _say(self, text: str) -> None:
        """Emit text outside calls; hold back white space at its end, because a call may follow."""
        if self._after_call:
            text = self._without_gap(text)
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        if not self._after_call:
            self._let_out(self._space)
        self._let_out([body])
        self._space = [text[len(body) :]]
        self._fresh = self._after_call = False

    def _let_out(self, texts: list[str]) -> None:
        self._said += texts
        self._said_chars += sum(map(len, texts))

    # --- a call

    def _start_unit(self) -> None:
        self._raw: list[str] = []  # text of a possible call, before the entry that is being read
        self._name: list[str] = []
        self._entry = self._new_entry()
        self._listed = False
        self._wants_entry = False  # in a list: after its bracket, or a comma
        self._unit_called = False
        self._mark = ""  # what has arrived of the mark after a name, or of the mark before an id
        self._id: int | None = None  # characters of the id that have arrived; None before its mark
        self._marked = 0  # characters of the closing that have arrived

    def _new_entry(self) -> CallEntry:
        return CallEntry("".join(self._name) or self._arguments_of, self._judgement)

    def _in_head(self, text: str, at: int) -> int:
        character = text[at]
        if character in "{[":
            return self._begin_json(character, at)
        if character.isspace():
            self._raw.append(character)
            return at + 1
        if self._form.mark and _NAME_CHARACTER.match(character):
            self._place = _Place.NAME
            return at
        return self._fail(at)

    def _in_name(self, text: str, at: int) -> int:
        character = text[at]
        if character == "{":
            return self._begin_json(character, at)
        if character == self._form.mark[0]:
            self._place = _Place.MARK
            return at
        if not _NAME_CHARACTER.match(character) or len(self._name) >= _LONGEST_NAME:
            return self._fail(at)
        self._name.append(character)
        self._raw.append(character)
        return at + 1

    def _in_mark(self, text: str, at: int) -> int:
        form, mark = self._form, self._mark + text[at]
        if self._mark == form.mark:
            return self._begin_json(text[at], at) if text[at] == "{" else self._fail(at)
        if not form.mark.startswith(mark) and not (self._id is None and form.id_mark.startswith(mark)):
            return self._fail(at)
        self._raw.append(text[at])
        self._mark = mark
        if mark == form.id_mark:
            self._place, self._mark, self._id = _Place.ID, "", 0
        return at + 1

    def _in_id(self, text: str, at: int) -> int:
        assert self._id is not None, "its mark has come"
        if text[at] == self._form.mark[0] and self._id:
            self._place = _Place.MARK
            return at
        if not _NAME_CHARACTER.match(text[at]) or self._id >= _LONGEST_NAME:
            return self._fail(at)
        self._id += 1
        self._raw.append(text[at])
        return at + 1

    def _begin_json(self, bracket: str, at: int) -> int:
        """Begin the object or list at `at`."""
        if bracket == "{":
            self._place, self._entry = _Place.ENTRY, self._new_entry()
            return at
        if self._arguments_of:
            return self._fail(at)
        self._place, self._listed, self._wants_entry = _Place.LIST, True, True
        self._raw.append(bracket)
        return at + 1

    def _in_list(self, text: str, at: int) -> int:
        character = text[at]
        if self._wants_entry and character == "{":
            return self._begin_json(character, at)
        if character == "]" and not self._wants_entry:
            self._end_unit()
            return at + 1
        if character == "," and not self._wants_entry:
            self._wants_entry = True
        elif character not in _SPACE:
            return self._fail(at)
        self._raw.append(character)
        return at + 1

    def _in_entry(self, text: str, at: int) -> int:
        entry = self._entry
        end = entry.take(text, at)
        for found in entry.found():
            self._add(found.name, found.arguments)
        if entry.state is ScanState.OPEN:
            return end
        if entry.called and (not self._parallel or self._arguments_of):
            self.ended = True
            return end
        if entry.state is ScanState.BROKEN:
            return self._fail(end)
        self._raw = []
        if self._listed:
            self._place, self._wants_entry, self._entry = _Place.LIST, False, self._new_entry()
        else:
            self._end_unit()
        return end

    def _add(self, name: str, arguments: str) -> None:
        """Emit a part of a call."""
        if name:
            self._raw, self._space = [], []
            self._after_call = self._unit_called = True
            self._parts.append(CallPart(name, "", self._said_chars))
        elif self._parts and not self._parts[-1].name:
            self._parts[-1] = CallPart("", self._parts[-1].arguments + arguments)
        else:
            self._parts.append(CallPart("", arguments))

    def _end_unit(self) -> None:
        """End the JSON; it held a call."""
        self._start_unit()
        self._unit_called = True
        self._place = _Place.TAIL if self._form.closing else _Place.TEXT

    def _in_tail(self, text: str, at: int) -> int:
        character = text[at]
        if not self._marked and character.isspace():
            self._raw.append(character)
            return at + 1
        if character != self._form.closing[self._marked]:
            return self._fail(at)
        at = self._take_mark(text, at)
        if self._marked == len(self._form.closing):
            self._start_unit()
            self._place = _Place.TEXT
        return at

    def _take_mark(self, text: str, at: int) -> int:
        self._raw.append(text[at])
        self._marked += 1
        return at + 1

    def _fail(self, at: int = 0) -> int:
        """Release what was held back as text: it is not a call. Parsing resumes with the character at `at`."""
        raw = "".join(self._raw) + self._entry.raw
        self._start_unit()
        self._place = _Place.TEXT
        self._say(raw)
        self._fresh = False
        return at
