"""A draft model, from its files to one that guesses for another: whether it can, and whether both fit.

Names concrete classes of several rooms, as `loading` and `building` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.contract.clock import SystemClock
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.exec.draft_model import DraftModel
from penstock.exec.free_memory import free_memory
from penstock.exec.kv_store import block_bytes
from penstock.exec.memory_plan import MemoryNeeds, check_fits
from penstock.loading import LoadedModel, PlannedModel, find_model, place_model, plan_model, resolve_choices
from penstock.model_text import open_model_text
from penstock.text import TextModel
from penstock.weights.files import ModelFiles

__all__ = ["drafter_of", "find_draft_model", "load_draft_model"]

_OPTION = "draft_model"
_WHY = "guesses that were wrong could not be taken back"


def find_draft_model(config: EngineConfig, cache_dir: Path | None = None) -> ModelFiles | None:
    """Make sure that the draft model is on disk, and open it; None where the operator wants none.

    Raises:
        SetupError: there is no such model, or its files cannot be used.
    """
    return find_model(replace(config, model=config.draft_model), cache_dir) if config.draft_model else None


def load_draft_model(
    config: EngineConfig, files: ModelFiles, text: TextModel, target: LoadedModel, announce: Callable[[str], None]
) -> LoadedModel:
    """Load the model that guesses for `target`, on the same threads.

    Args:
        config: what the operator chose, for both. `quantization` file is for files that are quantised: a draft model
            whose file is not is then kept as it is.
        files: the draft model's.
        text: the target's.
        target: a model in memory.
        announce: called with each line of the start report.

    Raises:
        ConfigError: it cannot guess for `target`, or does not fit beside it; names `draft_model`.
        SetupError: an option cannot be used with it, or the files lack something.
    """
    if target.program.states or target.program.looks_ahead or target.program.window is not None:
        raise ConfigError(_OPTION, f"nothing can be guessed for {target.files.path}: {_unfit(target)}")
    _check_vocabulary(config, files, text)
    own = replace(config, quantization="auto" if config.quantization == "file" else config.quantization)
    choices = resolve_choices(own, files, target.backend)
    planned = plan_model(replace(own, max_model_len=0), files, choices)
    if planned.program.looks_ahead or planned.program.states:
        what = "only embeds" if planned.program.looks_ahead else f"carries recurrent state: {_WHY}"
        raise ConfigError(_OPTION, f"{files.path} cannot guess: it {what}")
    free = free_memory(target.device)
    check_fits(_OPTION, _needs(config, planned, target), free, ())
    reported: list[str] = []
    loaded = place_model(
        replace(own, model=config.draft_model, max_model_len=0, kv_cache_memory=0), files, choices, reported.append
    )
    announce(f"draft model      {files.path}, {files.num_weights / 1e6:.1f} M weights")
    return loaded


def drafter_of(
    draft: LoadedModel, target: LoadedModel, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> DraftModel:
    """What guesses for a runner of `target` of these sizes; with a KV store of its own."""
    kv, width = draft.kv_store(num_blocks, block_size), target.shape.vocab_size
    return DraftModel(draft.model, kv, max_num_seqs, max_model_len, width, draft.backend, SystemClock())


def _unfit(target: LoadedModel) -> str:
    if target.program.looks_ahead:
        return "it only embeds"
    return f"it carries recurrent state: {_WHY}" if target.program.states else "every layer of it has a window"


def _check_vocabulary(config: EngineConfig, files: ModelFiles, text: TextModel) -> None:
    """Make sure that an id is the same token to both."""
    own, other = open_model_text(config, files.text), text.tokenizer
    sizes = own.tokenizer.vocab_size, other.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            _OPTION, f"{files.path} has a vocabulary of {sizes[0]} tokens, and the model one of {sizes[1]}"
        )
    for token in range(sizes[0]):
        if own.tokenizer.token_bytes(token) != other.token_bytes(token):
            named: Sequence[str] = [repr(each.token_bytes(token)) for each in (own.tokenizer, other)]
            raise ConfigError(
                _OPTION,
                f"{files.path} has another vocabulary: token {token} is {named[0]}, and {named[1]} to the model",
            )


def _needs(config: EngineConfig, planned: PlannedModel, target: LoadedModel) -> MemoryNeeds:
    """Of the draft model, and of the KV caches of both: the target's weights are in memory."""
    needs = planned.needs(config)
    block = block_bytes(target.program.caches, config.block_size, target.kv_dtype) + needs.block
    blocks = max(1, config.kv_cache_memory // block) if config.kv_cache_memory else needs.blocks
    return replace(needs, block=block, blocks=blocks, pages=needs.pages * 2)
