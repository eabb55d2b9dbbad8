"""One choice of one ask, from token ids to final text: detokenised, with stop strings held back and cut.

Keeps tokens and text in step: a token is let out together with the text that it contributed to, and a token whose text
is cut off by a stop string is never let out. Knows nothing of the scheduler, threads or HTTP.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.contract.events import ChoiceDelta, TokenPiece
from penstock.contract.plan import Alternatives
from penstock.contract.request import StopRules
from penstock.text import Detokenizer, StopStrings, Tokenizer

__all__ = ["Choice"]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A token not let out yet, and where its text begins in the text of the choice."""

    piece: TokenPiece
    start: int


class Choice:
    """Turns the tokens of one choice into deltas. Owned by the engine's step; not thread-safe."""

    def __init__(self, index: int, rules: StopRules, tokenizer: Tokenizer) -> None:
        self.index = index
        self.generated = 0
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopStrings(rules.strings, include=rules.include_stop_string)
        self._pending: deque[_Pending] = deque()
        self._decoded = 0  # characters decoded so far
        self._released = 0  # characters let out so far

    def push(self, token: int, logprob: float, top: Alternatives = ()) -> ChoiceDelta:
        """Take the next token. After this, `matched` says whether a stop string ended the choice."""
        read = self._tokenizer.token_bytes
        piece = TokenPiece(token, read(token), logprob, tuple(TokenPiece(id_, read(id_), its) for id_, its in top))
        self._pending.append(_Pending(piece, self._decoded))
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        self.generated += 1
        return self._release(self._scan(text))

    def finish(self) -> ChoiceDelta:
        """Let out what was held back, because no more tokens will come and no stop string matched."""
        tail = self._detokenizer.flush()
        self._decoded += len(tail)
        text = self._scan(tail)
        if self.matched is None:
            text += self._scanner.flush()
            self._released += len(text)
            return ChoiceDelta(self.index, text, self._take_all())
        return self._release(text)

    def _scan(self, text: str) -> str:
        if self.generated < self._rules.min_tokens:
            return text
        scan = self._scanner.push(text)
        self.matched = scan.matched
        return scan.emit

    def _release(self, text: str) -> ChoiceDelta:
        """Let out `text` and the tokens that wrote it; after a match the rest of the tokens is dropped."""
        self._released += len(text)
        held_back = self._decoded > self._released or self.matched is not None
        tokens = self._take_written() if held_back else self._take_all()
        if self.matched is not None:
            self._pending.clear()
        return ChoiceDelta(self.index, text, tokens)

    def _take_written(self) -> tuple[TokenPiece, ...]:
        taken = []
        while self._pending and self._pending[0].start < self._released:
            taken.append(self._pending.popleft().piece)
        return tuple(taken)

    def _take_all(self) -> tuple[TokenPiece, ...]:
        taken = tuple(entry.piece for entry in self._pending)
        self._pending.clear()
        return taken
