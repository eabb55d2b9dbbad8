"""Computes the keys of a prompt's full blocks, exactly as every replica of a fleet does."""

from __future__ import annotations

from penstock.contract.request import SequenceRequest
from penstock.core.block_keys import KeyChain, root_key

__all__ = ["PromptKeys"]


class PromptKeys:
    """Gives a sequence's keys; no keys if the sequence does not read the cache.

    Args:
        model_digest: identifies the model, as in `SchedulerConfig`.
        block_size: tokens in a block.
    """

    def __init__(self, model_digest: bytes, block_size: int) -> None:
        self._model_digest = model_digest
        self._block_size = block_size

    def __call__(self, sequence: SequenceRequest) -> tuple[bytes, ...]:
        """The keys, from the first block on."""
        if sequence.fresh_prompt:
            return ()
        chain = KeyChain(root_key(self._model_digest, sequence.cache_salt, sequence.adapter_digest), self._block_size)
        chain.follow(sequence.prompt)
        return tuple(chain.keys)
