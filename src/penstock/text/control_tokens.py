"""Keeps user text apart from the chat template's text, so that no message can forge a control token.

Before rendering, every control token spelled inside a message is swapped for one *stand-in*: a private-use character
that occurs nowhere else in the conversation. Being a single character, it survives whatever a template does to its
inputs (trim, split, slices). After rendering, every control token still in the text was written by the template, and
the tokenizer puts the users' spelling back where it can only be ordinary text.

Does not know Jinja or token ids. A template that cuts text out of the middle of a message could still join two harmless
halves into a control token; only a join at the end of a message is guarded.

Invariant: restoring the stand-ins of a rendered chat gives exactly the text that rendering without them would give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from penstock.contract.errors import InvalidParameter

__all__ = ["ControlTokens", "RenderedChat"]

# Supplementary Private Use Area-A (Unicode 16, section 23.5) without its two noncharacters.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_DEEPEST_TREE = 32


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the chat template wrote it.

    Attributes:
        template_text: the rendered text; control tokens in it are the template's own.
        stand_ins: (private-use character in `template_text`, the user's text that it stands for).
    """

    template_text: str
    stand_ins: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The conversation as a reader sees it: every stand-in replaced by what the user wrote."""
        return self.restore(self.template_text)

    def restore(self, part: str) -> str:
        """A part of `template_text` with the users' own spelling."""
        return part.translate({ord(character): written for character, written in self.stand_ins})


class ControlTokens:
    """The strings that act on the model when each is read as one token.

    Args:
        strings: their spellings; empty ones are ignored.
    """

    __slots__ = ("_anywhere", "_beginnings", "_longest")

    def __init__(self, strings: Iterable[str]) -> None:
        distinct = {string for string in strings if string}
        self._anywhere = re.compile(_any_of(distinct))
        self._beginnings = frozenset(string[:length] for string in distinct for length in range(1, len(string)))
        self._longest = max(map(len, self._beginnings), default=0)

    def disarm(self, texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """The texts with control tokens swapped for stand-ins, and what each stand-in means.

        Raises:
            InvalidParameter: the texts use up all private-use characters, so that no stand-in is left.
        """
        free = _unused(texts)
        chosen: dict[str, str] = {}
        disarmed = tuple(self._disarm(text, chosen, free) for text in texts)
        return disarmed, tuple((character, written) for written, character in chosen.items())

    def _disarm(self, text: str, chosen: dict[str, str], free: Iterator[str]) -> str:
        text = self._anywhere.sub(lambda match: _stand_in(match.group(), chosen, free), text)
        start = self._loose_end(text)
        if start is None:
            return text
        return text[:start] + _stand_in(text[start], chosen, free) + text[start + 1 :]

    def _loose_end(self, text: str) -> int | None:
        """Where the end of `text`, trimmed or not, begins a control token that the following text might complete."""
        end = len(text.rstrip())
        starts = range(max(0, end - self._longest), end)
        return next((start for start in starts if text[start:end] in self._beginnings), None)


def _any_of(strings: Iterable[str], depth: int = 0) -> str:
    """A pattern for the longest of the strings, as a tree of their common prefixes.

    A plain alternation would try hundreds of reserved tokens one by one at every `<`. Below the depth that the pattern
    compiler can take, the tree falls back to an alternation.
    """
    longest_first = sorted(strings, key=lambda string: (-len(string), string))
    if not longest_first or depth > _DEEPEST_TREE:
        return f"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})"
    families: dict[str, list[str]] = {}
    for string in longest_first:
        families.setdefault(string[:1], []).append(string)
    ends_here = families.pop("", [])
    branches = [_branch(family, depth) for family in families.values()]
    return f"(?:{'|'.join([*branches, *ends_here[:1]])})"


def _branch(family: Sequence[str], depth: int) -> str:
    start = commonprefix(family)  # noqa: RUF071  (character by character is what is wanted)
    tails = [string[len(start) :] for string in family]
    return re.escape(start) + (_any_of(tails, depth + 1) if any(tails) else "")


def _stand_in(written: str, chosen: dict[str, str], free: Iterator[str]) -> str:
    if written not in chosen:
        character = next(free, None)
        if character is None:
            raise InvalidParameter("messages", "the messages use every private-use character and a control token")
        chosen[written] = character
    return chosen[written]


def _unused(texts: Sequence[str]) -> Iterator[str]:
    used = set().union(*texts)  # runs only when the first stand-in is needed: most conversations need none
    yield from (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
