"""One choice of a request, from token ids to final text: detokenised, with stop strings held back and cut.

Keeps tokens and text in step: a token is released together with the text that it contributed to, and never if its text
is cut off by a stop string. If the request wants it, the remaining text is parsed into reasoning, text and calls. Does
not know the scheduler, threads or HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from penstock.contract.events import ChoiceDelta, FinishReason, TokenPiece
from penstock.contract.plan import TopLogprobs
from penstock.contract.request import StopRules
from penstock.contract.tools import CallPiece, ToolUse
from penstock.engine.token_pieces import token_piece
from penstock.text import Detokenizer, ReplyReader, StopStrings, Tokenizer

__all__ = ["Choice"]


class Choice:
    """Turns the tokens of one choice into deltas. Owned by the engine's step; not thread-safe."""

    def __init__(
        self,
        index: int,
        rules: StopRules,
        tokenizer: Tokenizer,
        reader: ReplyReader | None = None,
        seq_id: str = "",
        prompt: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.generated = 0
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._named = reader is not None and reader.rules.tool_use is ToolUse.NAMED
        self._parser = reader.parser(seq_id) if reader is not None else None
        self._reasoning_starts: list[int] = []  # where each token began, if it may be reasoning
        self._told_tokens = 0
        self._told_reasoning = 0
        spelled: frozenset[int] = reader.spelled if reader is not None else frozenset()
        self._detokenizer = Detokenizer(tokenizer, spelled=spelled, prompt=prompt)
        self._scanner = StopStrings(rules.strings, include=rules.include_stop_string)
        self._plain = not rules.strings and self._parser is None  # then nothing is ever held back
        self._pending: deque[TokenPiece] = deque()  # not released yet
        self._decoded = 0  # characters decoded so far
        self._released = 0  # characters released so far

    @property
    def ended(self) -> bool:
        """Whether the choice was ended by a stop string, or by a call where only one was wanted."""
        return self.matched is not None or (self._parser is not None and self._parser.ended)

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens so far began inside the reasoning."""
        return bisect_left(self._reasoning_starts, self._parser.reasoning_end) if self._parser is not None else 0

    def reason(self, reason: FinishReason) -> FinishReason:
        """Why the choice ended, given why its sequence ended: a stop after calls is reported as calls."""
        called = self._parser is not None and self._parser.called and not self._named
        return FinishReason.TOOL_CALLS if called and reason is FinishReason.STOP else reason

    def push(self, token: int, logprob: float, top: TopLogprobs = (), rank: int = 0) -> ChoiceDelta:
        """Take the next token. After this, `ended` says whether it ended the choice."""
        if self._parser is not None and not self._parser.reasoning_over:
            self._reasoning_starts.append(self._decoded)
        piece = token_piece(self._tokenizer, token, logprob, top, rank, self._decoded)
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        self.generated += 1
        if self._plain:  # nearly every token
            self._released += len(text)
            return ChoiceDelta(self.index, text, (piece,))
        self._pending.append(piece)
        return self._release(self._scan(text))

    def finish(self) -> ChoiceDelta:
        """Release what was held back, because no more tokens will come and no stop string matched."""
        tail = self._detokenizer.flush()
        self._decoded += len(tail)
        text = self._scan(tail)
        if self.matched is None:
            text += self._scanner.flush()
            self._released += len(text)
            return self._delta(text, self._take_all(), last=True)
        return self._release(text)

    def _scan(self, text: str) -> str:
        if self.generated < self._rules.min_tokens:
            return text
        scan = self._scanner.push(text)
        self.matched = scan.matched
        return scan.emit

    def _release(self, text: str) -> ChoiceDelta:
        """Release `text` and the tokens that wrote it; after a match the remaining tokens are dropped."""
        self._released += len(text)
        held_back = self._decoded > self._released or self.matched is not None
        tokens = self._take_written() if held_back else self._take_all()
        if self.matched is not None:
            self._pending.clear()
        return self._delta(text, tokens, last=self.matched is not None)

    def _delta(self, text: str, tokens: tuple[TokenPiece, ...], *, last: bool) -> ChoiceDelta:
        if self._parser is None:
            return ChoiceDelta(self.index, text, tokens)
        piece = self._parser.push(text)
        count = self._newly_reasoning(tokens)
        delta = ChoiceDelta(self.index, piece.text, tokens, piece.reasoning, self._placed(piece.calls), count)
        if not last:
            return delta
        rest = self._parser.finish()
        return delta.then(ChoiceDelta(self.index, rest.text, (), rest.reasoning, self._placed(rest.calls)))

    def _placed(self, calls: tuple[CallPiece, ...]) -> tuple[CallPiece, ...]:
        """The pieces; the first piece of each call gets the number of tokens released so far."""
        return tuple(replace(call, tokens_before=self._told_tokens) if call.id else call for call in calls)

    def _newly_reasoning(self, tokens: Sequence[TokenPiece]) -> int:
        """How many of the released tokens, these included, now turn out to be reasoning."""
        self._told_tokens += len(tokens)
        before, self._told_reasoning = self._told_reasoning, min(self.reasoning_tokens, self._told_tokens)
        return self._told_reasoning - before

    def _take_written(self) -> tuple[TokenPiece, ...]:
        taken = []
        while self._pending and self._pending[0].start < self._released:
            taken.append(self._pending.popleft())
        return tuple(taken)

    def _take_all(self) -> tuple[TokenPiece, ...]:
        taken = tuple(self._pending)
        self._pending.clear()
        return taken
