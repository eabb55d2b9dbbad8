"""What a certificate says about the model: the contract of its answers, including the vocabulary of its text side."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property

from penstock.contract.answer_contract import AnswerContract
from penstock.text import TextModel, Tokenizer

__all__ = ["Certifying"]


class Certifying:
    """Certifies the answers of one model. Usable from any thread.

    Args:
        contract: the contract of the model as it is computed, without its tokenizer.
        text: the model's text side.
    """

    def __init__(self, contract: AnswerContract, text: TextModel) -> None:
        self._bare = contract
        self._tokenizer = text.tokenizer

    @cached_property
    def contract(self) -> AnswerContract:
        """The whole contract. The first call takes a tenth of a second for a large vocabulary."""
        return replace(self._bare, tokenizer=_vocabulary_digest(self._tokenizer))


def _vocabulary_digest(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        digest.update(b"%d,%d:%b" % (len(piece), tokenizer.is_special(token_id), piece))
    return digest.hexdigest()
