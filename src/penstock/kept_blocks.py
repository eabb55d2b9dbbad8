"""Decides whether a model's KV blocks are kept beyond the process, where, and under which contract.

Names concrete classes of several rooms, as `loading` and `building` do. The contract is everything that the bits of a
block depend on besides its key: processes with the same contract compute the same bits. If that is not certain, nothing
is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.answer_contract import KV_CONTRACT, compiled_code
from penstock.contract.config import EngineConfig
from penstock.contract.memory import readable_bytes
from penstock.exec.kv_store import KVStore
from penstock.exec.state_store import StateStore
from penstock.loading import LoadedModel
from penstock.store import STATES, BlockStore, default_bytes, open_folder
from penstock.version import __version__

__all__ = ["OpenStore", "contract_of", "open_states", "open_store", "why_not_kept"]


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Stores for a model's blocks, and for its recurrent states if it has any; both within `most_bytes`."""

    blocks: BlockStore
    states: BlockStore | None
    most_bytes: int


def open_store(
    config: EngineConfig, loaded: LoadedModel, kv: KVStore, states: StateStore | None, announce: Callable[[str], None]
) -> OpenStore | None:
    """Open the store that the operator wants; None if it is off, or if it cannot be used: then it announces why.

    A full or failing disk does not prevent serving.
    """
    if config.kv_store in ("off", ""):
        return None
    reason = why_not_kept(config, loaded)
    if reason:
        announce(f"kept KV          none: {reason}")
        return None
    root = Path(config.kv_store)
    try:
        folder = open_folder(root, contract_of(config, loaded), kv.block_size, kv.block_bytes)
        kept_states = None
        if states is not None:
            kept_states = open_states(root, config, loaded, states)
        most = config.kv_store_bytes or default_bytes(root)
    except OSError as error:
        announce(f"kept KV          none: {root} cannot be used: {error.strerror}")
        return None
    blocks, _ = folder.size()
    bound = f"at most {readable_bytes(most)} of the disk (--kv-store off keeps none)"
    announce(f"kept KV          {blocks * kv.block_size} tokens of this model in {root}; {bound}")
    return OpenStore(BlockStore(folder), kept_states, most)


def open_states(root: Path, config: EngineConfig, loaded: LoadedModel, states: StateStore) -> BlockStore:
    """Open the store for recurrent states, in its own folder beside the folder of the store for blocks.

    Raises:
        OSError: the folder cannot be created.
    """
    facts = contract_of(config, loaded) | {"holds": STATES}
    return BlockStore(open_folder(root, facts, config.block_size, states.checkpoint_bytes))


def why_not_kept(config: EngineConfig, loaded: LoadedModel) -> str:
    """Why this model's blocks cannot be kept; "" if they can."""
    program = loaded.program
    if not loaded.backend.exact:
        return "it needs the compiled CPU kernels, whose bits do not depend on what else is computed"
    if loaded.ranks is not None:
        return "each rank has a part of every block"
    if program.looks_ahead or not config.prefix_caching:
        return "there is no prefix cache"
    if program.window is not None:
        return "every layer of the model has a window"
    if os.name != "posix":
        return "it needs a POSIX system"
    return ""


def contract_of(config: EngineConfig, loaded: LoadedModel) -> dict[str, str]:
    """What the bits of a block depend on, in words."""
    return {
        "model": loaded.files.name,
        "files": loaded.files.digest.hex(),
        "weights": f"{config.quantization}: {loaded.weight_formats}",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(loaded.kv_dtype).removeprefix("torch."),
        "max_model_len": str(config.max_model_len),  # some models choose their rotary angles by it
        "isa": f"{loaded.isa}, {torch.backends.cpu.get_cpu_capability()}",
        "penstock": f"{__version__}, {KV_CONTRACT}",
        "kernels": compiled_code(),
        "torch": torch.__version__,
    }
