"""The smallest pieces of documents, as automata over bytes: literal text, spaces, strings that meet conditions.

Each is a set of pure functions: `start`, then `after` each byte, which is None if that byte is not allowed. JSON is as
in RFC 8259; of several spellings that it allows, a lexeme accepts those that llguidance does, or fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.grammar.fewest.expression import Expression, Places

__all__ = ["Condition", "Lexeme", "Matching", "Quoted", "Spaces", "Text", "Unlike"]


class Lexeme(Protocol):
    """A terminal piece. Its states are values that only the lexeme itself interprets."""

    start: Any

    def after(self, state: Any, byte: int) -> Any:
        """The state after one more byte; None if the byte is not allowed."""

    def accepts(self, state: Any) -> bool:
        """Whether the piece may end here."""

    def candidates(self, state: Any) -> Iterable[int]:
        """The bytes that are allowed next, and maybe others."""

    def kin(self, state: Any) -> tuple[Any, int]:
        """A group and a rank: within a group, a state can do all that states of lower or equal rank can."""


class Text:
    """Exactly one text."""

    start = 0

    def __init__(self, text: bytes) -> None:
        self._text = text

    def after(self, state: int, byte: int) -> int | None:
        """See `Lexeme`. A state is the number of bytes read."""
        return state + 1 if state < len(self._text) and self._text[state] == byte else None

    def candidates(self, state: int) -> Iterable[int]:
        """See `Lexeme`."""
        return self._text[state : state + 1]

    def accepts(self, state: int) -> bool:
        """See `Lexeme`."""
        return state == len(self._text)

    def kin(self, state: int) -> tuple[int, int]:
        """See `Lexeme`."""
        return state, 0


class Spaces:
    """At most one space."""

    start = 0

    def after(self, state: int, byte: int) -> int | None:
        """See `Lexeme`."""
        return 1 if state == 0 and byte == 0x20 else None

    def candidates(self, _state: int) -> Iterable[int]:
        """See `Lexeme`."""
        return b" "

    def accepts(self, _state: int) -> bool:
        """See `Lexeme`."""
        return True

    def kin(self, state: int) -> tuple[int, int]:
        """See `Lexeme`."""
        return state, 0


class Condition(Protocol):
    """A condition on the text of a string, checked character by character."""

    start: Any

    @property
    def cuts(self) -> frozenset[int]:
        """Code points that may behave unlike the one before; from one cut up to the next, all behave alike."""

    def after(self, place: Any, character: int) -> Any:
        """The place after one more character; falsy if no continuation from there meets the condition."""

    def accepts(self, place: Any) -> bool:
        """Whether the text may end here."""


class Unlike:
    """The text is none of `names`, and none of `expressions` matches it."""

    def __init__(self, names: Iterable[str], expressions: Sequence[Expression]) -> None:
        self._names = frozenset(names)
        self._heads = frozenset(name[:size] for name in self._names for size in range(len(name) + 1))
        self._expressions = expressions
        characters = {ord(character) for name in self._names for character in name}
        self.cuts = frozenset(characters | {one + 1 for one in characters}).union(*(one.cuts for one in expressions))
        self.start: tuple[str | None, tuple[Places, ...]] = (
            "" if self._names else None,
            tuple(e.start for e in expressions),
        )

    def after(
        self, place: tuple[str | None, tuple[Places, ...]], character: int
    ) -> tuple[str | None, tuple[Places, ...]]:
        """See `Condition`."""
        head, places = place
        longer = None if head is None else head + chr(character)
        pairs = zip(self._expressions, places, strict=True)
        return (longer if longer in self._heads else None), tuple(one.after(at, character) for one, at in pairs)

    def accepts(self, place: tuple[str | None, tuple[Places, ...]]) -> bool:
        """See `Condition`."""
        head, places = place
        return head not in self._names and not any(map(Expression.accepts, self._expressions, places))


@dataclass(frozen=True, slots=True)
class _Writing:
    """A state within a text.

    Attributes:
        places: the place in each condition.
        count: how many characters are written, up to the number beyond which more make no difference.
        begun: the bytes written of an unfinished character or escape.
        left: how many bytes are missing of a character that is already known to behave like `character`.
        closed: whether the closing quote is written.
    """

    places: tuple[Any, ...]
    count: int = 0
    begun: bytes = b""
    left: int = 0
    character: int = 0
    closed: bool = False


_CONTROLS = (*range(0x20), 0x7F)
_SHORT = {"b": 8, "t": 9, "n": 10, "f": 12, "r": 13, '"': 0x22, "\\": 0x5C}
_ESCAPES = {b"\\" + letter.encode(): code for letter, code in _SHORT.items()}
_ESCAPES |= {form % code: code for code in _CONTROLS for form in (b"\\u%04x", b"\\u%04X")}
_ESCAPE_BYTES = bytes(sorted({byte for escape in _ESCAPES for byte in escape[1:]}))
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_BEGINNINGS = bytes((*range(0x80), *range(0xC2, 0xF5)))
_ESCAPE_HEADS = sorted({escape[:size] for escape in _ESCAPES for size in range(1, len(escape))})


_COUNTED = 64
"""A text whose maximum exceeds its minimum by this much counts as unbounded: the shortest is hardly ever that long."""


class Matching:
    """An unquoted text that meets all conditions, of `least` to `most` characters."""

    def __init__(self, conditions: Sequence[Condition], least: int = 0, most: int | None = None) -> None:
        self._conditions = conditions
        self._least = least
        self._most = most if most is not None and most - least < _COUNTED else None
        self._cap = least if self._most is None else self._most
        self._cuts = sorted(frozenset({0}).union(*(one.cuts for one in conditions)))
        self._read: dict[bytes, int | None] = {}
        self._heads: set[bytes] = set()  # first bytes of characters that do not all behave alike
        self.start = _Writing(tuple(one.start for one in conditions))

    def after(self, state: _Writing, byte: int) -> _Writing | None:
        """See `Lexeme`."""
        if state.left:
            if byte & 0xC0 != 0x80:
                return None
            return self._behind(state, state.character) if state.left == 1 else replace(state, left=state.left - 1)
        if byte < 0x80 and not state.begun:
            return self._behind(state, byte)
        begun = state.begun + bytes([byte])
        character = self._alike(begun)
        if character is None:
            return replace(state, begun=begun) if begun in self._heads else None
        behind = self._behind(state, character)
        missing = _size(begun) - len(begun)
        return behind if behind is None or not missing else replace(state, begun=b"", left=missing, character=character)

    def candidates(self, state: _Writing) -> Iterable[int]:
        """See `Lexeme`."""
        return _CONTINUATIONS if state.left or state.begun else _BEGINNINGS

    def accepts(self, state: _Writing) -> bool:
        """See `Lexeme`."""
        if state.begun or state.left or state.count < self._least:
            return False
        return all(one.accepts(place) for one, place in zip(self._conditions, state.places, strict=True))

    def kin(self, state: _Writing) -> tuple[Any, int]:
        """See `Lexeme`. Without a maximum, more characters are at least as good as fewer."""
        return (replace(state, count=0), state.count) if self._most is None else (state, 0)

    def _alike(self, begun: bytes) -> int | None:
        """A character that stands for all with the first bytes `begun`; None if they do not all behave alike."""
        if begun not in self._read:
            low, high = (_character(begun, last) for last in (b"\x80", b"\xbf"))
            first = bisect_right(self._cuts, -1 if low is None else low)
            is_one = low is not None and high is not None and bisect_right(self._cuts, high) == first
            self._read[begun] = self._cuts[first - 1] if is_one else None
            if not is_one and (low is not None or high is not None):
                self._heads.add(begun)
        return self._read[begun]

    def _behind(self, state: _Writing, character: int) -> _Writing | None:
        """The state after one more character; None if it is not allowed."""
        if state.count == self._most:
            return None
        pairs = zip(self._conditions, state.places, strict=True)
        places = tuple(one.after(place, character) for one, place in pairs)
        return _Writing(places, min(state.count + 1, self._cap)) if all(places) else None


class Quoted(Matching):
    """A JSON string whose text meets all conditions, of `least` to `most` characters."""

    def __init__(self, conditions: Sequence[Condition] = (), least: int = 0, most: int | None = None) -> None:
        super().__init__(conditions, least, most)
        self.start = replace(self.start, begun=b'"')
        self._escaped_at: dict[bytes, list[int]] = {}  # by head of an escape, one character of each kind
        for head in _ESCAPE_HEADS:
            codes = (code for escape, code in _ESCAPES.items() if escape.startswith(head))
            self._escaped_at[head] = sorted({self._cuts[bisect_right(self._cuts, code) - 1] for code in codes})

    def after(self, state: _Writing, byte: int) -> _Writing | None:
        """See `Lexeme`."""
        if state.closed:
            return None
        if state.begun == b'"':  # the opening quote is missing
            return replace(state, begun=b"") if byte == 0x22 else None
        if state.begun.startswith(b"\\"):
            return self._escaped(state, byte)
        if state.begun or state.left or 0x20 <= byte not in (0x22, 0x5C, 0x7F):
            return super().after(state, byte)
        if byte == 0x22:
            return replace(state, closed=True) if super().accepts(state) else None
        return self._escaped(state, byte) if byte == 0x5C else None

    def candidates(self, state: _Writing) -> Iterable[int]:
        """See `Lexeme`."""
        if state.closed or state.begun == b'"':
            return b"" if state.closed else b'"'
        return _ESCAPE_BYTES if state.begun.startswith(b"\\") else super().candidates(state)

    def accepts(self, state: _Writing) -> bool:
        """See `Lexeme`."""
        return state.closed

    def _escaped(self, state: _Writing, byte: int) -> _Writing | None:
        begun = state.begun + bytes([byte])
        if begun in _ESCAPES:
            return self._behind(state, _ESCAPES[begun])
        is_useful = any(self._behind(state, code) for code in self._escaped_at.get(begun, ()))
        return replace(state, begun=begun) if is_useful else None


def _size(begun: bytes) -> int:
    """Length in bytes of the UTF-8 character that begins with `begun` (RFC 3629, section 3)."""
    return 2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4


def _character(begun: bytes, last: bytes) -> int | None:
    """The character that begins with `begun` and continues with `last` only; None if there is none."""
    try:
        return ord((begun + last * (_size(begun) - len(begun))).decode())
    except UnicodeDecodeError:
        return None
