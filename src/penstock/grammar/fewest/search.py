"""Breadth-first search for the fewest tokens, over sets of states.

Each level is one token. The whole vocabulary is walked once per level, byte by byte, from all states of the level
together, and a state counts only at the level that first reaches it. So the first complete document has the fewest
tokens of all that the pieces describe. Deterministic: the limit counts steps, not seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from penstock.grammar.fewest.parts import Part, Piece
from penstock.grammar.token_trie import TokenTrie

__all__ = ["TooFar", "search_parts"]

Item = TypeVar("Item")

_MOST_STEPS = 8_000_000
"""A step goes from one node of the trie to the next, or from one state to the next. This many take some seconds."""
_DONE = 0


class TooFar(Exception):
    """The search exceeds its limit on steps."""


def search_parts(parts: Iterable[Piece], trie: TokenTrie, most: int) -> tuple[int, ...] | None:
    """Token ids of a document with the fewest tokens; None if none has fewer than `most`.

    Raises:
        TooFar: none was found within the limit on steps.
        Unreadable: a part, once expanded, turned out to use something unsupported.
    """
    states = _States(trie)
    levels, tokens = [states.begin(tuple(parts))], list[dict[int, int]]()
    reached = set(levels[0])
    while _DONE not in levels[-1]:
        found = states.next_level(levels[-1], reached) if len(tokens) + 1 < most else {}
        if not found:
            return None
        tokens.append(found)
        levels.append(frozenset(found))
    return states.way_back(levels, tokens)


class _States:
    """The states of a search, numbered: each is a place in a lexeme and the stack of pieces that follow it."""

    def __init__(self, trie: TokenTrie) -> None:
        self._trie = trie
        self._steps = 0
        self._places = _Numbers[tuple[Any, Any]]()
        self._place_rows: dict[int, dict[int, int]] = {}
        self._may_end = list[bool]()
        self._kin = list[tuple[Any, Any, int]]()
        self._stacks = _Numbers[tuple[Any, int]]()  # a piece and the stack below it
        self._stacks.of((None, 0))  # the empty stack
        self._states = _Numbers[tuple[int, int]]()
        self._states.of((-1, 0))  # the end
        self._entries: dict[int, frozenset[int]] = {}
        self._sets = _Numbers[frozenset[int]]()
        self._sets.of(frozenset())
        self._rows: list[dict[int, int]] = [{}]
        self._idle: dict[int, int] = {}

    def begin(self, pieces: tuple[Piece, ...]) -> frozenset[int]:
        """The states at the beginning of `pieces`."""
        return self._entered(self._pushed(pieces, _DONE))

    def next_level(self, states: frozenset[int], reached: set[int]) -> dict[int, int]:
        """The states first reached by one more token, each with a token that reaches it, reduced to the `_best`.

        Adds all of them to `reached`.
        """
        trie, found, seen = self._trie, dict[int, int](), set[int]()
        byte, depth, end, token, below, rows = trie.byte, trie.depth, trie.end, trie.token, trie.below, self._rows
        sets_at = [self._number(states)] * (trie.longest + 1)
        self._fill(sets_at[0])
        node, last, steps = 1, len(byte), 0
        while node < last:
            steps += 1
            at = depth[node]
            number = sets_at[at - 1]
            to = rows[number].get(byte[node], -1)
            if to < 0:
                to = self._following(number, byte[node])
            if to == 0:
                node = end[node]
                continue
            sets_at[at] = to
            stays = node in below and not below[node] & ~self._idle_bytes(to)
            if to not in seen and (stays or token[node] >= 0):
                seen.add(to)
                id_ = trie.first_token(node)
                for state in self._sets.items[to] - reached:
                    found.setdefault(state, id_)
            node = end[node] if stays else node + 1
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise TooFar
        reached.update(found)
        return self._best(found)

    def _best(self, found: dict[int, int]) -> dict[int, int]:
        """Among states that are kin, keep the one that can do all that the others can."""
        best: dict[Any, tuple[int, int]] = {}
        for state in found:
            place, stack = self._states.items[state]
            lexeme, name, rank = self._kin[place] if place >= 0 else (None, None, 0)
            _, highest = best.setdefault((lexeme, name, stack), (state, rank))
            if rank > highest:
                best[lexeme, name, stack] = state, rank
        return {state: found[state] for state, _ in best.values()}

    def way_back(self, levels: list[frozenset[int]], tokens: list[dict[int, int]]) -> tuple[int, ...]:
        """The tokens that led to the end."""
        state, ids = _DONE, list[int]()
        for before, found in zip(reversed(levels[:-1]), reversed(tokens), strict=True):
            ids.append(found[state])
            text = self._trie.texts[ids[-1]]
            state = next(one for one in sorted(before) if state in self._behind(one, text))
        return tuple(reversed(ids))

    def _behind(self, state: int, text: bytes) -> frozenset[int]:
        states = frozenset([state])
        for byte in text:
            states = self._all_after(states, byte)
        return states

    def _number(self, states: frozenset[int]) -> int:
        number = self._sets.of(states)
        if number == len(self._rows):
            self._rows.append({})
        return number

    def _following(self, number: int, byte: int) -> int:
        to = self._rows[number][byte] = self._number(self._all_after(self._sets.items[number], byte))
        return to

    def _fill(self, number: int) -> None:
        """Compute all transitions of a set at once: cheaper where few bytes are allowed, or nearly all are needed."""
        targets: dict[int, set[int]] = {}
        for state in self._sets.items[number]:
            place, stack = self._states.items[state]
            following = self._following_place(place)
            self._steps += len(following)
            for byte, to in following.items():
                targets.setdefault(byte, set()).update(self._with_end(to, stack))
        row = dict.fromkeys(range(256), 0)
        self._rows[number] = row | {byte: self._number(frozenset(states)) for byte, states in targets.items()}

    def _idle_bytes(self, number: int) -> int:
        """The bytes that leave a set as it is, one bit each; 0 unless the letter e is one, as in a free string."""
        if number not in self._idle:
            is_free = (self._rows[number].get(0x65) or self._following(number, 0x65)) == number
            if is_free:
                self._fill(number)
            same = (byte for byte, to in self._rows[number].items() if to == number) if is_free else ()
            self._idle[number] = sum(1 << byte for byte in same)
        return self._idle[number]

    def _all_after(self, states: frozenset[int], byte: int) -> frozenset[int]:
        self._steps += len(states)
        found = set[int]()
        for state in states:
            place, stack = self._states.items[state]
            to = self._following_place(place).get(byte)
            if to is not None:
                found.update(self._with_end(to, stack))
        return frozenset(found)

    def _following_place(self, place: int) -> dict[int, int]:
        """The place that each byte allowed at `place` leads to."""
        if place < 0:
            return {}
        row = self._place_rows.get(place)
        if row is None:
            lexeme, at = self._places.items[place]
            pairs = ((byte, lexeme.after(at, byte)) for byte in lexeme.candidates(at))
            row = {byte: self._place(lexeme, further) for byte, further in pairs if further is not None}
            self._place_rows[place] = row
        return row

    def _place(self, lexeme: Any, at: Any) -> int:
        place = self._places.of((lexeme, at))
        if place == len(self._may_end):
            self._may_end.append(lexeme.accepts(at))
            self._kin.append((lexeme, *lexeme.kin(at)))
        return place

    def _with_end(self, place: int, stack: int) -> Iterable[int]:
        """The state, and the states that follow it if its lexeme may end there."""
        state = self._states.of((place, stack))
        return (state, *self._entered(stack)) if self._may_end[place] else (state,)

    def _entered(self, stack: int) -> frozenset[int]:
        """The states at the beginning of the pieces on a stack."""
        if stack not in self._entries:
            found, waiting, seen = set[int](), [stack], set[int]()
            while waiting:
                top = waiting.pop()
                if top in seen:
                    continue
                seen.add(top)
                piece, rest = self._stacks.items[top]
                if piece is None:
                    found.add(_DONE)
                elif isinstance(piece, Part):
                    waiting += [self._pushed(way, rest) for way in piece.ways()]
                else:
                    found.update(self._with_end(self._place(piece, piece.start), rest))
            self._entries[stack] = frozenset(found)
        return self._entries[stack]

    def _pushed(self, pieces: tuple[Piece, ...], stack: int) -> int:
        for piece in reversed(pieces):
            stack = self._stacks.of((piece, stack))
        return stack


class _Numbers(Generic[Item]):
    """Items numbered in the order of their first appearance."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._numbers: dict[Item, int] = {}

    def of(self, item: Item) -> int:
        """The item's number; a new one if it has none."""
        number = self._numbers.setdefault(item, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number
