"""Reads one call's JSON object while it arrives: its arguments are emitted as soon as it is certain to be a call.

It is certain once the object has begun with the name of a tool that streams, a key for arguments and `{`, in the
spellings of `_HEAD`; or if the object is the arguments of a streaming tool that was named before it. Arguments are then
emitted exactly as the model writes them. Any other spelling is judged when the object is complete.

Invariants: the emitted arguments are a prefix of a JSON object, and all of it if `state` is `DONE`; the output does not
depend on how the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.text.call_values import Accepts, FoundCall, read_call
from penstock.text.json_scan import JsonScan, ScanState

__all__ = ["CallEntry", "Judgement"]

ByName = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a request's tools judge calls.

    Attributes:
        accepts: whether there is a tool of this name that accepts these arguments.
        streams: whether a call of this tool is certain before its arguments are known.
        exact: if given, only an object in the spelling `{"name": ..., "arguments": {...}}`, with a name that this
            accepts, can be a call. Any other object is released as soon as it differs.
    """

    accepts: Accepts
    streams: ByName
    exact: ByName | None = None


_LONGEST_HEAD = 512  # characters before the arguments; a longer head is judged with the whole object
_SPACES = " \t\n\r"  # JSON's white space
_SPACE = rf"[{_SPACES}]*"
_EXACT_HEAD = ("{", '"name"', ":", "", ",", '"arguments"', ":", "{")
"""The pieces of the exact spelling, with optional space between them; the empty piece is the name."""
_NAME = re.compile(r'"([A-Za-z0-9_.-]{0,64})("?)')
_HEAD = re.compile(
    rf'\{{{_SPACE}(?:"type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?(?:"function"{_SPACE}:{_SPACE}\{{{_SPACE})?'
    rf'"name"{_SPACE}:{_SPACE}"([A-Za-z0-9_.-]{{1,64}})"{_SPACE},{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}\{{'
)


class CallEntry:
    """Scans one object, from its `{` on. Owned by the parser that feeds it.

    Args:
        name: the tool whose arguments the object is; "" if the object names its tool itself.
        judgement: how the tools judge calls.

    Attributes:
        state: `BROKEN` if the object is not a call, or a call whose JSON is invalid.
        called: whether the object is a call.
    """

    def __init__(self, name: str, judgement: Judgement) -> None:
        self.state = ScanState.OPEN
        self.called = False
        self._given = name
        self._judgement = judgement
        self._head_fits = judgement.exact is None  # whether the head has the exact spelling, if that is needed
        self._scan = JsonScan()
        self._arguments: JsonScan | None = None  # while the arguments arrive
        self._raw: list[str] = []
        self._head = 0  # characters in `_raw`, until the object is known to be a call
        self._found: list[FoundCall] = []

    @property
    def raw(self) -> str:
        """The text taken but not emitted: all of it, until the object is known to be a call."""
        return "".join(self._raw)

    def found(self) -> list[FoundCall]:
        """Take the new parts of the call: first its name without arguments, then arguments without a name."""
        found, self._found = self._found, []
        return found

    def take(self, text: str, at: int) -> int:
        """Scan from `at` on; return the index after the object, of the character that broke it, or of the end."""
        if self._arguments is not None:
            return self._take_arguments(self._arguments, text, at)
        start = None if self.called else self._arguments_start(text, at)
        if start is not None:
            return start
        end = self._scan.take(text, at)
        self._raw.append(text[at:end])
        self._head += end - at
        if not (self._head_fits or self.called) and not self._may_be_call():
            self.state = ScanState.BROKEN
        elif self._scan.state is ScanState.DONE:
            self._complete()
        elif self._scan.state is ScanState.BROKEN:  # after the arguments, a missing brace does no harm
            self.state = ScanState.DONE if self.called and not self.raw.strip() else ScanState.BROKEN
        return end

    def _arguments_start(self, text: str, at: int) -> int | None:
        """If this text makes the object certainly a call, note that and return where its arguments begin; else None."""
        if self._given:
            if self._head or not self._judgement.streams(self._given):
                return None
            self._call(self._given)
            return at
        room = _LONGEST_HEAD - self._head
        if room <= 0 or text.find("{", at, at + room) < 0:
            return None
        head = _HEAD.match(self.raw + text[at : at + room])
        if head is None or not self._judgement.streams(head[1]):
            return None
        start = at + head.end() - 1 - self._head
        self._scan.take(text[at:start], 0)
        self._call(head[1])
        return start

    def _may_be_call(self) -> bool:
        """Whether the object may still have the exact spelling; sets `_head_fits` once its head has it."""
        assert self._judgement.exact is not None
        rest, undecided = self.raw[:_LONGEST_HEAD], self._head <= _LONGEST_HEAD
        for piece in _EXACT_HEAD:
            rest = rest.lstrip(_SPACES)
            if not rest:
                return undecided
            if not piece:
                name = _NAME.match(rest)
                if name is None or not name[2] or not self._judgement.exact(name[1]):
                    return undecided and name is not None and not name[2] and name.end() == len(rest)
                rest = rest[name.end() :]
            elif rest.startswith(piece):
                rest = rest[len(piece) :]
            else:
                return undecided and piece.startswith(rest)
        self._head_fits = True
        return True

    def _exact_call(self) -> FoundCall | None:
        """The complete object as a call, its arguments as they were written; None if it is not a call."""
        head = _HEAD.match(self.raw)
        assert head is not None, "the exact spelling is one of those"
        scan, start = JsonScan(), head.end() - 1
        end = scan.take(self.raw, start)
        if self.raw[end:].strip(_SPACES) != "}":
            return None
        try:
            arguments = json.loads(self.raw[start:end])
        except ValueError:  # an integer of thousands of digits
            return None
        return FoundCall(head[1], self.raw[start:end]) if self._judgement.accepts(head[1], arguments) else None

    def _call(self, name: str) -> None:
        self.called = True
        self._raw = []
        self._arguments = JsonScan()
        self._found.append(FoundCall(name, ""))

    def _take_arguments(self, scan: JsonScan, text: str, at: int) -> int:
        end = scan.take(text, at)
        if end > at:
            self._found.append(FoundCall("", text[at:end]))
        if scan.state is ScanState.BROKEN:
            self.state = ScanState.BROKEN
        elif scan.state is ScanState.DONE:
            self._arguments = None
            if self._given:
                self.state = ScanState.DONE
            else:
                self._scan.take("{}", 0)  # stands in for the arguments: the object's own scan expects a value
        return end

    def _complete(self) -> None:
        if self.called:
            self.state = ScanState.DONE
            return
        call = (
            self._exact_call() if self._judgement.exact else read_call(self.raw, self._given, self._judgement.accepts)
        )
        self.called = call is not None
        self.state = ScanState.DONE if self.called else ScanState.BROKEN
        if call is not None:
            self._found += [FoundCall(call.name, ""), FoundCall("", call.arguments)]
