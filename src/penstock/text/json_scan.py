"""Recognises a JSON object or list (RFC 8259) character by character, so that other text is detected at once.

Decides where the value ends, or which character makes it invalid. An escaped lone surrogate is invalid, because it is
not a character. Builds nothing: `json.loads` accepts the finished text. Looks at each character once.
Does not know what the value is for.
Invariant: while the scan is open, some continuation of the text so far is a JSON value.
"""

from __future__ import annotations

import re
from enum import Enum, auto

__all__ = ["JsonScan", "ScanState"]

_DEEPEST = 64
_LONGEST_NUMBER = 1_000  # characters; parsers refuse very long integers, which take quadratic time
_SPACE = " \t\n\r"
_STRING_EVENT = re.compile(r'["\\\x00-\x1f]')
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_HEX_DIGITS = 4
_FIRST_HALVES, _SECOND_HALVES = range(0xD800, 0xDC00), range(0xDC00, 0xE000)  # of surrogate pairs
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

# A number as a table: state -> (character class -> next state). "d" stands for a digit, "z" for zero.
_NUMBER = {
    "-": {"z": "0", "d": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"z": "i", "d": "i", ".": ".", "e": "e"},
    ".": {"z": "f", "d": "f"},
    "f": {"z": "f", "d": "f", "e": "e"},
    "e": {"z": "x", "d": "x", "+": "+", "-": "+"},
    "+": {"z": "x", "d": "x"},
    "x": {"z": "x", "d": "x"},
}
_NUMBER_ENDS = "0ifx"


class ScanState(Enum):
    """Progress of a scan."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


class JsonScan:
    """Scans one value, at most 64 levels deep. Owned by the parser that feeds it."""

    __slots__ = ("_digits", "_expect", "_is_key", "_length", "_number", "_pair", "_rest", "_stack", "state")

    def __init__(self) -> None:
        self.state = ScanState.OPEN
        self._expect = _Expect.VALUE
        self._stack: list[str] = []
        self._is_key = False
        self._rest = ""  # of a literal, still to come
        self._number = ""
        self._length = 0  # of the number
        self._digits = ""  # of the escape
        self._pair = False  # the second half of a surrogate pair must follow

    def take(self, text: str, start: int) -> int:
        """Scan from `start` on; return the index after the value, of the character that broke it, or of the end."""
        at = start
        while at < len(text) and self.state is ScanState.OPEN:
            if self._expect is _Expect.STRING:
                at = self._in_string(text, at)
            elif self._move(text[at]):
                at += 1
            else:
                self.state = ScanState.BROKEN
        return at

    def _in_string(self, text: str, start: int) -> int:
        if self._pair and text[start] != "\\":
            self.state = ScanState.BROKEN
            return start
        event = _STRING_EVENT.search(text, start)
        if event is None:
            return len(text)
        match event.group():
            case '"':
                self._expect = _Expect.COLON if self._is_key else _Expect.COMMA_OR_END
            case "\\":
                self._expect = _Expect.ESCAPE
            case _:
                self.state = ScanState.BROKEN
                return event.start()
        return event.end()

    def _move(self, character: str) -> bool:
        """Scan one character outside plain string text; return whether it is valid there."""
        match self._expect:
            case _Expect.ESCAPE:
                return self._escaped(character)
            case _Expect.HEX:
                return self._hex_digit(character)
            case _Expect.LITERAL:
                return self._literal(character)
            case _Expect.NUMBER:
                return self._in_number(character)
        if character in _SPACE:
            return bool(self._stack)  # the scan starts at the value's first bracket
        match self._expect:
            case _Expect.VALUE:
                return self._value(character)
            case _Expect.VALUE_OR_END:
                return self._close(character) if character == "]" else self._value(character)
            case _Expect.KEY:
                return self._string(character, is_key=True)
            case _Expect.KEY_OR_END:
                return self._close(character) if character == "}" else self._string(character, is_key=True)
            case _Expect.COLON:
                self._expect = _Expect.VALUE
                return character == ":"
            case _:
                return self._comma_or_end(character)

    def _value(self, character: str) -> bool:
        if character in "{[":
            self._stack.append(character)
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
            return len(self._stack) <= _DEEPEST
        if not self._stack:
            return False
        if character in _LITERALS:
            self._expect, self._rest = _Expect.LITERAL, _LITERALS[character]
            return True
        if character == "-" or _digit(character):
            self._expect = _Expect.NUMBER
            self._number = "-" if character == "-" else "0" if character == "0" else "i"
            self._length = 1
            return True
        return self._string(character, is_key=False)

    def _string(self, character: str, *, is_key: bool) -> bool:
        self._expect, self._is_key = _Expect.STRING, is_key
        return character == '"'

    def _escaped(self, character: str) -> bool:
        if character == "u":
            self._expect, self._digits = _Expect.HEX, ""
            return True
        self._expect = _Expect.STRING
        return character in _ESCAPES and not self._pair

    def _hex_digit(self, character: str) -> bool:
        if character not in _HEX:
            return False
        self._digits += character
        if len(self._digits) < _HEX_DIGITS:
            return True
        self._expect = _Expect.STRING
        code, second = int(self._digits, 16), self._pair
        self._pair = not second and code in _FIRST_HALVES
        return (code in _SECOND_HALVES) == second

    def _literal(self, character: str) -> bool:
        expected, self._rest = self._rest[0], self._rest[1:]
        if not self._rest:
            self._expect = _Expect.COMMA_OR_END
        return character == expected

    def _in_number(self, character: str) -> bool:
        kind = "z" if character == "0" else "d" if _digit(character) else character.lower()
        after = _NUMBER[self._number].get(kind)
        if after is not None:
            self._number = after
            self._length += 1
            return self._length <= _LONGEST_NUMBER
        self._expect = _Expect.COMMA_OR_END
        return self._number in _NUMBER_ENDS and self._move(character)

    def _comma_or_end(self, character: str) -> bool:
        if character == ",":
            self._expect = _Expect.KEY if self._stack[-1] == "{" else _Expect.VALUE
            return True
        return self._close(character)

    def _close(self, character: str) -> bool:
        if character != ("}" if self._stack[-1] == "{" else "]"):
            return False
        self._stack.pop()
        self._expect = _Expect.COMMA_OR_END
        if not self._stack:
            self.state = ScanState.DONE
        return True


def _digit(character: str) -> bool:
    return "0" <= character <= "9"
