"""The runner: executes plans with a torch model.

Does what the plan says. Does not know the scheduler, text, or how a model is built: the model is a `forward` that calls
back for attention, which this file computes over the KV store.

Invariant: between steps, everything known about a sequence is in the slot tables and the KV store; a released slot
leaves nothing behind that a later sequence could see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.contract.adapter import AdapterFacts
from penstock.contract.plan import Admit, GuessWork, PromptScores, Row, RowResult, StepPlan, StepResult
from penstock.contract.ports import Clock, Grammars, ThinkingBudgets
from penstock.contract.sampling import SamplingSpec
from penstock.exec.adapters import AdapterSlots
from penstock.exec.batch import ForwardBatch, SlotTables
from penstock.exec.block_keeping import BlockKeeping
from penstock.exec.drawing import NOT_FINITE, Drawing, Drawn
from penstock.exec.grammar_masking import GrammarMasking
from penstock.exec.kv_store import KVStore
from penstock.exec.memory_ahead import MemoryAhead
from penstock.exec.pooling import Pools
from penstock.exec.prompt_scores import prompt_scores
from penstock.exec.state_store import StateStore
from penstock.kernels.backend import Backend
from penstock.kernels.state_runs import StateRuns
from penstock.nn.adapters import Adapted
from penstock.nn.causal_lm import CausalLM
from penstock.nn.paged import PagedAttend
from penstock.thread_turns import going_first
from penstock.weights.embedding_layers import EmbeddingLayer

__all__ = ["RowGuesser", "TorchRunner", "paged_attend"]


def paged_attend(
    kv: KVStore,
    batch: ForwardBatch,
    backend: Backend,
    states: Sequence[Tensor] = (),
    runs: StateRuns | None = None,
) -> PagedAttend:
    """The attention of one step: writes its keys and values to the store, then reads all of each row's.

    `states` and their `runs` are for models with recurrent state.
    """
    of = batch
    return PagedAttend(kv.keys, kv.values, of.write_slots, of.q_start, of.kv_len, of.block_table, backend, states, runs)


class RowGuesser(Protocol):
    """Guesses the next tokens of sequences within a step; see `exec.draft_model` and `exec.predictor`.

    Attributes:
        kv: its own memory.
        reads_hidden: whether it reads the hidden states that the step computed.
        reads_taps: width of the model's taps if it reads taps instead of the hidden states after the last norm, else 0.
    """

    kv: KVStore
    reads_hidden: bool
    reads_taps: int

    def admit(self, admit: Admit) -> None:
        """Admit a sequence."""
        ...

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        ...

    def advance(self, row: Row) -> None:
        """Note that `row` is computed now."""
        ...

    def reset(self) -> None:
        """Forget every sequence."""
        ...

    def borrowed(self, block: int) -> AbstractContextManager[None]:
        """Inside the `with`, other sequences may be followed, which may use `block`."""
        ...

    def follow(
        self, rows: Sequence[Row], results: Sequence[RowResult], hidden: Mapping[int, Tensor]
    ) -> tuple[tuple[RowResult, ...], GuessWork]:
        """Note what rows drew, and guess as they order. Returns the results with guesses, and what guessing took.

        `hidden` has the hidden states by slot, `[positions of the row, H]`, or taps instead; for a row that waited,
        only its last position. It is empty if `reads_hidden` is false.
        """
        ...


class _Held(NamedTuple):
    """States kept for the last known position of a slot whose draw waits: `[H]`, and `[width]` for the guesser."""

    hidden: Tensor
    read: Tensor


class TorchRunner:
    """Runs a `CausalLM` over a `KVStore`, and a `StateStore` if the model has recurrent state.

    Owned by the engine's thread; not thread-safe.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVStore,
        max_num_seqs: int,
        max_model_len: int,
        clock: Clock,
        backend: Backend,
        grammars: Grammars | None = None,
        budgets: ThinkingBudgets | None = None,
        states: StateStore | None = None,
        embedding_layers: Sequence[EmbeddingLayer] = (),
        keeping: BlockKeeping | None = None,
        drafter: RowGuesser | None = None,
        adapters: AdapterSlots | None = None,
        *,
        foresees: bool = False,
    ) -> None:
        self._drafter = drafter
        self._adapters = adapters or AdapterSlots()
        self._foresees = foresees
        self._states = states
        self._keeping = keeping
        self._embedding_layers = tuple(embedding_layers)
        self._model = model
        self._kv = kv
        self._backend = backend
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._slots = SlotTables(max_num_seqs, max_model_len, kv.block_size)
        self._masking = GrammarMasking(backend, grammars, budgets)
        self._pools = Pools(self._embedding_layers)
        self._held: dict[int, _Held] = {}  # by slot, for slots whose draw waits
        stores = (kv,) if drafter is None else (kv, drafter.kv)
        self._ahead = MemoryAhead([cache for store in stores for cache in (*store.keys, *store.values)])
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        """Apply releases and admits, compute every row, sample and embed as asked; see `contract.ports.Runner`."""
        began = self._clock.now()
        slots = self._slots
        if self._keeping is not None:
            self._keeping.begin(plan)
        for slot in plan.releases:
            slots.release(slot)
            self._masking.release(slot)
            self._pools.release(slot)
            self._held.pop(slot, None)
            self._adapters.release(slot)
            if self._drafter is not None:
                self._drafter.release(slot)
        for admit in plan.admits:
            slots.admit(admit)
            self._masking.admit(admit)
            self._pools.admit(admit)
            self._adapters.admit(admit)
            self._ahead.reach(admit.blocks)
            if self._states is not None:
                self._states.admit(admit)
            if self._drafter is not None:
                self._drafter.admit(admit)
        for row in plan.rows:
            slots.advance(row)
            self._ahead.reach(row.new_blocks)
            if self._drafter is not None:
                self._drafter.advance(row)
        rows, results, restoring, guessing = plan.rows, (), 0.0, None
        if plan.num_restored:
            rows, results = self._restore(plan.rows)
            restoring = self._clock.now() - began
        if rows:
            with torch.inference_mode(), going_first():
                computed, hidden = self._compute(rows)
                results += self._adapters.refused(rows, computed) if self._adapters.in_use else computed
                if self._drafter is not None:
                    results, guessing = self._drafter.follow(rows, results, hidden)
        news = None if self._keeping is None else self._keeping.end()
        return StepResult(plan.step, results, self._clock.now() - began, restoring, news, guessing)

    def reset(self) -> bool:
        """See `contract.ports.Runner`; keys and values stay."""
        self._slots = SlotTables(self._max_num_seqs, self._max_model_len, self._kv.block_size)
        self._masking.reset()
        self._held.clear()
        self._adapters.reset()
        if self._states is not None:
            self._states.reset()
        self._pools = Pools(self._embedding_layers)
        if self._drafter is not None:
            self._drafter.reset()
        if self._keeping is not None:
            self._keeping.end()
        return False

    def load_adapter(self, name: str, path: str, digest: str = "") -> AdapterFacts:
        """See `contract.ports.AdaptingRunner`; refuses an adapter with another digest, unless `digest` is ""."""
        return self._adapters.load(name, path, digest)

    def unload_adapter(self, name: str) -> None:
        """See `contract.ports.AdaptingRunner`."""
        self._adapters.unload(name)

    def close(self) -> None:
        """Save the blocks that are waiting to be saved, and stop."""
        if self._keeping is not None:
            self._keeping.close()

    def warm_up(self) -> float:
        """Run the code of a first request once, so that the first request is not slower than the tenth.

        Uses its own tables and restores the block that it borrows, so it leaves no trace. Returns the seconds of a step
        with one decoding row, without the draft model's part.
        """
        count = min(3, self._kv.block_size, self._max_model_len)
        spec = SamplingSpec((("logprobs", 0), ("seed", 0), ("temperature", 0.5), ("top_k", 2), ("top_p", 0.5)))
        tokens = (0,) * count
        admit = Admit(slot=0, seq_id="warm-up", tokens=tokens, blocks=(0,), computed=0, sampling=spec, choice=0)
        chunk = (Row(0, 0, count - 1, (), False),) if count > 1 else ()
        fits = count < min(self._kv.block_size, self._max_model_len)  # a guess after the token that is drawn
        last = (Row(0, count - 1, 1, (), True, follow=count + 1 if fits else 0, guesses=int(fits)),)
        keeping, self._keeping = self._keeping, None
        kept, self._slots = self._slots, SlotTables(1, self._max_model_len, self._kv.block_size)
        try:
            with self._kv.borrowed_block(0), nullcontext() if self._drafter is None else self._drafter.borrowed(0):
                self.run(StepPlan(0, (), (admit,), chunk))
                result = self.run(StepPlan(1, (), (), last))
        finally:
            self._slots, self._keeping = kept, keeping
        self._ahead.settle()
        return result.seconds - (0.0 if result.guessing is None else result.guessing.seconds)

    def _restore(self, rows: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[RowResult, ...]]:
        """Read the stored blocks of `rows`. Returns the rows that compute, and results of rows that fell short."""
        assert self._keeping is not None, "a row reads from a store, and there is none"
        short = []
        for row in rows:
            if not row.stored:
                continue
            result = self._keeping.restore(row, self._slots.blocks(row))
            if result is None:
                continue
            if self._states is None:
                self._slots.fall_back(row.slot, row.start + result.restored * self._kv.block_size)
            else:
                self._slots.fall_back_to_admission(row.slot)
            short.append(result)
        return tuple(row for row in rows if not row.stored), tuple(short)

    def _compute(self, rows: Sequence[Row]) -> tuple[tuple[RowResult, ...], dict[int, Tensor]]:
        """Compute `rows`; score and embed prompts as asked, draw the tokens of rows that sample.

        A draw that waited uses the hidden state kept for it: recomputing is impossible once recurrent state moved on.

        Returns:
            The results, and the hidden states for `RowGuesser.follow`.
        """
        waited = [row for row in rows if row.slot in self._held and not row.drafts] if self._held else []
        fresh = [row for row in rows if row not in waited] if waited else rows
        adapters = self._adapters
        if adapters.in_use:
            fresh = adapters.in_groups(fresh)
        sampling = [*(row for row in fresh if row.sample), *waited]
        self._masking.begin_step(rows)
        pending = self._masking.begin(sampling)
        prompts: dict[int, PromptScores] = {}
        vectors: dict[int, bytes | None] = {}
        held = [self._held.pop(row.slot) for row in waited]
        draws_from = [each.hidden[None] for each in held]  # [., H] each
        read = self._drafter is not None and self._drafter.reads_hidden
        read_of = {row.slot: each.read[None] for row, each in zip(waited, held, strict=True)} if read else {}
        if fresh:
            batch = self._slots.batch(fresh, self._kv.device)
            carried = () if self._states is None else (self._states.states, self._states.runs(fresh))
            attend = paged_attend(self._kv, batch, self._backend, *carried)
            adapted = adapters.adapted(fresh) if adapters.in_use else ()
            hidden, taps = self._forward(batch, attend, adapted)  # [T, H], [T, width]
            prompts = self._prompt_scores(fresh, batch, hidden) if self._slots.scores_prompts else {}
            vectors = self._pools.take(fresh, batch.q_start, hidden)
            if read:
                parts = (hidden if taps is None else taps).split([row.count for row in fresh])
                read_of |= {row.slot: part for row, part in zip(fresh, parts, strict=True)}
            if len(sampling) - len(waited) < hidden.shape[0]:
                hidden = hidden[_sampled_places(fresh, batch.q_start)]
            draws_from.insert(0, hidden)
            for row in fresh if self._held else ():
                self._held.pop(row.slot, None)  # waited, but is computed again because it has drafts
        for row in waited if self._states is not None else ():
            self._states.keep(row)
        drawn = Drawn(defaultdict(list), {}, {}, {})
        if sampling:
            hidden = torch.cat(draws_from) if waited else draws_from[0]
            drawing = Drawing(self._slots, self._masking, drawn)
            drawing.draw(sampling, self._model.logits(hidden), pending)  # of [S, V]
            drafts = {row.slot: len(row.drafts) for row in sampling}
            for slot, place in drawn.waiting.items():
                kept = hidden[place].clone()
                self._held[slot] = _Held(kept, read_of[slot][-1 - drafts[slot]].clone() if read else kept)
                self._slots.put_off_draw(slot)
            if self._foresees:
                drawing.foresee(sampling)
        return _results(rows, drawn, prompts, vectors), read_of

    def _forward(self, batch: ForwardBatch, attend: PagedAttend, adapted: Adapted) -> tuple[Tensor, Tensor | None]:
        """Compute a batch. Returns the hidden states, and the taps if the guesser reads them."""
        width = 0 if self._drafter is None else self._drafter.reads_taps
        if not width:
            return self._model.forward(batch.token_ids, batch.positions, attend, adapted), None
        taps = torch.empty(len(batch.token_ids), width, device=self._kv.device)
        return self._model.forward(batch.token_ids, batch.positions, attend, adapted, taps), taps

    def _prompt_scores(self, rows: Sequence[Row], batch: ForwardBatch, hidden: Tensor) -> dict[int, PromptScores]:
        """By slot, the scores of the prompt tokens that its row predicts, for the `rows` that want scores."""
        scores: dict[int, PromptScores] = {}
        for row, first in zip(rows, batch.q_start.tolist(), strict=False):  # the last entry is an end
            count = self._slots.sampling(row.slot).prompt_top
            targets = self._slots.prompt_targets(row) if count >= 0 else []
            if targets:
                of_row, choose = hidden[first : first + len(targets)], self._backend.choose
                scores[row.slot] = prompt_scores(self._model.logits, of_row, targets, count, row.start + 1, choose)
        return scores


def _sampled_places(rows: Sequence[Row], q_start: Tensor) -> list[int]:
    """The places in the batch at which `rows` sample: each last known position and the drafts after it."""
    ends = q_start.tolist()[1:]
    return [
        place
        for row, end in zip(rows, ends, strict=True)
        if row.sample
        for place in range(end - 1 - len(row.drafts), end)
    ]


def _results(
    rows: Sequence[Row], drawn: Drawn, prompts: Mapping[int, PromptScores], vectors: Mapping[int, bytes | None]
) -> tuple[RowResult, ...]:
    """The result of each row that has one."""
    results = []
    for row in rows:
        slot = row.slot
        if row.sample:
            failure = drawn.failures.get(slot, "")
            waits = slot in drawn.waiting
            foreseen = drawn.foreseen.get(slot, ())
            tokens = tuple(drawn.tokens[slot])
            results.append(RowResult(slot, tokens, prompts.get(slot), None, failure, waits, foreseen=foreseen))
        elif slot in vectors:
            vector = vectors[slot]
            results.append(RowResult(slot, (), None, vector, "" if vector is not None else NOT_FINITE))
        elif slot in prompts:
            results.append(RowResult(slot, (), prompts[slot]))
    return tuple(results)
