"""The prompt as an answer's first output, with its tokens' log probabilities if the request wants them.

Until it is complete, the outputs of all choices are held back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.contract.events import Output, PromptScored, PromptTokens, TokenPiece
from penstock.engine.intake import ResolvedRequest
from penstock.engine.token_pieces import token_piece
from penstock.text import Detokenizer, Tokenizer

__all__ = ["PromptEcho"]


class PromptEcho:
    """Gathers the scores of one prompt. Owned by the engine's step.

    Attributes:
        held: outputs that must come after the prompt, in order.
    """

    def __init__(self, resolved: ResolvedRequest, tokenizer: Tokenizer) -> None:
        self.held: list[Output] = []
        self._resolved = resolved
        self._tokenizer = tokenizer
        self._scores: dict[int, TokenPiece] = {}
        self._scored = _is_scored(resolved)

    @classmethod
    def wanted(cls, resolved: ResolvedRequest) -> bool:
        """Whether the answer begins with the prompt at all."""
        return resolved.echo or _is_scored(resolved)

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its score, or no scores are wanted."""
        return not self._scored or len(self._scores) == self._resolved.prompt_tokens - 1

    def take(self, event: PromptScored) -> None:
        """Take some scores; a position that is computed again gets the same ones."""
        prompt = self._resolved.prompt
        scored = zip(event.logprobs, event.top_logprobs, event.ranks, strict=True)
        for at, (logprob, top, rank) in enumerate(scored, start=event.start):
            self._scores[at] = token_piece(self._tokenizer, prompt[at], logprob, top, rank)

    def output(self) -> PromptTokens:
        """The prompt as an output; call only once it is complete."""
        read, prompt = self._tokenizer.token_bytes, self._resolved.prompt
        unscored = (TokenPiece(token, read(token), math.nan) for token in prompt)
        text = self._resolved.prompt_text or self._decoded(prompt)
        tokens = (self._scores.get(at, piece) for at, piece in enumerate(unscored))
        placed = zip(tokens, self._starts(prompt, text), strict=True)
        return PromptTokens(text, tuple(piece._replace(start=start) for piece, start in placed))

    def _starts(self, prompt: Sequence[int], text: str) -> list[int]:
        """Where each token begins in `text`; the tokenizer may have put tokens in front of it."""
        detokenizer, ends = Detokenizer(self._tokenizer, skip_special_tokens=False), [0]
        pieces = [detokenizer.push(token) for token in prompt]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        added = ends[-1] - len(text) if "".join(pieces).endswith(text) else 0
        return [max(0, start - added) for start in ends[:-1]]

    def _decoded(self, prompt: Sequence[int]) -> str:
        """The prompt's whole characters. The choices return a last character that the prompt only begins."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return text[:-1] if Detokenizer(self._tokenizer, prompt=prompt).unfinished else text


def _is_scored(resolved: ResolvedRequest) -> bool:
    return resolved.sequences[0].sampling.has("prompt_logprobs")
