"""From a model's files to a model in memory: one file, because planning and loading must make the same choices.

Decides what options mean on this machine and whether the model fits, and places its weights. Names concrete classes of
several rooms, as `app` and `building` do. A model can be planned first: its program is built from headers alone,
with sizes and costs but without weight values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from penstock import models
from penstock.contract.clock import SystemClock
from penstock.contract.config import EngineConfig
from penstock.contract.model import KvCacheSpec, ModelShape, StateSpec
from penstock.contract.ports import Grammars, ThinkingBudgets
from penstock.contract.scheduler_config import most_blocks
from penstock.exec.adapters import AdapterSlots
from penstock.exec.block_keeping import BlockKeeping
from penstock.exec.device import (
    compute_threads,
    good_dtypes,
    open_backend,
    resolve_device,
    resolve_dtype,
    resolve_weight_format,
    set_torch_threads,
)
from penstock.exec.free_memory import free_memory
from penstock.exec.kv_store import KVStore, block_bytes, resolve_kv_dtype
from penstock.exec.memory_plan import Alternative, MemoryNeeds, check_fits
from penstock.exec.runner import RowGuesser, TorchRunner
from penstock.exec.start_report import (
    computing_line,
    embeds_only_line,
    left_out_line,
    mixed_line,
    rounded_line,
    unheeded_line,
    weight_formats,
    wide_heads_line,
)
from penstock.exec.state_store import StateStore
from penstock.freed_memory import give_back
from penstock.kernels.backend import Backend
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.weight_memory import LARGE_PAGE
from penstock.nn.adapters import adapter_bytes, adapters_step_bytes
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.divided import DividedExecutor
from penstock.nn.dividing import divide
from penstock.nn.rank_group import RankGroup
from penstock.nn.reference import ReferenceExecutor
from penstock.nn.working_memory import step_bytes, table_bytes
from penstock.ranks import DividedModel, MirroredStates, RankProcesses
from penstock.weights.bind import Binder
from penstock.weights.divided_binder import DividedBinder
from penstock.weights.embedding_layers import EmbeddingLayer, read_embedding_layers
from penstock.weights.files import ModelFiles, open_model
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.locate import default_cache_dir
from penstock.weights.packing import WeightFormat
from penstock.weights.progress import byte_bar
from penstock.weights.pull import pull

if TYPE_CHECKING:
    from penstock.nn.causal_lm import CausalLM
    from penstock.nn.program import Program

__all__ = [
    "Choices",
    "LoadedModel",
    "PlannedModel",
    "executor",
    "find_model",
    "load_model",
    "place_model",
    "plan_model",
    "resolve_choices",
    "with_whole_prompts",
]

_LEAST_CONTEXT = 1024
"""Tokens that must fit the KV cache if the operator gives no size; the model's context, if that is shorter."""

_STEP_SHARE = 4
"""A step that holds a whole prompt may take one part in this many of the free memory."""

_SMALLER = ("auto", "int8", "int4")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, from which any number of KV stores and runners of any size can be made.

    Attributes:
        backend: computes with it, on threads of its own.
        dtype: dtype of activations.
        kv_dtype: dtype of the KV stores made for it.
        weight_bytes: memory of its weights.
        config: the operator's options; for a model that looks ahead, with steps as long as the longest prompt.
        weight_formats: the formats of its weights, in words.
        embedding_layers: layers that are applied to pooled vectors.
        ranks: the other ranks that compute with it; None if the model is not divided.
        other_shares: the share of each other rank, as planned.
    """

    files: ModelFiles
    program: Program
    model: CausalLM
    backend: Backend
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weight_bytes: int
    config: EngineConfig
    weight_formats: str = ""
    embedding_layers: tuple[EmbeddingLayer, ...] = ()
    ranks: RankProcesses | None = None
    other_shares: tuple[Program, ...] = ()

    @property
    def all_caches(self) -> tuple[KvCacheSpec, ...]:
        """The KV caches of all ranks."""
        return tuple(cache for each in (self.program, *self.other_shares) for cache in each.caches)

    @property
    def all_states(self) -> tuple[StateSpec, ...]:
        """The recurrent states of all ranks."""
        return tuple(state for each in (self.program, *self.other_shares) for state in each.states)

    @property
    def embedding_size(self) -> int:
        """Number of values in an embedding."""
        return self.embedding_layers[-1].weight.outputs if self.embedding_layers else self.shape.hidden_size

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.model.shape

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.backend.device

    @property
    def isa(self) -> str:
        """The instruction set of the compiled kernels that compute with it, or `torch`."""
        return self.backend.isa

    def on(self, backend: Backend) -> LoadedModel:
        """The same weights with another backend on the same device; other ranks keep theirs."""
        if self.ranks is not None:
            own = executor(self.program, self.dtype, backend, self.ranks.group)
            return replace(self, backend=backend, model=DividedModel(own, self.ranks))
        return replace(self, backend=backend, model=executor(self.program, self.dtype, backend))

    def kv_store(self, num_blocks: int, block_size: int) -> KVStore:
        """A KV store of these sizes, uninitialised."""
        caches = self.program.caches
        packed = all(self.backend.packs_kv(self.kv_dtype, each.head_dim, block_size) for each in caches)
        store = KVStore(caches, num_blocks, block_size, self.kv_dtype, self.device, packed=packed)
        if self.ranks is not None:
            self.ranks.mirror_kv(store)
        return store

    def state_store(self, num_slots: int, checkpoints: int, spares: int = 0) -> StateStore | None:
        """Memory for recurrent state, uninitialised; None for a model without recurrent state."""
        states = self.program.states
        if self.ranks is None or not states:
            return StateStore(states, num_slots, checkpoints, self.device, spares) if states else None
        mirrored = MirroredStates(states, num_slots, checkpoints, self.device, spares)
        self.ranks.mirror_states(mirrored, num_slots, checkpoints, spares)
        return mirrored

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    def runner(
        self,
        kv: KVStore,
        max_num_seqs: int,
        max_model_len: int,
        grammars: Grammars | None = None,
        budgets: ThinkingBudgets | None = None,
        states: StateStore | None = None,
        keeping: BlockKeeping | None = None,
        drafter: RowGuesser | None = None,
        adapters: AdapterSlots | None = None,
        *,
        foresees: bool = False,
    ) -> TorchRunner:
        """A runner that uses stores of this model.

        `grammars` is required for guided sequences, `budgets` for sequences with a thinking budget.
        """
        return TorchRunner(
            self.model,
            kv,
            max_num_seqs,
            max_model_len,
            SystemClock(),
            self.backend,
            grammars,
            budgets,
            states,
            self.embedding_layers,
            keeping,
            drafter,
            adapters,
            foresees=foresees,
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """What the operator's options mean for a model's files on this machine.

    Attributes:
        backend: computes, on threads of its own.
        dtype: dtype of activations.
        weight_format: format of projections and embeddings.
        kv_dtype: dtype of keys and values.
    """

    backend: Backend
    dtype: torch.dtype
    weight_format: WeightFormat
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model built from headers alone.

    Attributes:
        program: its weights have sizes, but no values.
        weight_bytes: memory of its weights, once loaded.
        packing_bytes: the most that packing one weight takes temporarily.
        formats: the formats of its weights, as in `Binder.formats`.
    """

    program: Program
    choices: Choices
    weight_bytes: int
    packing_bytes: int
    formats: dict[str, None]

    def needs(self, config: EngineConfig, tokens: int | None = None) -> MemoryNeeds:
        """The memory that the model needs with these options.

        Args:
            config: gives the size of steps, and the size of the KV cache if the operator chose it.
            tokens: how many tokens the KV cache must hold, instead of what `config` says.
        """
        block = block_bytes(self._caches, config.block_size, self.choices.kv_dtype)
        blocks = -(-tokens // config.block_size) if tokens else self._least_blocks(config, block)
        step = step_bytes(self.program, self.choices.dtype, config.max_num_batched_tokens, config.max_num_seqs)
        pages = 2 * len(self._caches) * LARGE_PAGE
        shape, window = self.program.shape, self.program.window
        held = blocks * config.block_size if window is None else shape.max_positions  # with a window, blocks are freed
        angles = table_bytes(self.program, config.max_model_len or held)
        sizes = self.weight_bytes, self.packing_bytes, step, block, config.block_size, blocks, pages, angles
        return MemoryNeeds(*sizes, self._adapters(config))

    def _adapters(self, config: EngineConfig) -> int:
        """Memory for the most adapters that there may be, and for a step with them."""
        if not config.most_adapters:
            return 0
        rank, itemsize = config.max_lora_rank, self.choices.dtype.itemsize
        step = config.max_num_batched_tokens * adapters_step_bytes(self.program, rank)
        return step + config.most_adapters * adapter_bytes(self.program, rank, itemsize)

    @property
    def _caches(self) -> tuple[KvCacheSpec, ...]:
        """The caches that share a block: the model's, and its predictor's."""
        own = self.program.predictor
        return self.program.caches if own is None else (*self.program.caches, *own.program.caches)

    def _least_blocks(self, config: EngineConfig, block: int) -> int:
        if config.kv_cache_memory:
            return max(1, config.kv_cache_memory // block)
        tokens = config.max_model_len or min(self.program.shape.max_positions, _LEAST_CONTEXT)
        return most_blocks(tokens, config.block_size, config.max_num_batched_tokens, self.program.window)


def find_model(config: EngineConfig, cache_dir: Path | None = None) -> ModelFiles:
    """Download the model if it is not on disk, and open it; `cache_dir` as in `app.assemble`.

    Raises:
        SetupError: there is no such model, or its files cannot be used.
    """
    path = pull(config.model, cache_dir or default_cache_dir(os.environ), show_progress=True)
    return open_model(path, models.gguf_dialect)


def resolve_choices(config: EngineConfig, files: ModelFiles, backend: Backend | None = None) -> Choices:
    """Choose a backend, if none is given, and the formats of weights, activations, keys and values.

    Raises:
        ConfigError: an option cannot be used here.
    """
    if backend is not None:
        return _resolve_forms(config, files, backend)
    device, threads = resolve_device(config.device), compute_threads(config.threads)
    return _resolve_forms(config, files, open_backend(device, threads, os.environ.get("PENSTOCK_ISA", "")))


def _resolve_forms(config: EngineConfig, files: ModelFiles, backend: Backend) -> Choices:
    device = backend.device
    dtype = resolve_dtype(config.dtype, files.stored_dtype, device, good_dtypes(device, backend.exact))
    weight_format = resolve_weight_format(config.quantization, files.stored_dtype, dtype, device, backend.isa)
    return Choices(backend, dtype, weight_format, resolve_kv_dtype(config.kv_cache_dtype, dtype, backend))


def plan_model(config: EngineConfig, files: ModelFiles, choices: Choices) -> PlannedModel:
    """Build a model's program from headers alone; takes milliseconds.

    Raises:
        SetupError: the files lack something.
    """
    file = str(files.path)
    source, weight_format = HeadersOnly(files.source), choices.weight_format
    binder = Binder(source, choices.dtype, META, file, weight_format=weight_format, predicts=_predicts(config))
    program = models.load(files.config, binder, file, config.max_model_len or None)
    return PlannedModel(program, choices, binder.bytes, binder.packing_bytes, binder.formats)


def with_whole_prompts(config: EngineConfig, planned: PlannedModel, free: int) -> EngineConfig:
    """The same options; for a model that looks ahead, with steps as long as the longest prompt.

    The longest prompt is the operator's `max_model_len`. If that is 0, it is the model's context, or what
    `kv_cache_memory` holds if that is less, halved until a step with its keys and values takes at most a quarter of the
    free memory.

    Args:
        config: the operator's options.
        planned: the model.
        free: bytes of free memory.
    """
    if not planned.program.looks_ahead:
        return config
    longest = config.max_model_len or _longest_prompt(config, planned, free // _STEP_SHARE)
    steps = max(longest, config.max_num_batched_tokens)
    return replace(config, max_model_len=longest, max_num_batched_tokens=steps)


def _longest_prompt(config: EngineConfig, planned: PlannedModel, budget: int) -> int:
    program, choices, size = planned.program, planned.choices, config.block_size
    longest, block = program.shape.max_positions, block_bytes(program.caches, size, choices.kv_dtype)
    if config.kv_cache_memory:
        longest = max(1, min(longest, config.kv_cache_memory // block * size))

    def taken(tokens: int) -> int:
        return step_bytes(program, choices.dtype, tokens, config.max_num_seqs) + tokens * block // size

    while longest > 1 and taken(longest) > budget:
        longest //= 2
    return longest


def load_model(config: EngineConfig, files: ModelFiles, announce: Callable[[str], None]) -> LoadedModel:
    """Choose a backend, check that the model fits, and place its weights.

    The backend's instruction set and threads are this model's alone. The number of torch's own threads is set too; the
    process has only one, so the model loaded last decides.

    Raises:
        SetupError: an option cannot be used here, the model does not fit, or the files lack something.
    """
    return place_model(config, files, resolve_choices(config, files), announce)


def place_model(
    config: EngineConfig,
    files: ModelFiles,
    choices: Choices,
    announce: Callable[[str], None],
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load a model with choices already made; with `group`, only this rank's share. Otherwise as `load_model`."""
    backend, dtype, weight_format = choices.backend, choices.dtype, choices.weight_format
    planned = plan_model(config, files, choices)
    config = with_whole_prompts(config, planned, free_memory(backend.device))
    threads = compute_threads(config.threads)
    set_torch_threads(threads, packed=weight_format is not WeightFormat.DENSE)
    announce(f"model            {files.path}, {files.num_weights / 1e6:.1f} M weights")
    announce(computing_line(backend, dtype, threads))
    if group is None:
        _check_memory(planned, config, files)
    with byte_bar(
        "Loading", files.num_weights * dtype.itemsize, show=group is None or group.rank == 0, delay=2.0, announce=False
    ) as bar:
        seen = partial(_update_bytes, bar, dtype.itemsize)
        cpu = backend.cpu if isinstance(backend, CpuBackend) else None
        placed, form = (files.source, dtype, backend.device, str(files.path)), (weight_format, cpu)
        if group is None:
            binder = Binder(*placed, seen, *form, predicts=_predicts(config))
            program = models.load(files.config, binder, str(files.path), config.max_model_len or None)
        else:
            dividing = DividedBinder(*placed, seen, *form)
            whole = models.load(files.config, dividing, str(files.path), config.max_model_len or None)
            program, binder = divide(whole, group.rank, group.size, dividing), dividing.loaded
            dividing.forget()
    layers = read_embedding_layers(files.path, program.shape.hidden_size, backend.device, cpu)
    give_back()  # memory freed while weights were read and packed, so that the KV cache can use it
    model = executor(program, dtype, backend, group)
    if binder.mixed and dtype == torch.bfloat16:
        announce(mixed_line(binder.mixed))
    if files.source.rounded():
        announce(rounded_line(files.source.rounded()))
    if files.source.unheeded():
        announce(unheeded_line(files.source.unheeded()))
    if binder.left_out:
        announce(left_out_line(binder.left_out))
    head_dim = max((cache.head_dim for cache in program.caches if not cache.value_dim), default=0)
    if backend.why_not(dtype, head_dim) is not None:
        announce(wide_heads_line(head_dim))
    if program.looks_ahead:
        announce(embeds_only_line(config.max_model_len))
    formats = weight_formats(binder.formats, files.stored_dtype, dtype)
    held = binder.bytes + sum(layer.nbytes for layer in layers)
    return LoadedModel(files, program, model, backend, dtype, choices.kv_dtype, held, config, formats, layers)


def _predicts(config: EngineConfig) -> bool:
    """Whether the model's own predictor is to guess, if it has one."""
    return config.speculate and not config.draft_model and config.tensor_parallel == 1


def _check_memory(planned: PlannedModel, config: EngineConfig, files: ModelFiles) -> None:
    """Refuse a model that does not fit beside its KV cache, before any weights are read."""
    needs, free = planned.needs(config), free_memory(planned.choices.backend.device)
    if needs.total <= free:
        return
    least = planned.needs(replace(config, kv_cache_memory=0, max_model_len=0))
    named = "kv_cache_memory" if config.kv_cache_memory else "max_model_len" if config.max_model_len else "model"
    option = named if least.total <= free else "model"
    check_fits(option, needs, free, list(_alternatives(config, files, planned.choices)))


def _alternatives(config: EngineConfig, files: ModelFiles, choices: Choices) -> Iterator[Alternative]:
    """The same model in other formats, the smallest changes first."""
    shorter = replace(config, kv_cache_memory=0, max_model_len=0)
    if choices.backend.why_torch() is not None:
        return
    for quantization in dict.fromkeys((config.quantization, *_SMALLER)):
        for kv_dtype in dict.fromkeys((config.kv_cache_dtype, "int8")):
            if (quantization, kv_dtype) == (config.quantization, config.kv_cache_dtype):
                continue
            other = replace(shorter, quantization=quantization, kv_cache_dtype=kv_dtype)
            words = [f"--quantization {quantization}"] if quantization != config.quantization else []
            words += [f"--kv-cache-dtype {kv_dtype}"] if kv_dtype != config.kv_cache_dtype else []
            planned = plan_model(other, files, _resolve_forms(other, files, choices.backend))
            yield Alternative(" ".join(words), planned.needs(other))


def executor(program: Program, dtype: torch.dtype, backend: Backend, group: RankGroup | None = None) -> CausalLM:
    """The executor of a program: a step is one compiled call or CUDA graph if the backend supports all of it.

    Otherwise it is one call per operation. This is decided once, here; a backend never changes afterwards. One rank's
    share of a program is computed with `group`, in one compiled call between every two sums.
    """
    if isinstance(backend, CpuBackend) and why_not_compiled(program, dtype, backend) is None:
        return (
            CompiledExecutor(program, dtype, backend)
            if group is None
            else DividedExecutor(program, dtype, backend, group)
        )
    if backend.name == "cuda":
        from penstock.kernels.cuda_backend import CudaBackend  # imports Triton, as `captured` does
        from penstock.nn.captured import CapturedExecutor, why_not_captured

        if isinstance(backend, CudaBackend) and why_not_captured(program) is None:
            return CapturedExecutor(program, dtype, backend)
    return ReferenceExecutor(program, dtype, backend, group)


def _update_bytes(bar: tqdm[Any], width: int, count: int) -> None:
    bar.update(count * width)
