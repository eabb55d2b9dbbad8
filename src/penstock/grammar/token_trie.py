"""An immutable trie of a vocabulary's tokens by their bytes, for walks that follow many texts at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["TokenTrie"]

_LARGE = 64
"""In a subtree of more nodes than this, it pays to keep the set of its bytes."""


class TokenTrie:
    """The trie as parallel arrays: nodes in preorder, each with the index at which its subtree ends.

    Attributes:
        byte, depth, end, token: per node, its byte, its distance from the root, the first node after its subtree, and
            the id of the token that ends there, or -1.
        longest: length of the longest token in bytes.
        below: per node with a large subtree, the set of bytes below it, one bit each.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.texts = tokens
        self.byte, self.depth = bytearray(1), array("i", [0])
        self.end, self.token = array("i", [0]), array("i", [-1])
        path, last = [0], b""
        for text, id_ in sorted((text, id_) for id_, text in enumerate(tokens) if text):
            same = _common(last, text)
            self._close(path, same + 1)
            for at in range(same, len(text)):
                path.append(len(self.byte))
                self.byte.append(text[at])
                self.depth.append(at + 1)
                self.end.append(0)
                self.token.append(-1)
            if self.token[path[-1]] < 0:  # if two tokens have the same bytes, the lower id counts
                self.token[path[-1]] = id_
            last = text
        self._close(path, 0)
        self.longest = max(self.depth)
        self.below = {node: self._bytes_below(node) for node, end in enumerate(self.end) if end - node > _LARGE}

    def first_token(self, node: int) -> int:
        """The first token in the subtree of `node`."""
        while self.token[node] < 0:
            node += 1
        return self.token[node]

    def _close(self, path: list[int], kept: int) -> None:
        while len(path) > kept:
            self.end[path.pop()] = len(self.byte)

    def _bytes_below(self, node: int) -> int:
        return sum(1 << byte for byte in set(self.byte[node + 1 : self.end[node]]))


def _common(one: bytes, two: bytes) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(two)))
