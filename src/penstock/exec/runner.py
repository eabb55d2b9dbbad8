"""The runner: executes plans with a torch model.

Decides nothing about what to compute. Does not know the scheduler, text, or how a model is built: the model is a
`forward` that calls back for attention, and here attention means the KV store.

Invariant: between steps, everything known of a sequence is in the slot tables and the KV store; a released slot leaves
nothing behind that a later sequence could see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.contract.plan import Admit, PromptScores, Row, RowFailure, StepPlan, StepResult
from penstock.contract.ports import Clock, Grammars, ThinkingBudgets
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import ForwardBatch, SlotTables
from penstock.exec.guidance import Guidance
from penstock.exec.kv_store import KVStore
from penstock.exec.pooling import NOTHING_POOLED, Pooled, Pools
from penstock.exec.prompt_scores import prompt_scores
from penstock.exec.sampler import NOTHING, Sampled
from penstock.nn.causal_lm import CausalLM
from penstock.nn.paged import PagedAttend

__all__ = ["TorchRunner", "paged_attend"]

_NOT_FINITE = "The model's output for this request is not finite."


def paged_attend(kv: KVStore, batch: ForwardBatch) -> PagedAttend:
    """The way to attend in one step: writes its keys and values to the store, then reads all of each row's."""
    return PagedAttend(kv.keys, kv.values, batch.write_slots, batch.q_start, batch.kv_len, batch.block_table)


class TorchRunner:
    """Runs a `CausalLM` over a `KVStore`. Owned by the engine's thread; not thread-safe."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVStore,
        max_num_seqs: int,
        max_model_len: int,
        clock: Clock,
        grammars: Grammars | None = None,
        budgets: ThinkingBudgets | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._max_model_len = max_model_len
        self._slots = SlotTables(max_num_seqs, max_model_len, kv.block_size)
        self._guidance = Guidance(grammars, budgets)
        self._pools = Pools()
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        """Apply releases and admits, compute every row, sample and embed where asked; see `contract.ports.Runner`."""
        began = self._clock.now()
        slots = self._slots
        for slot in plan.releases:
            slots.release(slot)
            self._guidance.release(slot)
            self._pools.release(slot)
        for admit in plan.admits:
            slots.admit(admit)
            self._guidance.admit(admit)
            self._pools.admit(admit)
        for row in plan.rows:
            slots.advance(row)
        sampling = [row for row in plan.rows if row.sample]
        sampled, prompts, pooled = self._compute(plan.rows, sampling) if plan.rows else (NOTHING, (), NOTHING_POOLED)
        return self._result(plan.step, sampling, sampled, prompts, pooled, began)

    def warm_up(self) -> None:
        """Run the paths of a first request once, so that it is not slower than the tenth.

        Uses tables of its own and gives the block that it borrows back as it was: nothing that runs before or after
        can tell.
        """
        count = min(3, self._kv.block_size, self._max_model_len)
        spec = SamplingSpec((("logprobs", 0), ("seed", 0), ("temperature", 0.5), ("top_k", 2), ("top_p", 0.5)))
        admit = Admit(0, "warm-up", (0,) * count, (0,), 0, spec, 0)
        chunk = (Row(0, 0, count - 1, (), False),) if count > 1 else ()
        last = (Row(0, count - 1, 1, (), True),)
        kept, self._slots = self._slots, SlotTables(1, self._max_model_len, self._kv.block_size)
        try:
            with self._kv.borrowed_block(0):
                self.run(StepPlan(0, (), (admit,), chunk))
                self.run(StepPlan(1, (), (), last))
        finally:
            self._slots = kept

    @torch.inference_mode()
    def _compute(
        self, rows: Sequence[Row], sampling: Sequence[Row]
    ) -> tuple[Sampled, tuple[PromptScores, ...], Pooled]:
        """Forward all `rows`; score and embed prompts where that is asked for, choose a token for those `sampling`."""
        guided = self._guidance.begin(sampling)
        batch = self._slots.batch(rows, self._kv.device)
        attend = paged_attend(self._kv, batch)
        hidden = self._model.forward(batch.token_ids, batch.positions, attend)  # [T, H]
        prompts = tuple(self._scores(rows, batch, hidden))
        pooled = self._pools.take(rows, batch.q_start, hidden)
        if not sampling:
            return NOTHING, prompts, pooled
        if len(sampling) < len(hidden):
            hidden = hidden[[end - 1 for end, row in zip(batch.q_start.tolist()[1:], rows, strict=True) if row.sample]]
        logits = self._model.logits(hidden)  # [S, V]
        draws = [self._slots.draw(row.slot) for row in sampling]
        slots = [row.slot for row in sampling]
        positions = [row.start + row.count for row in sampling]
        look = lambda rows: self._slots.views([slots[row] for row in rows])  # noqa: E731 - one line, used once
        return self._guidance.sample(logits, draws, positions, guided, look), prompts, pooled

    def _scores(self, rows: Sequence[Row], batch: ForwardBatch, hidden: Tensor) -> Iterator[PromptScores]:
        """Scores of the prompt tokens that `rows` predict, of those rows that want them."""
        if not self._slots.scores_prompts:
            return
        for row, first in zip(rows, batch.q_start.tolist(), strict=False):  # of which the last is an end
            top = self._slots.draw(row.slot).prompt_top
            targets = self._slots.prompt_targets(row) if top >= 0 else []
            if targets:
                of_row = hidden[first : first + len(targets)]
                yield prompt_scores(self._model.logits, of_row, targets, top, row.slot, row.start + 1)

    def _result(
        self,
        step: int,
        sampling: Sequence[Row],
        sampled: Sampled,
        prompts: tuple[PromptScores, ...],
        pooled: Pooled,
        began: float,
    ) -> StepResult:
        """Remember the new tokens and report them; a failed row gets none."""
        tokens, logprobs, tops, ranks, failures = [], [], [], [], []
        for row, token, logprob, failed, top, rank in zip(sampling, *sampled, strict=True):
            if failed:
                failures.append(RowFailure(row.slot, _NOT_FINITE))
                continue
            self._slots.append(row.slot, token)
            tokens.append(token)
            logprobs.append(logprob)
            tops.append(top)
            ranks.append(rank)
        seconds = self._clock.now() - began
        return StepResult(
            step=step,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            failures=(*failures, *pooled.failures),
            seconds=seconds,
            tops=tuple(tops) if any(tops) else (),
            prompts=prompts,
            embeddings=pooled.embeddings,
            ranks=tuple(ranks) if any(ranks) else (),
        )
