"""Tokens as callers see them: with their bytes, and with the top tokens at their position.

This is the only place where alternatives get their ranks, in the order in which they are listed.
"""

from __future__ import annotations

from penstock.contract.events import TokenPiece
from penstock.contract.plan import TopLogprobs
from penstock.text import Tokenizer

__all__ = ["token_piece"]


def token_piece(
    tokenizer: Tokenizer, token: int, logprob: float, top: TopLogprobs, rank: int, start: int = 0
) -> TokenPiece:
    """Describe `token` and the top tokens at its position."""
    read = tokenizer.token_bytes
    if not top:  # nearly every token
        return TokenPiece(token, read(token), logprob, (), rank, start)
    others = (TokenPiece(other, read(other), its, (), place) for place, (other, its) in enumerate(top, start=1))
    return TokenPiece(token, read(token), logprob, tuple(others), rank, start)
