"""Loads a model that ranks of this host divide: checks that it can be divided and that all shares fit, and loads them.

Names concrete classes of several rooms, as `loading` and `building` do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock import models
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.exec.device import compute_threads
from penstock.exec.free_memory import free_memory
from penstock.exec.memory_plan import MemoryNeeds, check_fits
from penstock.loading import Choices, LoadedModel, PlannedModel, load_model, place_model, plan_model, resolve_choices
from penstock.nn.dividing import divide
from penstock.ranks import DividedModel, RankProcesses
from penstock.weights.divided_binder import DividedBinder
from penstock.weights.files import ModelFiles
from penstock.weights.headers_only import META, HeadersOnly

__all__ = ["RANK_BYTES", "load_on_ranks", "plan_share"]

RANK_BYTES = 192 << 20
"""Memory that a rank's process takes besides its weights, keys and values: measured; most of it is imported code."""

_RANK_PROGRAM = (sys.executable, "-m", "penstock.rank_process")
_OPTION = "tensor_parallel"


def load_on_ranks(config: EngineConfig, files: ModelFiles, announce: Callable[[str], None]) -> LoadedModel:
    """Load a model as `load_model` does; with `tensor_parallel`, load rank 0's share and start the other ranks.

    Raises:
        SetupError: as in `load_model`; or the model or another option cannot be used by several ranks, or one of them
            could not load its share.
    """
    ranks = config.tensor_parallel
    if ranks == 1:
        return load_model(config, files, announce)
    _check_options(config)
    config = replace(config, threads=config.threads or max(1, compute_threads(0) // ranks))
    choices = resolve_choices(config, files)
    if choices.backend.device.type != "cpu":
        raise ConfigError(_OPTION, "is for CPUs so far, and the model runs on CUDA: add --device cpu")
    if plan_model(config, files, choices).program.looks_ahead:
        raise ConfigError(_OPTION, "is for models that generate, and this one only embeds")
    shares = [plan_share(config, files, choices, rank) for rank in range(ranks)]
    check_fits("model", _needs(config, shares), free_memory(choices.backend.device), ())
    processes = RankProcesses(_RANK_PROGRAM, config, files.path)
    try:
        own = place_model(config, files, choices, announce, processes.group)
        processes.await_loaded()
        processes.join()
    except BaseException:
        processes.close()
        raise
    others = tuple(share.program for share in shares[1:])
    return replace(own, ranks=processes, model=DividedModel(own.model, processes), other_shares=others)


def plan_share(config: EngineConfig, files: ModelFiles, choices: Choices, rank: int) -> PlannedModel:
    """Build one rank's program from headers, as `plan_model` does for the whole model.

    Raises:
        ConfigError: the model cannot be shared by so many ranks.
    """
    file = str(files.path)
    binder = DividedBinder(HeadersOnly(files.source), choices.dtype, META, file, weight_format=choices.weight_format)
    whole = models.load(files.config, binder, file, config.max_model_len or None)
    program = divide(whole, rank, config.tensor_parallel, binder)
    loaded = binder.loaded
    return PlannedModel(program, choices, loaded.bytes, binder.packing_bytes, loaded.formats)


def _check_options(config: EngineConfig) -> None:
    """Refuse options that cannot be used with several ranks."""
    for option, wanted, what in (
        ("draft_model", bool(config.draft_model), "draft model"),
        ("lora", bool(config.lora), "adapters"),
        ("lora_dir", bool(config.lora_dir), "adapters"),
    ):
        if wanted:
            raise ConfigError(option, f"several ranks take no {what} so far: leave it out, or set {_OPTION} to 1")
    if os.name != "posix":
        raise ConfigError(_OPTION, "needs a POSIX system")


def _needs(config: EngineConfig, shares: Sequence[PlannedModel]) -> MemoryNeeds:
    """The memory that all ranks need together; all have the same number of blocks, for the same tokens."""
    needs = [share.needs(config) for share in shares]
    block = sum(each.block for each in needs)
    least = needs[0].blocks if not config.kv_cache_memory else max(1, config.kv_cache_memory // block)
    return MemoryNeeds(
        weights=sum(each.weights for each in needs),
        packing=sum(each.packing for each in needs),
        step=sum(each.step for each in needs),
        block=block,
        block_tokens=config.block_size,
        blocks=least,
        pages=sum(each.pages for each in needs),
        angles=sum(each.angles for each in needs),
        processes=(len(shares) - 1) * RANK_BYTES,
    )
