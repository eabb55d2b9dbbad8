"""Loads what guesses for a model: a draft model, an EAGLE-3 head, or the model's own predictor.

Checks that it can guess for its target, and that both fit in memory. Names concrete classes of several rooms, as
`loading` and `building` do.
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
from penstock.exec.predictor import PredictingDrafter
from penstock.exec.start_report import weight_formats
from penstock.kernels.cpu_backend import CpuBackend
from penstock.loading import LoadedModel, PlannedModel, executor, find_model, place_model, plan_model, resolve_choices
from penstock.model_text import open_model_text
from penstock.models.config_reader import ConfigReader
from penstock.models.eagle3 import is_eagle3, load_eagle3, tapped_layers
from penstock.nn.program import tapping
from penstock.text import TextModel
from penstock.weights.bind import Binder
from penstock.weights.files import ModelFiles
from penstock.weights.headers_only import META, HeadersOnly

__all__ = ["drafter_of", "find_draft_model", "load_guesser"]

_OPTION = "draft_model"


def find_draft_model(config: EngineConfig, cache_dir: Path | None = None) -> ModelFiles | None:
    """Download the draft model if it is not on disk, and open it; None if the operator wants no draft model.

    Raises:
        SetupError: there is no such model, or its files cannot be used.
    """
    return find_model(replace(config, model=config.draft_model), cache_dir) if config.draft_model else None


def load_guesser(
    config: EngineConfig,
    files: ModelFiles | None,
    text: TextModel,
    target: LoadedModel,
    announce: Callable[[str], None],
) -> tuple[LoadedModel, LoadedModel | None]:
    """Load the draft model or EAGLE-3 head of `target`, on the same threads, or find the target's own predictor.

    Args:
        config: the operator's options, for both models. `quantization=file` means `auto` for the draft model, whose
            file need not be quantised.
        files: the draft model's files; None if the operator wants no draft model.
        text: the target's tokenizer and formats.
        target: the loaded model that it guesses for.
        announce: called with each line of the start report.

    Returns:
        The target, which for an EAGLE-3 head hands out hidden states, and the guesser, or None.

    Raises:
        ConfigError: the guesser cannot guess for `target`, or does not fit in memory beside it; names `draft_model`.
        SetupError: an option cannot be used with the guesser, or its files lack something.
    """
    if files is None:
        return target, _own_predictor(target, announce)
    if target.program.looks_ahead or target.program.window is not None:
        unfit = "it only embeds" if target.program.looks_ahead else "every layer of it has a window"
        raise ConfigError(_OPTION, f"nothing can be guessed for {target.files.path}: {unfit}")
    config = replace(config, lora=(), lora_dir="")  # it guesses without adapters
    own = replace(config, quantization="auto" if config.quantization == "file" else config.quantization)
    if is_eagle3(files.config):
        return _load_eagle3(own, files, target, announce)
    _check_vocabulary(config, files, text)
    return target, _load_draft_model(own, files, target, announce)


def _load_draft_model(
    own: EngineConfig, files: ModelFiles, target: LoadedModel, announce: Callable[[str], None]
) -> LoadedModel:
    choices = resolve_choices(own, files, target.backend)
    planned = plan_model(replace(own, max_model_len=0), files, choices)
    if planned.program.looks_ahead or planned.program.states:
        state = "carries recurrent state, which its wrong guesses would leave behind"
        what = "only embeds" if planned.program.looks_ahead else state
        raise ConfigError(_OPTION, f"{files.path} cannot guess: it {what}")
    free = free_memory(target.device)
    check_fits(_OPTION, _needs(own, planned, target), free, ())
    reported: list[str] = []
    loaded = place_model(
        replace(own, model=own.draft_model, max_model_len=0, kv_cache_memory=0), files, choices, reported.append
    )
    announce(f"draft model      {files.path}, {files.num_weights / 1e6:.1f} M weights")
    return loaded


def drafter_of(
    draft: LoadedModel, target: LoadedModel, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> DraftModel:
    """The drafter for a runner of `target` with these sizes; it has a KV store of its own."""
    kv, sizes = draft.kv_store(num_blocks, block_size), (max_num_seqs, max_model_len, target.shape.vocab_size)
    own = target.program.predictor
    if own is not None and draft.program is own.program:
        return PredictingDrafter(draft.model, own, draft.dtype, kv, *sizes, draft.backend, SystemClock())
    return DraftModel(draft.model, kv, *sizes, draft.backend, SystemClock())


def _load_eagle3(
    own: EngineConfig, files: ModelFiles, target: LoadedModel, announce: Callable[[str], None]
) -> tuple[LoadedModel, LoadedModel]:
    choices, file = resolve_choices(own, files, target.backend), str(files.path)
    reader, form = ConfigReader(files.config, file), choices.weight_format
    cpu = target.backend.cpu if isinstance(target.backend, CpuBackend) else None
    headers = Binder(HeadersOnly(files.source), choices.dtype, META, file, weight_format=form)
    planned_head = load_eagle3(reader, headers, target.program)
    headers.finish()
    planned = PlannedModel(planned_head.program, choices, headers.bytes, headers.packing_bytes, headers.formats)
    check_fits(_OPTION, _needs(own, planned, target), free_memory(target.device), ())
    binder = Binder(files.source, choices.dtype, target.device, file, weight_format=form, cpu=cpu)
    head = load_eagle3(reader, binder, target.program)
    binder.finish()
    program = replace(tapping(target.program, tapped_layers(reader, len(target.program.layers))), predictor=head)
    watched = replace(target, program=program, model=executor(program, target.dtype, target.backend))
    announce(f"draft model      {files.path}, an EAGLE-3 head of {files.num_weights / 1e6:.1f} M weights")
    return watched, LoadedModel(
        files=files,
        program=head.program,
        model=executor(head.program, choices.dtype, target.backend),
        backend=target.backend,
        dtype=choices.dtype,
        kv_dtype=choices.kv_dtype,
        weight_bytes=binder.bytes,
        config=own,
        weight_formats=weight_formats(binder.formats, files.stored_dtype, choices.dtype),
    )


def _own_predictor(target: LoadedModel, announce: Callable[[str], None]) -> LoadedModel | None:
    """The part of `target` that predicts a second token, as its draft model; None if `target` has no such part.

    Its weights count as the target's. `announce` is called with its line of the start report.
    """
    own = target.program.predictor
    if own is None:
        return None
    announce("predictor        the model's own layer for a second token: it guesses, unless that does not pay")
    model = executor(own.program, target.dtype, target.backend)
    return replace(target, program=own.program, model=model, weight_bytes=0, weight_formats="", embedding_layers=())


def _check_vocabulary(config: EngineConfig, files: ModelFiles, text: TextModel) -> None:
    """Check that every id is the same token in both models."""
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
    """Memory for the draft model and the KV caches of both; the target's weights are already loaded."""
    needs = planned.needs(config)
    block = block_bytes(target.program.caches, config.block_size, target.kv_dtype) + needs.block
    blocks = max(1, config.kv_cache_memory // block) if config.kv_cache_memory else needs.blocks
    return replace(needs, block=block, blocks=blocks, pages=needs.pages * 2)
