"""Checks stored KV blocks and states by computing them again, from their tokens and all tokens before them.

Names concrete classes of several rooms. A checksum proves only that a file is what was written; this check proves that
the content is right for the model, the kernels and the processor in use now.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.config import EngineConfig
from penstock.contract.plan import Admit, Checkpoint, Row, StepPlan
from penstock.contract.sampling import SamplingSpec
from penstock.core.block_keys import block_key
from penstock.kept_blocks import contract_of, open_states, why_not_kept
from penstock.loading import LoadedModel, find_model, load_model
from penstock.store import BlockStore, Origin, open_folder
from penstock.store.folders import block_files

__all__ = ["StoreVerdict", "verify_store"]

_GREEDY = SamplingSpec((("temperature", 0),))


@dataclass(slots=True)
class StoreVerdict:
    """What the check found, blocks and states counted together.

    Attributes:
        same: how many are equal, bit for bit, to what was computed again.
        different: keys of the blocks and states that differ. There must be none.
        damaged: how many files were not as they were written; they are deleted.
        orphaned: how many lack an earlier block, which was evicted: they are never used, and cannot be computed.
        why_not: why nothing was checked; "" otherwise.
    """

    same: int = 0
    different: tuple[str, ...] = ()
    damaged: int = 0
    orphaned: int = 0
    why_not: str = ""


def verify_store(
    config: EngineConfig, cache_dir: Path, root: Path, count: int, seed: int, announce: Callable[[str], None]
) -> StoreVerdict:
    """Compute `count` blocks of a model again, drawn with `seed`, or all if there are fewer; likewise states.

    Raises:
        SetupError: the model or an option cannot be used.
    """
    loaded = load_model(config, find_model(config, cache_dir), announce)
    if reason := why_not_kept(config, loaded):
        return StoreVerdict(why_not=reason)
    size = config.block_size
    sizes = loaded.kv_store(1, size)
    store = BlockStore(open_folder(root, contract_of(config, loaded), size, sizes.block_bytes))
    state = loaded.state_store(1, 1)
    states = None if state is None else open_states(root, config, loaded, state)
    check, rng = _Check(loaded, config, store), random.Random(seed)  # noqa: S311 (no secret)
    for each in (store, states):
        if each is not None:
            keys = sorted(bytes.fromhex(entry.name) for entry in block_files(each.folder.path))
            for key in rng.sample(keys, min(count, len(keys))):
                check.look_at(key, each)
    verdict = check.verdict
    verdict.damaged = store.damaged + (0 if states is None else states.damaged)
    return verdict


class _Check:
    """Computes blocks and states, one sequence after the other. Owned by `verify_store`."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, store: BlockStore) -> None:
        self.verdict = StoreVerdict()
        self._loaded = loaded
        self._chunk = config.max_num_batched_tokens
        self._store = store
        self._size = config.block_size

    def look_at(self, key: bytes, store: BlockStore) -> None:
        """Compute a block again, or a state if `store` holds states, unless a block before it is missing."""
        found = store.origin(key)
        if found is None:
            return
        origin, content = found
        tokens = self._prefix(origin)
        if tokens is None:
            self.verdict.orphaned += 1
            return
        block, state = self._compute(tokens)
        if block_key(origin.parent, origin.tokens) == key and content == (block if store is self._store else state):
            self.verdict.same += 1
        else:
            self.verdict.different += (key.hex(),)

    def _prefix(self, origin: Origin) -> list[int] | None:
        """All tokens up to the block's last; None if a block before it is missing."""
        parts, parent = [origin.tokens], origin.parent
        for before in reversed(range(origin.before)):
            found = self._store.origin(parent)
            if found is None or found[0].before != before:
                return None
            parts.append(found[0].tokens)
            parent = found[0].parent
        return [token for part in reversed(parts) for token in part]

    def _compute(self, tokens: list[int]) -> tuple[bytes, bytes]:
        """The last block of a sequence of these tokens, and the state after it; b"" for a model without states.

        Computes in separate memory, and in chunks as in serving.
        """
        blocks, states = len(tokens) // self._size, self._loaded.state_store(1, 1)
        kv = self._loaded.kv_store(blocks + 1, self._size)
        runner = self._loaded.runner(kv, 1, len(tokens) + 1, states=states)
        admit = Admit(0, "check", (*tokens, 0), tuple(range(blocks + 1)), 0, _GREEDY, 0)
        for step, start in enumerate(range(0, len(tokens), self._chunk)):
            end = min(start + self._chunk, len(tokens))
            kept = (Checkpoint(end, 0),) if states is not None and end == len(tokens) else ()
            row = Row(0, start, end - start, (), sample=False, checkpoints=kept)
            runner.run(StepPlan(step, (), () if step else (admit,), (row,)))
        return kv.block_content(blocks - 1), b"" if states is None else states.content(0)
