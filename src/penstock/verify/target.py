"""The target of a proof: a model behind the `Runner` port, and the settings outside the plan that must not matter.

The rest of this package runs the model only through this value, so that any runner can stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.adapter_loading import adapter_slots, load_adapters
from penstock.contract.errors import ConfigError
from penstock.contract.ports import Grammars, Runner
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.draft_loading import drafter_of
from penstock.exec.device import compute_threads, open_backend, set_torch_threads
from penstock.exec.kv_store import block_bytes, blocks_for
from penstock.loading import LoadedModel
from penstock.text import ReasoningBudgets, TextModel

__all__ = ["Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """Something that runs plans of any sizes.

    Attributes:
        vocab_size: token ids are drawn from `range(vocab_size)`.
        max_positions: length of the context.
        make_runner: makes a runner with fresh KV memory, for plans of a scheduler with this configuration.
        set_threads: sets the number of compute threads for runners that are made afterwards.
        threads: the number of compute threads unless a schedule says otherwise.
        model_digest: identifies the model in block keys.
        text: the model's tokenizer and chat template.
        grammars: compiles grammars; None if no request is to have one.
        window: see `SchedulerConfig.window`; schedules give back blocks that left it, as the engine does.
        stateful: whether the model carries recurrent state; if so, schedules have checkpoints.
        blocks_for: (bytes, block size) -> number of KV blocks that fit.
        draft_context: positions that the draft model can compute; 0 if there is none.
        adapters: name and digest of each adapter that requests may name.
    """

    vocab_size: int
    max_positions: int
    make_runner: Callable[[SchedulerConfig], Runner]
    set_threads: Callable[[int], object]
    threads: int
    model_digest: bytes
    text: TextModel
    grammars: Grammars | None = None
    window: int | None = None
    stateful: bool = False
    blocks_for: Callable[[int, int], int] = lambda memory, block_size: 0  # noqa: ARG005
    draft_context: int = 0
    adapters: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        threads: int,
        text: TextModel,
        grammars: Grammars | None = None,
        draft: LoadedModel | None = None,
    ) -> Target:
        """The target for a loaded model; `threads` is the option of that name, 0 for one thread per physical core.

        With `draft`, the target's runners have a draft model if the scheduler's configuration asks for guesses. They
        have the adapters that the model's options name.

        Raises:
            ConfigError: the model only embeds, or an adapter cannot be used.
        """
        adapters = adapter_slots(loaded.config, loaded)
        loaded_adapters = tuple(load_adapters(loaded.config, adapters))
        if loaded.program.looks_ahead:
            raise ConfigError("model", "only embeds, and what is verified is generated")
        on_threads, drafting = loaded, draft

        def use_threads(count: int) -> None:
            nonlocal on_threads, drafting
            set_torch_threads(count)
            if loaded.backend.exact:
                on_threads = loaded.on(open_backend(loaded.device, count, loaded.isa))
                drafting = None if draft is None else draft.on(on_threads.backend)

        def make_runner(config: SchedulerConfig) -> Runner:
            kv = on_threads.kv_store(config.num_blocks, config.block_size)
            kv.fill_with_nan()  # so that reading a position that was never written shows in the result
            states = on_threads.state_store(config.max_num_seqs, config.checkpoints or 0, config.spare_states)
            if states is not None:
                states.fill_with_nan()
            budgets, drafter = ReasoningBudgets(text), None
            if config.draft_context and drafting is not None:
                sizes = config.num_blocks, config.block_size, config.max_num_seqs, config.max_model_len
                drafter = drafter_of(drafting, on_threads, *sizes)
                drafter.kv.fill_with_nan()
            sizes_of_slots = config.max_num_seqs, config.max_model_len
            own = adapters.shared()
            return on_threads.runner(kv, *sizes_of_slots, grammars, budgets, states, drafter=drafter, adapters=own)

        return cls(
            vocab_size=loaded.shape.vocab_size,
            max_positions=loaded.shape.max_positions,
            make_runner=make_runner,
            set_threads=use_threads,
            threads=compute_threads(threads),
            model_digest=loaded.files.digest,
            text=text,
            grammars=grammars,
            window=loaded.program.window,
            stateful=bool(loaded.program.states),
            draft_context=0 if draft is None else draft.shape.max_positions,
            adapters=tuple((facts.name, facts.digest) for facts in loaded_adapters),
            blocks_for=lambda memory, size: blocks_for(
                memory, block_bytes(loaded.all_caches, size, loaded.kv_dtype), size
            ),
        )
