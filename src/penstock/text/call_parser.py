"""Finds tool calls in an answer that arrives in pieces; whatever turns out not to be a call is text.

Decides where a call begins and ends, by the model's `CallFormat`, and lets it out whole, once its arguments fit the
tool's schema. What may still be a call is held back, nothing else: the first character that makes it impossible
releases all of it as text. Blank space beside a call belongs to the format and is dropped.

Does not know tokens, ids of calls or HTTP. Invariants: each character is looked at a bounded number of times; calls and
text depend on the answer alone, not on how it is cut into pieces.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from penstock.text.call_format import ARGS, CallFormat
from penstock.text.call_values import Accepts, FoundCall, read_calls
from penstock.text.json_scan import JsonScan, ScanState
from penstock.text.reasoning import partial_suffix

__all__ = ["CallParser"]

_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_.-]")
_LONGEST_NAME = 64


class _Place(Enum):
    TEXT = auto()
    HEAD = auto()
    """Between an opening and its JSON."""
    NAME = auto()
    MARK = auto()
    """In the mark between a name and its JSON."""
    JSON = auto()
    TAIL = auto()
    """Between the JSON and the end of the closing."""


class CallParser:
    """Takes one answer apart. Owned by the choice that it belongs to.

    Args:
        form: how the model writes calls.
        accepts: the tools' judgement on a name and arguments.
        parallel: whether more than one call is wanted.
        arguments_of: the answer is to be the arguments of this tool alone; "" when calls carry their names.

    Attributes:
        ended: no further text is wanted, as the only call that was wanted is made.
    """

    def __init__(self, form: CallFormat, accepts: Accepts, *, parallel: bool = True, arguments_of: str = "") -> None:
        self.ended = False
        self._form = form
        self._accepts = accepts
        self._parallel = parallel
        self._arguments_of = arguments_of
        self._opening = re.compile("|".join(map(re.escape, form.openings)) or "(?!)")
        self._gap = re.compile(rf"[\s{re.escape(form.separator)}]*")
        self._place = _Place.TEXT
        self._tail = ""  # may be an opening's beginning
        self._space: list[str] = []  # blank, and text only if no call follows
        self._fresh = True  # so far there was nothing but calls and space
        self._after_call = False
        self._start_unit()
        self._said: list[str] = []
        self._calls: list[FoundCall] = []

    def push(self, text: str) -> tuple[str, list[FoundCall]]:
        """The next piece of the answer: text that is final, and calls that are complete."""
        at = 0
        while at < len(text) and not self.ended:
            at = self._step(text, at)
        return self._result()

    def finish(self) -> tuple[str, list[FoundCall]]:
        """What was held back, when the answer has ended. A call that lacks but its closing is one."""
        if self.ended:
            return self._result()
        if self._place is _Place.TAIL:
            self._complete()
        elif self._place is not _Place.TEXT:
            self._fail()
        self._say(self._tail)
        self._tail = ""
        if not self._after_call:
            self._said += self._space
        self._space = []
        return self._result()

    def _result(self) -> tuple[str, list[FoundCall]]:
        said, calls = "".join(self._said), self._calls
        self._said, self._calls = [], []
        return said, calls

    def _step(self, text: str, at: int) -> int:
        """Take some characters from `at` on; where to go on."""
        match self._place:
            case _Place.TEXT:
                return self._in_text(text, at)
            case _Place.HEAD:
                return self._in_head(text, at)
            case _Place.NAME:
                return self._in_name(text, at)
            case _Place.MARK:
                return self._in_mark(text, at)
            case _Place.JSON:
                return self._in_json(text, at)
            case _Place.TAIL:
                return self._in_tail(text, at)

    # --- text

    def _in_text(self, text: str, at: int) -> int:
        buffer = self._tail + text[at:]
        origin = at - len(self._tail)  # where the buffer begins, in terms of `text`
        self._tail = ""
        bare = self._bare_start(buffer)
        if bare is not None:
            self._say(buffer[:bare])
            self._place = _Place.JSON
            return origin + bare
        opening = self._opening.search(buffer)
        if opening is not None:
            self._say(buffer[: opening.start()])
            self._raw.append(opening.group())
            self._place = _Place.HEAD
            return origin + opening.end()
        final = len(buffer) - partial_suffix(buffer, self._form.openings)
        self._say(buffer[:final])
        self._tail = buffer[final:]
        return len(text)

    def _bare_start(self, buffer: str) -> int | None:
        if not (self._form.bare and self._fresh):
            return None
        begun = self._without_gap(buffer)
        return len(buffer) - len(begun) if begun[:1] in ("{", "[") else None

    def _without_gap(self, text: str) -> str:
        """`text` without what may stand between calls; before the first call, without space."""
        return text[self._gap.match(text).end() :] if self._after_call else text.lstrip()  # type: ignore[union-attr]

    def _say(self, text: str) -> None:
        """Let out text that is no call, but for the space at its end, which a call may follow."""
        if self._after_call:
            text = self._without_gap(text)
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        if not self._after_call:
            self._said += self._space
        self._said.append(body)
        self._space = [text[len(body) :]]
        self._fresh = self._after_call = False

    # --- a call

    def _start_unit(self) -> None:
        self._raw: list[str] = []  # all of what may be a call, as the model wrote it
        self._json: list[str] = []
        self._name: list[str] = []
        self._scan = JsonScan()
        self._marked = 0  # characters of the mark, or of the closing, that have come

    def _in_head(self, text: str, at: int) -> int:
        character = text[at]
        if character in "{[":
            self._place = _Place.JSON
            return at
        if character.isspace():
            self._raw.append(character)
            return at + 1
        if self._form.named and _NAME_CHARACTER.match(character):
            self._place = _Place.NAME
            return at
        return self._fail(at)

    def _in_name(self, text: str, at: int) -> int:
        character = text[at]
        if character == "{":
            self._place = _Place.JSON
            return at
        if character == ARGS[0]:
            self._place = _Place.MARK
            return at
        if not _NAME_CHARACTER.match(character) or len(self._name) >= _LONGEST_NAME:
            return self._fail(at)
        self._name.append(character)
        self._raw.append(character)
        return at + 1

    def _in_mark(self, text: str, at: int) -> int:
        if self._marked == len(ARGS):
            if text[at] != "{":
                return self._fail(at)
            self._place, self._marked = _Place.JSON, 0
            return at
        if text[at] != ARGS[self._marked]:
            return self._fail(at)
        return self._take_mark(text, at)

    def _in_json(self, text: str, at: int) -> int:
        end = self._scan.take(text, at)
        self._raw.append(text[at:end])
        self._json.append(text[at:end])
        if self._scan.state is ScanState.BROKEN:
            return self._fail(end)
        if self._scan.state is ScanState.DONE:
            if self._form.closing:
                self._place = _Place.TAIL
            else:
                self._complete()
        return end

    def _in_tail(self, text: str, at: int) -> int:
        character = text[at]
        if not self._marked and character.isspace():
            self._raw.append(character)
            return at + 1
        if character != self._form.closing[self._marked]:
            return self._fail(at)
        at = self._take_mark(text, at)
        if self._marked == len(self._form.closing):
            self._complete()
        return at

    def _take_mark(self, text: str, at: int) -> int:
        self._raw.append(text[at])
        self._marked += 1
        return at + 1

    def _fail(self, at: int = 0) -> int:
        """It is no call: all of it is text. The character at `at` is looked at anew."""
        raw = "".join(self._raw)
        self._start_unit()
        self._place = _Place.TEXT
        self._say(raw)
        self._fresh = False
        return at

    def _complete(self) -> None:
        found = read_calls("".join(self._json), "".join(self._name) or self._arguments_of, self._accepts)
        if not found:
            self._fail()
            return
        self._calls += found if self._parallel else found[:1]
        self.ended = not self._parallel or bool(self._arguments_of)
        self._start_unit()
        self._place = _Place.TEXT
        self._space = []
        self._after_call = True
