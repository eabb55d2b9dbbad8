"""The fewest tokens that spell a text of an automaton: breadth first, with every token at every state."""

from __future__ import annotations

from collections.abc import Sequence

from grammar_automaton import Automaton
from grammar_oracle import Documents


class Trie:
    """A vocabulary's tokens by their bytes."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.tokens = [-1]
        for id_, text in enumerate(tokens):
            if text:
                node = 0
                for byte in text:
                    node = self.children[node].setdefault(byte, len(self.tokens))
                    if node == len(self.tokens):
                        self.children.append({})
                        self.tokens.append(-1)
                self.tokens[node] = id_ if self.tokens[node] < 0 else self.tokens[node]


def fewest(documents: Documents, trie: Trie, tokens: Sequence[bytes]) -> list[int]:
    """Tokens of a document with the fewest tokens, without its end token.

    Breadth first: each state is expanded once, where it is first reached, with every token.
    """
    automaton = documents.automaton
    walk = _Walk(automaton, trie)
    level = automaton.closed([documents.start])
    reached, levels, written = set(level), [level], []
    while documents.end not in level:
        found = walk.token_from(level, reached)
        assert found, "no document"
        level = frozenset(found)
        reached |= level
        levels.append(level)
        written.append(found)
    state, ids = documents.end, []
    for before, found in zip(reversed(levels[:-1]), reversed(written), strict=True):
        ids.append(found[state])
        text = tokens[found[state]]
        state = next(one for one in before if state in _after(automaton, one, text))
    return ids[::-1]


def _after(automaton: Automaton, state: int, text: bytes) -> frozenset[int]:
    states = automaton.closed([state])
    for byte in text:
        states = automaton.after(states, byte)
    return states


class _Walk:
    """Sets of states, numbered as they are met; a set's moves are kept."""

    def __init__(self, automaton: Automaton, trie: Trie) -> None:
        self._automaton, self._trie = automaton, trie
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []
        self._rows: list[dict[int, int]] = []

    def token_from(self, states: frozenset[int], reached: set[int]) -> dict[int, int]:
        """Each state that one token leads to and that was not `reached`, with such a token."""
        found: dict[int, int] = {}
        seen: set[int] = set()
        waiting = [(0, self._number(states))]
        children, tokens, rows = self._trie.children, self._trie.tokens, self._rows
        while waiting:
            node, number = waiting.pop()
            row = rows[number]
            for byte, child in children[node].items():
                to = row.get(byte)
                if to is None:
                    to = row[byte] = self._number(self._automaton.after(self._sets[number], byte))
                if to == 0:
                    continue
                if tokens[child] >= 0 and to not in seen:
                    seen.add(to)
                    for state in self._sets[to] - reached:
                        found.setdefault(state, tokens[child])
                waiting.append((child, to))
        return found

    def _number(self, states: frozenset[int]) -> int:
        if not self._numbers:
            self._numbers[frozenset()] = 0
            self._sets.append(frozenset())
            self._rows.append({})
        number = self._numbers.setdefault(states, len(self._sets))
        if number == len(self._sets):
            self._sets.append(states)
            self._rows.append({})
        return number
