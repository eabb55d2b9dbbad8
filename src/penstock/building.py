"""From a model's files to a runner that is ready: load it, size the KV cache from the memory left, and warm up.

Sits between `loading`, which places weights, and `computing`, which chooses the process. Runs both in a process that
serves and in one that only computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.adapter_loading import adapter_slots
from penstock.answer_contract import answer_contract, why_not_certified
from penstock.calculated_times import calculated_times
from penstock.contract.config import EngineConfig
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.errors import ConfigError
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import HuggingFaceText, ModelFacts, TextFiles
from penstock.contract.ports import Grammars
from penstock.contract.scheduler_config import most_blocks
from penstock.draft_loading import drafter_of, load_guesser
from penstock.exec.block_keeping import BlockKeeping
from penstock.exec.device import kv_budget
from penstock.exec.kv_store import block_bytes, blocks_for
from penstock.exec.runner import TorchRunner
from penstock.exec.state_store import share_memory, state_bytes
from penstock.grammar import GrammarLibrary
from penstock.kept_blocks import open_store
from penstock.loading import LoadedModel
from penstock.model_text import grammars_of
from penstock.rank_loading import load_on_ranks
from penstock.sampling import read_model_defaults
from penstock.text import ReasoningBudgets, TextModel
from penstock.weights.embedding_config import read_embedding
from penstock.weights.files import ModelFiles
from penstock.weights.generation_config import read_generation_config
from penstock.weights.gguf_file import GgufSource
from penstock.weights.locate import default_cache_dir
from penstock.weights.pull import pull

__all__ = ["build_runner", "load_runner", "read_facts"]


def read_facts(config: EngineConfig, files: ModelFiles, cache_dir: Path | None) -> ModelFacts:
    """What a model's files say, apart from its weights; `cache_dir` as in `app.assemble`.

    Raises:
        SetupError: a file cannot be used.
    """
    recommended = read_generation_config(config.generation_config, files.path)
    header = files.source.header if isinstance(files.source, GgufSource) else None
    return ModelFacts(
        files.name,
        _text_files(config, files, cache_dir),
        read_embedding(files.path, header) or EmbeddingSpec(),
        read_model_defaults(recommended.values, recommended.origin),
        recommended.origin,
    )


def _text_files(config: EngineConfig, files: ModelFiles, cache_dir: Path | None) -> TextFiles:
    """The files to read the tokenizer from: the model's own, unless the operator names others."""
    if not config.tokenizer:
        return files.text
    path = pull(config.tokenizer, cache_dir or default_cache_dir(os.environ), show_progress=True)
    if not path.is_dir():
        raise ConfigError("tokenizer", f"{path} is no directory with a tokenizer.json")
    return HuggingFaceText(str(path))


def load_runner(
    config: EngineConfig,
    files: ModelFiles,
    text: TextModel,
    announce: Callable[[str], None],
    like: MemoryReport | None = None,
    draft: ModelFiles | None = None,
) -> tuple[TorchRunner, RunnerFacts, LoadedModel, GrammarLibrary]:
    """Load a model, and its draft model if there is one, and make a runner from them.

    Args:
        config: the operator's options.
        files: the model's files.
        text: its tokenizer and formats.
        announce: called with each line of the start report.
        like: memory sizes of an earlier runner, so that the same plans fit; None to size it from the free memory.
        draft: the draft model's files; None for no draft model.

    Raises:
        SetupError: as in `rank_loading.load_on_ranks`, or the KV cache does not fit.
    """
    loaded = load_on_ranks(config, files, announce)
    loaded, guessing = load_guesser(loaded.config, draft, text, loaded, announce)
    grammars = grammars_of(text, loaded.shape.vocab_size)
    grammars.keep_within(MemoryBudget(config.memory_limit).grammars)
    runner, facts = build_runner(loaded.config, loaded, grammars, text, like, announce, guessing)
    return runner, facts, loaded, grammars


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    grammars: Grammars,
    text: TextModel,
    like: MemoryReport | None = None,
    announce: Callable[[str], None] = lambda line: None,  # noqa: ARG005
    draft: LoadedModel | None = None,
) -> tuple[TorchRunner, RunnerFacts]:
    """Size the KV cache, as an earlier one or from the memory left, and warm up a runner; see `load_runner`."""
    memory = like or _sizes(config, loaded, draft)
    kv = loaded.kv_store(memory.num_blocks, memory.block_size)
    states = loaded.state_store(memory.max_num_seqs, memory.checkpoints or 0, memory.spare_states)
    budgets = ReasoningBudgets(text)
    store = open_store(config, loaded, kv, states, announce)
    keeping = None if store is None else BlockKeeping(kv, store.blocks, store.most_bytes, states, store.states)
    slots = memory.max_num_seqs, memory.max_model_len
    drafter = None if draft is None else drafter_of(draft, loaded, memory.num_blocks, memory.block_size, *slots)
    adapters = adapter_slots(config, loaded)
    runner = loaded.runner(kv, *slots, grammars, budgets, states, keeping, drafter, adapters, foresees=config.speculate)
    decoding_seconds = runner.warm_up()
    uncertified = why_not_certified(loaded)
    facts = RunnerFacts(
        config=config,
        memory=memory,
        vocab_size=loaded.shape.vocab_size,
        embedding_size=loaded.embedding_size,
        window=loaded.program.window,
        looks_ahead=loaded.program.looks_ahead,
        model_digest=loaded.files.digest,
        kv_folder="" if store is None else str(store.blocks.folder.path),
        state_folder="" if store is None or store.states is None else str(store.states.folder.path),
        draft_context=0 if draft is None else draft.shape.max_positions,
        step_times=calculated_times(loaded.program, loaded.kv_dtype, loaded.backend, decoding_seconds),
        contract=None if uncertified else answer_contract(config, loaded),
        uncertified=uncertified,
    )
    return runner, facts


def _sizes(config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | None) -> MemoryReport:
    caches, dtype, block_size = loaded.all_caches, loaded.kv_dtype, config.block_size
    least = most_blocks(config.max_model_len, block_size, config.max_num_batched_tokens, loaded.program.window)
    guessed = 0 if draft is None else block_bytes(draft.program.caches, block_size, draft.kv_dtype)
    each = block_bytes(caches, block_size, dtype) + guessed
    if loaded.program.looks_ahead:  # nothing is kept from step to step
        budget = config.kv_cache_memory or each * _step_blocks(config)
    else:
        budget = kv_budget(config.kv_cache_memory, loaded.device, least * each)
    num_seqs, checkpoints, spares = config.max_num_seqs, None, 0
    carried = state_bytes(loaded.all_states)
    if carried:
        interval = config.checkpoint_interval
        num_seqs, checkpoints, spares, budget = share_memory(
            budget, carried, each // block_size, num_seqs, interval, drafts=config.speculate
        )
    num_blocks = blocks_for(budget, each, block_size)
    shares = () if loaded.ranks is None else (loaded.weight_bytes, *loaded.ranks.weight_bytes)
    programs = (loaded.program, *loaded.other_shares)
    return MemoryReport(
        weight_bytes=sum(shares) or loaded.weight_bytes,
        kv_bytes=num_blocks * each,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=_max_model_len(config, loaded, num_blocks),
        kv_dtype=str(dtype).removeprefix("torch."),
        weight_formats=loaded.weight_formats,
        max_num_seqs=num_seqs,
        state_bytes=carried * (num_seqs + (checkpoints or 0) + spares),
        checkpoints=checkpoints,
        spare_states=spares,
        generates=not loaded.program.looks_ahead,
        draft_bytes=0 if draft is None else draft.weight_bytes,
        draft_formats="" if draft is None else draft.weight_formats,
        draft_kv_bytes=num_blocks * guessed,
        ranks=tuple(
            (weights, num_blocks * block_bytes(program.caches, block_size, dtype))
            for weights, program in zip(shares, programs, strict=False)
        ),
    )


def _step_blocks(config: EngineConfig) -> int:
    """The most blocks that one step can need: the last block of each sequence may be filled only in part."""
    return -(-config.max_num_batched_tokens // config.block_size) + config.max_num_seqs


def _max_model_len(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> int:
    """The most tokens of one request: the smallest of the model's context, the KV cache and the operator's limit.

    If every layer has a window, a request frees blocks that its window has passed, and may be longer than the cache.
    """
    context, kv_tokens = loaded.shape.max_positions, num_blocks * config.block_size
    if config.max_model_len > context:
        raise ConfigError("max_model_len", f"{config.max_model_len} is above the model's context, {context}")
    window = loaded.program.window
    if most_blocks(context, config.block_size, config.max_num_batched_tokens, window) <= num_blocks:
        kv_tokens = context
    if config.max_model_len > kv_tokens:
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} tokens do not fit the KV cache of {kv_tokens}; raise kv_cache_memory",
        )
    return config.max_model_len or min(context, kv_tokens)
