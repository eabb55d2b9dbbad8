"""The scheduler: what each step computes, for whom, and where its KV goes. One file: plan, commit and abort must agree.

    submit, abort  ->  plan()  ->  (a runner computes it)  ->  commit(plan, result)  ->  events

There is no prefill and no decode phase: a sequence knows `len(tokens)` tokens, has `computed` of them, and catches up.
Whoever runs goes on first, in policy order; then the queue is admitted from. When blocks run out, the youngest running
sequence gives up its blocks and recomputes later, so the eldest always gets on and everything ends.

It does not know what a token means, how long a step took, or how anything is computed: no clock, no randomness, no I/O.
The same inputs give the same plans. Invariants: see `check`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from penstock.contract.config import SchedulerConfig
from penstock.contract.errors import EngineFault, InvalidParameter
from penstock.contract.events import Admitted, Embedded, Finished, FinishReason, Generated, PromptScored, SeqEvent
from penstock.contract.plan import Admit, Row, Stall, StallReason, StepPlan, StepResult, TopLogprobs
from penstock.contract.request import SequenceRequest
from penstock.contract.stats import SchedulerStats
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.block_pool import BlockPool, Lease
from penstock.core.invariants import check_sequences
from penstock.core.policy import RANKINGS, SeqList
from penstock.core.promises import Promises
from penstock.core.refusal import token_limit
from penstock.core.sequence import Seq, SeqState

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: what is left of the token budget, and what was decided so far."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    seqs: list[Seq] = field(default_factory=list)  # whose each row is
    admits: list[Admit] = field(default_factory=list)

    def add(self, seq: Seq, count: int, new_blocks: tuple[int, ...] = ()) -> None:
        sample = count == seq.remaining and seq.request.embedding is None
        self.rows.append(Row(seq.slot, seq.computed, count, new_blocks, sample))
        self.seqs.append(seq)
        self.budget -= count


@dataclass(frozen=True, slots=True)
class _Flight:
    """The plan that is being computed, and whose each of its rows is."""

    plan: StepPlan
    seqs: tuple[Seq, ...]


class Scheduler:
    """Makes plans and commits their results. Not thread-safe: one owner."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_blocks, config.block_size, config.prefix_caching)
        self._rank = RANKINGS[config.policy]
        self._seqs: dict[str, Seq] = {}
        self._waiting = SeqList()
        self._running = SeqList()
        self._promises = Promises()
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        self._releases: list[int] = []  # slots given back since the last plan
        self._flight: _Flight | None = None
        self._submitted = 0
        self._steps = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self._seqs)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the sequences that wait: what admitting them all may have to compute."""
        return sum(len(seq.tokens) for seq in self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            steps=self._steps,
            preemptions=self._preemptions,
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.available,
            cached_blocks=self._pool.evictable,
            query_tokens=self._pool.query_tokens,
            hit_tokens=self._pool.hit_tokens,
        )

    # ---- what comes in

    def submit(self, request: SequenceRequest) -> None:
        """Queue a sequence.

        Raises:
            InvalidParameter: a field cannot be used, or a live sequence has this id.
            PromptTooLong: the context has no room for the prompt, or for even one token after it.
            NeverFits: the pool has fewer blocks in all than the request may come to need.
        """
        if request.id in self._seqs:
            raise InvalidParameter("id", f"a live sequence has the id {request.id!r} already")
        limit = token_limit(request, self.config)
        chain = KeyChain(root_key(self.config.cache_root, request.cache_salt), self.config.block_size)
        seq = Seq(request, self._rank(request, self._submitted), limit, chain)
        self._name_blocks(seq)
        self._submitted += 1
        self._seqs[seq.id] = seq
        self._waiting.add(seq)

    def abort(self, seq_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> tuple[SeqEvent, ...]:
        """End a sequence now, whatever it is doing; an unknown id is no error and yields nothing.

        Between `plan` and `commit` too: its row is computed for nothing and the result ignored.
        """
        seq = self._seqs.get(seq_id)
        return () if seq is None else (self._finish(seq, Finished(seq_id, reason, message=message)),)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV. Running sequences keep theirs but share it no more."""
        self._pool.reset_prefix_cache()
        for seq in self._running:
            self._withdraw(seq)

    # ---- what is decided

    def plan(self) -> StepPlan:
        """Decide the next step; `commit` must follow before the next call.

        Raises:
            EngineFault: the previous plan has not been committed.
        """
        if self._flight is not None:
            raise EngineFault(f"plan {self._flight.plan.step} has not been committed")
        draft = _Draft(self.config.max_num_batched_tokens)
        self._continue_running(draft)
        stall = self._admit_waiting(draft)
        plan = StepPlan(
            step=self._steps,
            releases=tuple(self._releases),
            admits=tuple(draft.admits),
            rows=tuple(draft.rows),
            stalls=() if stall is None else (stall,),
            waiting=len(self._waiting),
        )
        self._releases.clear()
        self._steps += 1
        self._flight = _Flight(plan, tuple(draft.seqs))
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[SeqEvent, ...]:
        """Take in what a plan brought: new tokens, full blocks, ends. Events come in the order of the plan's rows.

        Raises:
            EngineFault: `result` is not a result of the plan in flight; nothing has changed.
        """
        flight = self._match_flight(plan, result)
        self._flight = None
        failures = {failure.slot: failure.message for failure in result.failures}
        scores = {scored.slot: scored for scored in result.prompts}
        vectors = {embedded.slot: embedded.vector for embedded in result.embeddings}
        count = len(result.tokens)
        tops, ranks = result.tops or ((),) * count, result.ranks or (0,) * count
        drawn = zip(result.tokens, result.logprobs, tops, ranks, strict=True)
        events: list[SeqEvent] = []
        for row, seq in zip(plan.rows, flight.seqs, strict=True):
            failed = row.slot in failures
            sampled = next(drawn) if row.sample and not failed else None
            if seq.state is SeqState.FINISHED:  # aborted while the step was being computed
                continue
            if not seq.announced:
                seq.announced = True
                events.append(Admitted(seq.id, seq.cached))
            if failed:
                events.append(self._finish(seq, Finished(seq.id, FinishReason.ERROR, message=failures[row.slot])))
                continue
            self._advance(seq, row.count)
            if row.slot in scores:
                of = scores[row.slot]
                events.append(PromptScored(seq.id, of.start, of.logprobs, of.tops, of.ranks))
            if sampled is not None:
                events += self._append(seq, *sampled)
            if row.slot in vectors:
                embedded = Embedded(seq.id, vectors[row.slot])
                events += [embedded, self._finish(seq, Finished(seq.id, FinishReason.STOP))]
        return tuple(events)

    def check(self) -> None:
        """Verify every invariant of pool, queue and sequences. For tests and idle moments: costs all that is live.

        Raises:
            EngineFault: one does not hold.
        """
        self._pool.check()
        check_sequences(self.config, self._seqs, self._running, self._waiting, self._pool, self._promises)
        slots = sorted([*self._free_slots, *(seq.slot for seq in self._running)])
        if slots != list(range(self.config.max_num_seqs)):
            raise EngineFault("scheduler: not so: every slot is free or belongs to one running sequence")

    # ---- planning: those who run

    def _continue_running(self, draft: _Draft) -> None:
        """A row for each running sequence, eldest first. No chunk takes the token that a later one needs to decode."""
        reserved = sum(seq.remaining == 1 for seq in self._running)
        for seq in tuple(self._running):
            if seq.state is not SeqState.RUNNING:  # an elder needed its blocks
                continue
            reserved -= seq.remaining == 1
            count = min(seq.remaining, draft.budget - reserved)
            if count < 1:
                continue
            new_blocks = self._cover(seq, seq.computed + count)
            if new_blocks is not None:
                draft.add(seq, count, new_blocks)

    def _cover(self, seq: Seq, num_positions: int) -> tuple[int, ...] | None:
        """Extend the lease to `num_positions`, at the cost of the youngest; None if `seq` itself was the youngest."""
        need = self._pool.blocks_for(num_positions) - len(seq.lease.blocks)
        if need <= 0:
            return ()
        while not self._pool.extend(seq.lease, need):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return None
        return tuple(seq.lease.blocks[-need:])

    def _preempt(self, seq: Seq) -> None:
        """Back to the queue with its tokens; its full blocks stay findable until somebody needs them."""
        self._leave(seq)
        seq.preempt()
        self._waiting.add(seq)
        self._preemptions += 1

    # ---- planning: those who wait

    def _admit_waiting(self, draft: _Draft) -> Stall | None:
        """Admit from the queue while there is room; says why its head, if any is left, was not admitted.

        A head that lacks blocks may be passed by smaller ones, `max_bypasses` times in all; then all wait for it. Who
        waits for a shared prefix is passed freely: the blocks come with the next commit.
        """
        index, lacking = 0, 0
        head: Seq | None = None  # the first that lacks blocks
        first_stall: Stall | None = None
        spare = sum(self._may_grow(seq) for seq in self._running) if len(self._waiting) else 0
        while index < len(self._waiting):
            if head is not None and head.bypasses + lacking > self.config.max_bypasses:
                break
            seq = self._waiting[index]
            stall = self._try_admit(seq, draft, spare)
            if stall is None:
                spare += self._may_grow(seq)
                if head is not None:
                    head.bypasses += 1
                continue
            first_stall = first_stall or stall
            if stall.reason in (StallReason.NO_SLOT, StallReason.NO_BUDGET):
                break
            if stall.reason is StallReason.NO_BLOCKS:
                head = head or seq
                lacking += 1
            index += 1
        return first_stall

    def _try_admit(self, seq: Seq, draft: _Draft, spare: int) -> Stall | None:
        """Give `seq` a slot, blocks and a row, or say what it waits for; then nothing has changed."""
        if not self._free_slots:
            return Stall(seq.id, StallReason.NO_SLOT, need=1, have=0)
        if draft.budget < 1:
            return Stall(seq.id, StallReason.NO_BUDGET, need=1, have=0)
        keys, known = () if seq.request.fresh_prompt else seq.chain.keys, len(seq.tokens)
        quote = self._pool.quote(keys, known)
        shared = self._promises.run_length(keys[quote.cached : (known - 1) // self.config.block_size])
        if shared:
            return Stall(seq.id, StallReason.SHARED_PREFIX, need=quote.cached + shared, have=quote.cached)
        lease = self._pool.acquire(keys, known, spare)
        if lease is None:
            return Stall(seq.id, StallReason.NO_BLOCKS, need=quote.need + spare, have=quote.have)
        self._admit(seq, lease, draft)
        return None

    def _admit(self, seq: Seq, lease: Lease, draft: _Draft) -> None:
        self._waiting.remove(seq)
        seq.admit(lease, heapq.heappop(self._free_slots), lease.cached * self.config.block_size)
        self._running.add(seq)
        self._promises.make(seq, seq.chain.keys[lease.cached :])
        request = seq.request
        tokens, blocks = tuple(seq.tokens), tuple(lease.blocks)
        prompt_tokens = len(request.prompt)
        room, form = seq.limit - prompt_tokens, (request.grammar, request.embedding, request.thinking)
        terms = (request.sampling, request.choice, prompt_tokens, room, *form)
        draft.admits.append(Admit(seq.slot, seq.id, tokens, blocks, seq.computed, *terms))
        draft.add(seq, min(seq.remaining, draft.budget))

    def _may_grow(self, seq: Seq) -> bool:
        """Whether a running sequence may outgrow its lease. An admission must leave a block for each that may.

        Otherwise the newcomer would be the first to be preempted, a few steps later, with its work thrown away.
        """
        return len(seq.lease.blocks) < self._pool.blocks_for(seq.limit - 1)  # the last token is never computed

    # ---- committing

    def _match_flight(self, plan: StepPlan, result: StepResult) -> _Flight:
        flight = self._flight
        if flight is None or plan != flight.plan:
            raise EngineFault(f"plan {plan.step} is not in flight")
        if result.step != plan.step:
            raise EngineFault(f"a result of step {result.step} came for plan {plan.step}")
        failed = {failure.slot for failure in result.failures}
        if len(failed) != len(result.failures) or not failed <= {row.slot for row in plan.rows}:
            raise EngineFault(f"step {plan.step}: failures name slots that have no row, or one twice")
        samples = sum(row.sample and row.slot not in failed for row in plan.rows)
        beside = {len(column) for column in (result.tops, result.ranks) if column}
        if not samples == len(result.tokens) == len(result.logprobs) or not beside <= {samples}:
            raise EngineFault(
                f"step {plan.step}: {samples} rows sample, but {len(result.tokens)} tokens and"
                f" {len(result.logprobs)} logprobs came"
            )
        embedded = [(row, seq) for row, seq in zip(plan.rows, flight.seqs, strict=True) if seq.request.embedding]
        due = {row.slot for row, seq in embedded if row.start + row.count == len(seq.request.prompt)}
        if sorted(each.slot for each in result.embeddings) != sorted(due - failed):
            raise EngineFault(f"step {plan.step}: embeddings came for other slots than those that want them")
        return flight

    def _advance(self, seq: Seq, count: int) -> None:
        """Note `count` more computed positions, and seal the blocks they filled."""
        seq.computed += count
        sealed = seq.lease.sealed
        if seq.computed < (sealed + 1) * self.config.block_size:  # nearly every token
            return
        filled = seq.chain.keys[sealed : seq.computed // self.config.block_size]
        for index, key in enumerate(filled, start=sealed):
            self._pool.seal(seq.lease, index, key)
        self._promises.settle(seq, filled)

    def _append(self, seq: Seq, token: int, logprob: float, top: TopLogprobs, rank: int) -> list[SeqEvent]:
        """One more token: it may end the sequence, and it may fill a block."""
        seq.tokens.append(token)
        generated = Generated(seq.id, token, logprob, top, rank)
        ending = seq.ending()
        if ending is not None:
            return [generated, self._finish(seq, ending)]
        if len(seq.tokens) % self.config.block_size == 0:
            named = len(seq.chain.keys)
            self._name_blocks(seq)
            self._promises.make(seq, seq.chain.keys[named:])
        return [generated]

    def _name_blocks(self, seq: Seq) -> None:
        if self.config.prefix_caching:
            seq.chain.follow(seq.tokens)

    # ---- leaving

    def _finish(self, seq: Seq, ending: Finished) -> Finished:
        if seq.state is SeqState.RUNNING:
            self._leave(seq)
        else:
            self._waiting.remove(seq)
        seq.finish()
        del self._seqs[seq.id]
        return ending

    def _leave(self, seq: Seq) -> None:
        """Give back what running takes: promises, blocks, slot."""
        self._withdraw(seq)
        self._pool.release(seq.lease)
        self._running.remove(seq)
        heapq.heappush(self._free_slots, seq.slot)
        self._releases.append(seq.slot)

    def _withdraw(self, seq: Seq) -> None:
        self._promises.settle(seq, seq.chain.keys[seq.lease.sealed :])
