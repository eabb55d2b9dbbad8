"""The runner: executes plans with a torch model.

Does what the plan says. Does not know the scheduler, text, or how a model is built: the model is a `forward` that calls
back for attention, and here attention means the KV store.

Invariant: between steps, everything known of a sequence is in the slot tables and the KV store; a released slot leaves
nothing behind that a later sequence could see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.contract.plan import Admit, GuessWork, PromptScores, Row, RowResult, SampledToken, StepPlan, StepResult
from penstock.contract.ports import Clock, Grammars, ThinkingBudgets
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import ForwardBatch, SlotTables
from penstock.exec.block_keeping import BlockKeeping
from penstock.exec.grammar_masking import GrammarMasking, PendingMasks
from penstock.exec.kv_store import KVStore
from penstock.exec.memory_ahead import MemoryAhead
from penstock.exec.pooling import Pools
from penstock.exec.prompt_scores import prompt_scores
from penstock.exec.sampler import Sampled, see_nothing
from penstock.exec.state_store import StateStore
from penstock.kernels.backend import Backend
from penstock.kernels.state_runs import StateRuns
from penstock.nn.causal_lm import CausalLM
from penstock.nn.paged import PagedAttend
from penstock.sampling import RowViews
from penstock.thread_turns import going_first, letting_others
from penstock.weights.embedding_layers import EmbeddingLayer

__all__ = ["RowGuesser", "TorchRunner", "paged_attend"]

_NOT_FINITE = "The model's output for this request is not finite."
_NOT_FOLLOWED = "The grammar of this request became too complex to follow."


def paged_attend(
    kv: KVStore,
    batch: ForwardBatch,
    backend: Backend,
    states: Sequence[Tensor] = (),
    runs: StateRuns | None = None,
) -> PagedAttend:
    """The way to attend in one step: writes its keys and values to the store, then reads all of each row's.

    With `states` and their `runs`, where the model carries state.
    """
    of = batch
    return PagedAttend(kv.keys, kv.values, of.write_slots, of.q_start, of.kv_len, of.block_table, backend, states, runs)


class RowGuesser(Protocol):
    """What guesses within a step how its sequences go on; see `exec.draft_model.DraftModel`."""

    kv: KVStore

    def admit(self, admit: Admit) -> None:
        """Take in a sequence."""
        ...

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        ...

    def advance(self, row: Row) -> None:
        """`row` is computed now."""
        ...

    def reset(self) -> None:
        """Forget every sequence."""
        ...

    def borrowed(self, block: int) -> AbstractContextManager[None]:
        """Inside the `with`, other sequences are followed, which may use `block`."""
        ...

    def follow(self, rows: Sequence[Row], results: Sequence[RowResult]) -> tuple[tuple[RowResult, ...], GuessWork]:
        """Take in what rows drew, and guess as they want: the results with guesses, and what that took."""
        ...


class TorchRunner:
    """Runs a `CausalLM` over a `KVStore`, and a `StateStore` where it carries state.

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
        *,
        foresees: bool = False,
    ) -> None:
        self._drafter = drafter
        self._foresees = foresees and states is None  # no drafts are planned where state is carried
        self._states = states
        self._keeping = keeping
        self._embedding_layers = tuple(embedding_layers)
        self._model = model
        self._kv = kv
        self._backend = backend
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._slots = SlotTables(max_num_seqs, max_model_len, kv.block_size)
        self._masking = GrammarMasking(grammars, budgets, backend.choose)
        self._pools = Pools(self._embedding_layers)
        self._held: dict[int, Tensor] = {}  # of slots whose draw waits, [H] of their last known position
        stores = (kv,) if drafter is None else (kv, drafter.kv)
        self._ahead = MemoryAhead([cache for store in stores for cache in (*store.keys, *store.values)])
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        """Apply releases and admits, compute every row, sample and embed where asked; see `contract.ports.Runner`."""
        began = self._clock.now()
        slots = self._slots
        if self._keeping is not None:
            self._keeping.begin(plan)
        for slot in plan.releases:
            slots.release(slot)
            self._masking.release(slot)
            self._pools.release(slot)
            self._held.pop(slot, None)
            if self._drafter is not None:
                self._drafter.release(slot)
        for admit in plan.admits:
            slots.admit(admit)
            self._masking.admit(admit)
            self._pools.admit(admit)
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
                results += self._compute(rows)
                if self._drafter is not None:
                    results, guessing = self._drafter.follow(rows, results)
        news = None if self._keeping is None else self._keeping.end()
        return StepResult(plan.step, results, self._clock.now() - began, restoring, news, guessing)

    def reset(self) -> bool:
        """See `contract.ports.Runner`; keys and values stay."""
        self._slots = SlotTables(self._max_num_seqs, self._max_model_len, self._kv.block_size)
        self._masking.reset()
        self._held.clear()
        if self._states is not None:
            self._states.reset()
        self._pools = Pools(self._embedding_layers)
        if self._drafter is not None:
            self._drafter.reset()
        if self._keeping is not None:
            self._keeping.end()
        return False

    def close(self) -> None:
        """Save no more blocks, where any are saved, but for those that were to be saved."""
        if self._keeping is not None:
            self._keeping.close()

    def warm_up(self) -> None:
        """Run the paths of a first request once, so that it is not slower than the tenth.

        Uses tables of its own and gives the block that it borrows back as it was: nothing that runs before or after
        can tell.
        """
        count = min(3, self._kv.block_size, self._max_model_len)
        spec = SamplingSpec((("logprobs", 0), ("seed", 0), ("temperature", 0.5), ("top_k", 2), ("top_p", 0.5)))
        tokens = (0,) * count
        admit = Admit(slot=0, seq_id="warm-up", tokens=tokens, blocks=(0,), computed=0, sampling=spec, choice=0)
        chunk = (Row(0, 0, count - 1, (), False),) if count > 1 else ()
        fits = count < min(self._kv.block_size, self._max_model_len)  # a guess behind the token that is drawn
        last = (Row(0, count - 1, 1, (), True, follow=count + 1 if fits else 0, guesses=int(fits)),)
        keeping, self._keeping = self._keeping, None
        kept, self._slots = self._slots, SlotTables(1, self._max_model_len, self._kv.block_size)
        try:
            with self._kv.borrowed_block(0), nullcontext() if self._drafter is None else self._drafter.borrowed(0):
                self.run(StepPlan(0, (), (admit,), chunk))
                self.run(StepPlan(1, (), (), last))
        finally:
            self._slots, self._keeping = kept, keeping

    def _restore(self, rows: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[RowResult, ...]]:
        """Read what `rows` say is stored; the rows that compute, and what came of those that came short."""
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

    def _compute(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        """Compute `rows`; score and embed prompts where that is asked for, draw the tokens of rows that sample.

        Where a draw waited, nothing is computed again, which state would not bear: what it draws from was held.
        """
        waited = [row for row in rows if row.slot in self._held and not row.drafts] if self._held else []
        fresh = [row for row in rows if row not in waited] if waited else rows
        sampling = [*(row for row in fresh if row.sample), *waited]
        pending = self._masking.begin(sampling)
        prompts: dict[int, PromptScores] = {}
        vectors: dict[int, bytes | None] = {}
        draws_from = [self._held.pop(row.slot)[None] for row in waited]  # [., H] each
        if fresh:
            batch = self._slots.batch(fresh, self._kv.device)
            carried = () if self._states is None else (self._states.states, self._states.runs(fresh))
            attend = paged_attend(self._kv, batch, self._backend, *carried)
            with letting_others():
                hidden = self._model.forward(batch.token_ids, batch.positions, attend)  # [T, H]
            prompts = self._prompt_scores(fresh, batch, hidden) if self._slots.scores_prompts else {}
            vectors = self._pools.take(fresh, batch.q_start, hidden)
            if len(sampling) - len(waited) < hidden.shape[0]:
                hidden = hidden[_sampled_places(fresh, batch.q_start)]
            draws_from.insert(0, hidden)
            for row in fresh if self._held else ():
                self._held.pop(row.slot, None)  # it waited, and is computed again because it has drafts
        for row in waited if self._states is not None else ():
            self._states.keep(row)
        drawn = _Drawn(defaultdict(list), {}, {}, {})
        if sampling:
            hidden = torch.cat(draws_from) if waited else draws_from[0]
            self._draw(sampling, self._model.logits(hidden), pending, drawn)  # of [S, V]
            for slot, place in drawn.waiting.items():
                self._held[slot] = hidden[place].clone()
                self._slots.put_off_draw(slot)
            if self._foresees:
                self._foresee(sampling, drawn)
        return _results(rows, drawn, prompts, vectors)

    def _foresee(self, rows: Sequence[Row], drawn: _Drawn) -> None:
        """Note what the forms of `rows` make likely to come next."""
        for row in rows:
            if row.slot not in drawn.waiting and row.slot not in drawn.failures:
                drawn.foreseen[row.slot] = self._masking.foresee(row.slot)

    def _draw(self, rows: Sequence[Row], logits: Tensor, pending: PendingMasks | None, drawn: _Drawn) -> None:
        """Draw the next token of all `rows`, then of those whose token was their next draft, until none is left.

        One place after the other, as if there were no drafts: whatever a place depends on (masks, budgets, penalties)
        has then seen exactly the tokens before it. Rows that depend on nothing of that kind draw at all places at once,
        and so do those whose forms go along with their drafts.

        Args:
            rows: at least one; all sample.
            logits: `[S, V]`, of each row's last known position and its drafts, row after row; changed.
            pending: the masks of the first places.
            drawn: what comes of it is added here.
        """
        going, places = rows, list(accumulate([1 + len(row.drafts) for row in rows[:-1]], initial=0))
        if len(rows) < logits.shape[0]:
            watched = self._masking.watched(pending)
            free = [at for at, row in enumerate(rows) if row.drafts and self._draws_freely(row, watched)]
            if free:
                self._draw_at_once([rows[at] for at in free], [places[at] for at in free], logits, drawn)
            along = [at for at, row in enumerate(rows) if row.drafts and self._draws_along(row)]
            further = self._draw_along([(rows[at], places[at]) for at in along], logits, drawn)
            done = {*free, *along}
            further += [(rows[at], places[at]) for at in range(len(rows)) if at not in done]
            if not further:
                return
            going, places = [row for row, _ in further], [place for _, place in further]
            pending = self._masking.begin(going)
        while True:
            here = logits if len(places) == logits.shape[0] else logits[places]
            sampled = self._draw_once(going, here, pending)
            for row, place in zip(going, places, strict=True):
                if self._masking.waits(row.slot):
                    drawn.waiting[row.slot] = place
            right = [at for at, row in enumerate(going) if self._keep(row, drawn, sampled, at)]
            if not right:
                return
            going, places = [going[at] for at in right], [places[at] + 1 for at in right]
            pending = self._masking.begin(going)

    def _draws_freely(self, row: Row, watched: Set[int]) -> bool:
        """Whether the draws of a row depend on their places' logits and positions alone, not on the tokens before."""
        return row.slot not in watched and not self._slots.sampling(row.slot).row_stages

    def _draw_at_once(self, rows: Sequence[Row], places: Sequence[int], logits: Tensor, drawn: _Drawn) -> None:
        """Draw at every place of `rows`, which draw freely and begin at `places`; keep what is not behind a miss."""
        counts = [1 + len(row.drafts) for row in rows]
        own, next_positions = self._slots.next_draws(rows)
        samplings = [sampling for sampling, count in zip(own, counts, strict=True) for _ in range(count)]
        positions = [
            at for first, count in zip(next_positions, counts, strict=True) for at in range(first, first + count)
        ]
        if len(positions) < logits.shape[0]:
            chosen = [at for first, count in zip(places, counts, strict=True) for at in range(first, first + count)]
            logits = logits[chosen]
        sampled = self._masking.sample(logits, samplings, positions, None, see_nothing)
        first = 0
        for row, count in zip(rows, counts, strict=True):
            at = first
            while self._keep(row, drawn, sampled, at):
                at += 1
            first += count

    def _draws_along(self, row: Row) -> bool:
        """Whether the draws of a row depend on their places and on a form alone that can go along with its drafts."""
        return not self._slots.sampling(row.slot).row_stages and self._masking.goes_along(row.slot)

    def _draw_along(self, rows: Sequence[tuple[Row, int]], logits: Tensor, drawn: _Drawn) -> list[tuple[Row, int]]:
        """Draw at every place of rows whose forms go along with their drafts; who is to go on from which place.

        Args:
            rows: each with its first place.
            logits: as for `_draw`.
            drawn: what comes of it is added here.
        """
        if not rows:
            return []
        own, next_positions = self._slots.next_draws([row for row, _ in rows])
        of = [logits[place : place + 1 + len(row.drafts)] for row, place in rows]
        sampled, spans = self._masking.sample_along([row for row, _ in rows], of, own, next_positions)
        further: list[tuple[Row, int]] = []
        for (row, place), span in zip(rows, spans, strict=True):
            for at in span[:-1]:
                self._keep(row, drawn, sampled, at)
            if self._masking.waits(row.slot):
                drawn.waiting[row.slot] = place + len(span) - 1
            elif self._keep(row, drawn, sampled, span[-1]):
                further.append((row, place + len(span)))
        return further

    def _draw_once(self, rows: Sequence[Row], logits: Tensor, pending: PendingMasks | None) -> Sampled:
        """One token of each row, from `logits` `[R, V]`."""
        samplings, positions = self._slots.next_draws(rows)

        def row_views(chosen: Sequence[int]) -> RowViews:
            return self._slots.views([rows[at].slot for at in chosen])

        return self._masking.sample(logits, samplings, positions, pending, row_views)

    def _keep(self, row: Row, drawn: _Drawn, sampled: Sampled, at: int) -> bool:
        """Take what entry `at` drew for `row`; whether it is the row's next draft."""
        if row.slot in drawn.waiting:
            return False
        if sampled.failed[at]:
            drawn.failures[row.slot] = _NOT_FOLLOWED if self._masking.is_broken(row.slot) else _NOT_FINITE
            return False
        token, tokens = sampled.tokens[at], drawn.tokens[row.slot]
        self._slots.append(row.slot, token)
        tokens.append(SampledToken(token, sampled.logprobs[at], sampled.ranks[at], sampled.top_logprobs[at]))
        if len(tokens) > len(row.drafts) or token != row.drafts[len(tokens) - 1]:
            return False
        self._slots.confirm_draft(row.slot)
        return True

    def _prompt_scores(self, rows: Sequence[Row], batch: ForwardBatch, hidden: Tensor) -> dict[int, PromptScores]:
        """Slot to scores of the prompt tokens that its row predicts, of those `rows` that want them."""
        scores: dict[int, PromptScores] = {}
        for row, first in zip(rows, batch.q_start.tolist(), strict=False):  # of which the last is an end
            count = self._slots.sampling(row.slot).prompt_top
            targets = self._slots.prompt_targets(row) if count >= 0 else []
            if targets:
                of_row = hidden[first : first + len(targets)]
                scores[row.slot] = prompt_scores(self._model.logits, of_row, targets, count, row.start + 1)
        return scores


class _Drawn(NamedTuple):
    """What the rows of a step drew, by slot.

    Attributes:
        tokens: in order of position.
        failures: why the last draw failed.
        waiting: the place in the logits that a draw waits at.
        foreseen: what is likely to come next, where anything is.
    """

    tokens: defaultdict[int, list[SampledToken]]
    failures: dict[int, str]
    waiting: dict[int, int]
    foreseen: dict[int, tuple[int, ...]]


def _sampled_places(rows: Sequence[Row], q_start: Tensor) -> list[int]:
    """The places in the batch, of those that `rows` sample at: each last known position, and the drafts behind it."""
    ends = q_start.tolist()[1:]
    return [
        place
        for row, end in zip(rows, ends, strict=True)
        if row.sample
        for place in range(end - 1 - len(row.drafts), end)
    ]


def _results(
    rows: Sequence[Row], drawn: _Drawn, prompts: Mapping[int, PromptScores], vectors: Mapping[int, bytes | None]
) -> tuple[RowResult, ...]:
    """What came of each row that has something to say."""
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
            results.append(RowResult(slot, (), None, vector, "" if vector is not None else _NOT_FINITE))
        elif slot in prompts:
            results.append(RowResult(slot, (), prompts[slot]))
    return tuple(results)
