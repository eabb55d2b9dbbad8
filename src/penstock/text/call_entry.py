"""One call's JSON object, read while it is written: its arguments go on as soon as it is certain that it is a call.

That is certain where the object begins with the name of a tool that streams, then a key for arguments, then `{`, in the
spellings of `_HEAD`; or where the object is the arguments of a tool that was named in front of it. Arguments then go on
exactly as the model writes them. Any other spelling is judged when the object is whole.

Invariants: the arguments let out are the beginning of a JSON object, and all of it where `state` is `DONE`; what is let
out does not depend on how the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.call_values import Accepts, FoundCall, read_call
from penstock.text.json_scan import JsonScan, ScanState

__all__ = ["CallEntry", "Streams"]

Streams = Callable[[str], bool]
"""Whether a call of the tool of this name is one whatever its arguments will be."""

_LONGEST_HEAD = 512  # characters in front of the arguments; a longer head is judged with the whole object
_SPACE = r"[ \t\n\r]*"
_HEAD = re.compile(
    rf'\{{{_SPACE}(?:"type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?(?:"function"{_SPACE}:{_SPACE}\{{{_SPACE})?'
    rf'"name"{_SPACE}:{_SPACE}"([A-Za-z0-9_.-]{{1,64}})"{_SPACE},{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}\{{'
)


class CallEntry:
    """The scan of one object. Owned by the parser that feeds it, from its `{` on.

    Args:
        name: of the tool whose arguments the object is; "" when it names its tool itself.
        accepts: the tools' judgement on a whole object.
        streams: their judgement on a name alone.

    Attributes:
        state: `BROKEN` where it is no call, or a call whose JSON breaks off.
        called: whether it is a call.
    """

    def __init__(self, name: str, accepts: Accepts, streams: Streams) -> None:
        self.state = ScanState.OPEN
        self.called = False
        self._given = name
        self._accepts = accepts
        self._streams = streams
        self._scan = JsonScan()
        self._arguments: JsonScan | None = None  # while they are written
        self._raw: list[str] = []
        self._head = 0  # characters in `_raw`, as long as there is no call
        self._found: list[FoundCall] = []

    @property
    def raw(self) -> str:
        """What it has taken that was not let out: until it is a call, everything."""
        return "".join(self._raw)

    def found(self) -> list[FoundCall]:
        """What is new of the call: first its name, with no arguments; then more of its arguments, with no name."""
        found, self._found = self._found, []
        return found

    def take(self, text: str, at: int) -> int:
        """Take characters from `at` on; where it stopped: after the object, before what broke it, or at the end."""
        if self._arguments is not None:
            return self._take_arguments(self._arguments, text, at)
        start = None if self.called else self._arguments_start(text, at)
        if start is not None:
            return start
        end = self._scan.take(text, at)
        self._raw.append(text[at:end])
        self._head += end - at
        if self._scan.state is ScanState.DONE:
            self._complete()
        elif self._scan.state is ScanState.BROKEN:  # behind arguments, a lacking brace does no harm
            self.state = ScanState.DONE if self.called and not self.raw.strip() else ScanState.BROKEN
        return end

    def _arguments_start(self, text: str, at: int) -> int | None:
        """Where arguments begin from which on this is a call; None where they do not begin in this text."""
        if self._given:
            if self._head or not self._streams(self._given):
                return None
            self._call(self._given)
            return at
        room = _LONGEST_HEAD - self._head
        if room <= 0 or text.find("{", at, at + room) < 0:
            return None
        head = _HEAD.match(self.raw + text[at : at + room])
        if head is None or not self._streams(head[1]):
            return None
        start = at + head.end() - 1 - self._head
        self._scan.take(text[at:start], 0)
        self._call(head[1])
        return start

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
                self._scan.take("{}", 0)  # stands for the arguments, where the object's own scan waits for a value
        return end

    def _complete(self) -> None:
        if self.called:
            self.state = ScanState.DONE
            return
        call = read_call(self.raw, self._given, self._accepts)
        self.called = call is not None
        self.state = ScanState.DONE if self.called else ScanState.BROKEN
        if call is not None:
            self._found += [FoundCall(call.name, ""), FoundCall("", call.arguments)]
