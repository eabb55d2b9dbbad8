"""The scheduler: one file, because plan, commit and abort must agree on who runs, what is computed and where KV goes.

    submit, abort  ->  plan(drafts)  ->  (a runner computes it)  ->  commit(plan, result)  ->  events

There is no prefill and no decode phase: a sequence knows `len(tokens)` tokens, has computed `computed` of them, and
catches up. If its tokens look ahead (`config.looks_ahead`), it does so in one step, and waits until a whole step is
free. Running sequences go first, in policy order; then the queue is admitted (`core.admitter`). Under `fair`, a tenant
that may take another's slot is admitted before them (`core.slot_claims`). When blocks run out, the youngest running
sequence gives up its blocks and recomputes later, so the oldest always advances and every sequence ends.

Up to `config.depth` plans may be in flight: planned and not committed. Blocks and slots that such a plan uses go to no
other sequence. Drafts take what is left: they never displace a row, an admission or a block that a sequence may need.

A step that fails as a whole ends no sequence: all of them wait again with their tokens, and those with a row in it are
computed one by one until it is known which of them makes steps fail (`core.suspects`).

Each result says how long its step took. This determines how many prompt tokens the next steps read while any sequence
decodes (`core.chunk_limit`). The scheduler does not know what a token means or how anything is computed: it has no
clock, no randomness and no I/O. The same inputs give the same plans. Invariants: see `check`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from penstock.contract.cache_events import CacheEvent
from penstock.contract.errors import EngineFault, InvalidParameter
from penstock.contract.events import Admitted, Embedded, Finished, FinishReason, Generated, PromptScored, SeqEvent
from penstock.contract.plan import (
    Draft,
    Draftable,
    Row,
    RowResult,
    SampledToken,
    Stall,
    StallReason,
    StepPlan,
    StepResult,
)
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.contract.stats import SchedulerStats
from penstock.core.admitter import Admitter
from penstock.core.backlog import Backlog, backlog_of
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.block_pool import BlockPool, Lease
from penstock.core.block_uses import CachedBlocks
from penstock.core.cache_log import CacheLog
from penstock.core.checkpoints import Checkpoints
from penstock.core.chunk_limit import chunk_limit
from penstock.core.draft_chances import MODEL
from penstock.core.drafting import Drafting
from penstock.core.fair_shares import GENERATED_WEIGHT, FairQueue
from penstock.core.in_flight import InFlight, InFlightStep
from penstock.core.invariants import check_plans, check_sequences
from penstock.core.pending_blocks import PendingBlocks
from penstock.core.plain_steps import PlainSteps, block_changes, can_be_plain, plain_steps
from penstock.core.policy import RANKINGS, SeqList
from penstock.core.refusal import token_limit
from penstock.core.restoring import SOUGHT_AHEAD, Restoring
from penstock.core.sequence import Seq, SeqState
from penstock.core.slot_claims import SlotClaims
from penstock.core.state_keeping import StateKeeping
from penstock.core.step_time import StepTimes
from penstock.core.steps import PlanBuilder
from penstock.core.suspects import POISONED, Suspects
from penstock.core.waiting import OneQueue, QueuePart, QueueParts, TenantLoad, WaitingQueue

__all__ = ["Scheduler"]


class Scheduler:
    """Makes plans and commits their results. Not thread-safe: one owner.

    Args:
        config: what it knows of model and memory.
        cache_log: notes what enters and leaves the prefix cache, for `take_cache_events`. No plan depends on it.
    """

    def __init__(self, config: SchedulerConfig, cache_log: CacheLog | None = None) -> None:
        self.config = config
        self._cache_log = cache_log
        most = None if config.window is None else config.most_blocks(config.max_model_len)
        checkpoints = None if config.checkpoints is None else Checkpoints(config.checkpoints)
        self._pool = BlockPool(
            config.num_blocks, config.block_size, config.prefix_caching, config.window, most, checkpoints, cache_log
        )
        self._rank = RANKINGS[config.policy]
        self._seqs: dict[str, Seq] = {}
        level = GENERATED_WEIGHT * config.max_num_batched_tokens  # what a step computes at most
        self._waiting: WaitingQueue = FairQueue(level) if config.policy == "fair" else OneQueue()
        self._running = SeqList()
        self._pending_blocks = PendingBlocks()
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        self._times = StepTimes(config.window, config.step_times)
        self._restoring = Restoring(config, self._times, self._pool) if config.storing else None
        self._states = None
        if checkpoints is not None:
            self._states = StateKeeping(config, self._pool, checkpoints, self._restoring)
        self._admitter = Admitter(
            config,
            self._pool,
            self._states,
            self._waiting,
            self._running,
            self._pending_blocks,
            self._free_slots,
            self._restoring,
        )
        self._releases: list[int] = []  # slots given back since the last plan
        self._in_flight = InFlight(config.depth)
        self._claims = SlotClaims(
            config, self._pool, self._waiting, self._running, self._in_flight, self._admitter, self._preempt
        )
        self._suspects = Suspects()
        spares = None if self._states is None else self._states.spares
        self._drafting = Drafting(config, self._pool, self._times, spares)
        self._submitted = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished, or any block is to be saved."""
        return bool(self._seqs) or (self._restoring is not None and self._restoring.pending)

    @property
    def in_flight(self) -> int:
        """Plans that were made and not committed."""
        return len(self._in_flight)

    @property
    def can_plan_ahead(self) -> bool:
        """Whether one more plan may be made now, and is likely to compute something."""
        if self._suspects or not self._in_flight.has_room:
            return False
        return any(seq.remaining for seq in self._running) or bool(self._waiting and self._free_slots)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: new and preempted ones."""
        return len(self._waiting)

    @property
    def given_back(self) -> int:
        """Blocks that running sequences gave back since the start because their window had left them."""
        return self._pool.given_back

    @property
    def restored(self) -> int:
        """How often a sequence continued from a checkpoint of its recurrent state, since the start."""
        return 0 if self._states is None else self._states.restored

    @property
    def times(self) -> StepTimes:
        """What steps take, as far as it was learned; not to be changed by the caller."""
        return self._times

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of the counts."""
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            steps=self._in_flight.next_step,
            preemptions=self._preemptions,
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.available,
            cached_blocks=self._pool.evictable,
            query_tokens=self._pool.query_tokens,
            hit_tokens=self._pool.hit_tokens,
            sought_tokens=0 if self._restoring is None else self._restoring.sought_tokens,
            restored_tokens=0 if self._restoring is None else self._restoring.restored_tokens,
        )

    def adapters_in_use(self) -> tuple[frozenset[str], frozenset[str]]:
        """The adapters of running and of waiting sequences. Takes time in proportion to the queue."""
        running, waiting = (
            frozenset(seq.request.adapter for seq in seqs if seq.request.adapter)
            for seqs in (self._running, self._waiting)
        )
        return running, waiting

    def queue_part(self, tenant: str) -> QueuePart:
        """A tenant's part of the queue."""
        return self._waiting.part_of(tenant)

    def queue_parts(self) -> QueueParts:
        """Every tenant's part of the queue. Takes time in proportion to its length."""
        return self._waiting.parts()

    def tenant_loads(self) -> dict[str, TenantLoad]:
        """Each tenant's running and waiting sequences now. Takes time in proportion to the queue."""
        loads: dict[str, TenantLoad] = {}
        for seq in self._running:
            load = loads.get(seq.request.tenant, TenantLoad())
            loads[seq.request.tenant] = load._replace(running=load.running + 1)
        for seq in self._waiting:
            load = loads.get(seq.request.tenant, TenantLoad())
            tokens = load.waiting_tokens + len(seq.tokens)
            loads[seq.request.tenant] = TenantLoad(load.running, load.waiting + 1, tokens)
        return loads

    def cached_blocks(self) -> CachedBlocks:
        """Copy what is known of the prefix cache's blocks, so that another thread can make a tree of it."""
        return self._pool.cached()

    def backlog(self, request: SequenceRequest) -> Backlog:
        """What must happen before `request` begins, if submitted now. Takes time in proportion to the queue."""
        ahead = self._waiting.before(request, self._rank(request, self._submitted))
        backlog = backlog_of(self.config, self._times, self._pool, list(self._running), ahead, len(request.prompt))
        return backlog._replace(ends=0) if self._claims.would_take(request) else backlog

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
        root = root_key(self.config.model_digest, request.cache_salt, request.adapter_digest)
        chain = KeyChain(root, self.config.block_size)
        seq = Seq(request, self._rank(request, self._submitted), limit, chain)
        self._name_blocks(seq)
        self._submitted += 1
        self._seqs[seq.id] = seq
        self._waiting.add(seq)

    def abort(self, seq_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> tuple[SeqEvent, ...]:
        """End a sequence now, whatever it is doing; an unknown id is no error and yields nothing.

        Also between `plan` and `commit`: then its row is computed in vain and the result ignored.
        """
        seq = self._seqs.get(seq_id)
        return () if seq is None else (self._finish(seq, Finished(seq_id, reason, message=message)),)

    def unsought(self) -> list[tuple[str, int, tuple[bytes, ...]]]:
        """Sequences that may be admitted next, whose blocks should be looked for: id, blocks in memory, missing keys.

        Each is named once while it waits; this decides nothing. Report what was found with `note_stored`, even if no
        key was missing: memory may have forgotten blocks by the time of admission. None are named while suspects are
        computed alone, since reading may be what fails.
        """
        if self._restoring is None or self._suspects or not self._waiting:
            return []
        waiting = tuple(islice(self._waiting.in_order(), SOUGHT_AHEAD))
        unsought = [(seq.id, *self._restoring.seek(seq)) for seq in waiting if not seq.sought]
        return [of for of in unsought if of[1] or of[2]]

    def note_stored(self, seq_id: str, blocks: int) -> None:
        """These leading blocks of a waiting sequence are in memory or stored; they may be gone when they are read."""
        seq = self._seqs.get(seq_id)
        if seq is not None and self._restoring is not None:
            seq.stored = blocks

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV except what was saved. Running sequences keep theirs but no longer share it."""
        if self._restoring is not None:
            self._restoring.forget()
        self._pool.reset_prefix_cache()
        for seq in self._running:
            self._withdraw(seq)

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """What entered and left the prefix cache since the last call, in order; nothing without a `cache_log`."""
        return () if self._cache_log is None else self._cache_log.take()

    # ---- what is decided

    def draftable(self) -> Iterator[Draftable]:
        """The sequences whose next row could carry drafts.

        None while suspects are computed alone, or if there is nowhere to keep the recurrent state before drafts.
        """
        if self._suspects:
            return iter(())
        return self._drafting.draftable(self._running, self._in_flight.next_step)

    def plan(self, drafts: Sequence[Draft] = ()) -> StepPlan:
        """Decide the next step.

        Args:
            drafts: guesses of the next tokens; several for one sequence follow each other. Unusable parts are left out.

        Raises:
            EngineFault: `config.depth` plans have not been committed.
        """
        self._in_flight.require_room()
        limit = chunk_limit(self.config, self._times, self._running)
        builder = PlanBuilder(self._in_flight.next_step, self.config.max_num_batched_tokens, limit)
        if self._restoring is not None:
            builder.restores = self._restoring.blocks_a_step(self._running)
            builder.stateful = self._states is not None
        if self._suspects:
            stall = self._continue_suspect(builder)
        else:
            resting = self._claims.admit(builder)
            self._continue_running(builder, resting)
            stall = self._admit(builder) if self._waiting else None
        if (drafts or self.config.draft_context) and not self._suspects:
            self._drafting.add(builder, drafts, self._admitter.spare(), others_wait=bool(self._waiting))
        if self._states is not None:
            self._states.assign_states(builder)
        saves = ((), ()) if self._restoring is None else self._restoring.take_saves()
        step = builder.build(tuple(self._releases), stall, len(self._waiting), *saves)
        self._releases.clear()
        self._in_flight.add(step)
        return step.plan

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[SeqEvent, ...]:
        """Apply the result of a plan: new tokens, full blocks, ends. Events come in the order of the plan's rows.

        Raises:
            EngineFault: `result` is not a result of the oldest plan in flight; nothing has changed.
        """
        step, results = self._in_flight.match(plan, result)
        self._in_flight.end_eldest()
        self._learn(plan, result, results)
        if self._states is not None:
            self._states.commit(step, results)
        events: list[SeqEvent] = []
        for row, seq, lease, of_row in zip(plan.rows, step.seqs, step.leases, results, strict=True):
            if seq.holds(lease):  # otherwise it left while the step was computed
                self._take_in(row, seq, of_row, events)
        if self._suspects.remembers:
            self._acquit(step, results)
        for each in self._in_flight.let_go():
            self._give_back(each.lease, each.slot)
        return tuple(events)

    def plain_steps(self) -> PlainSteps:
        """The next steps that compute and draw one token of each running sequence, and do nothing else.

        This holds if nothing comes in meanwhile and no drafts are given.
        """
        admits = self._waiting and (self._free_slots or self.config.policy == "fair")  # it may admit
        if admits or self._in_flight or self._suspects or not can_be_plain(self.config):
            return PlainSteps(0, ())
        return plain_steps(list(self._running), self._pool)

    def pass_plain_steps(self, steps: int, tokens: Mapping[str, Sequence[int]]) -> None:
        """Pass over so many steps as if they had been planned and committed; only their times are not learned.

        Args:
            steps: how many; at most as many as `plain_steps` says.
            tokens: what each running sequence draws in them, by its id.

        Raises:
            EngineFault: there are fewer plain steps, or another number of tokens.
        """
        running = list(self._running)
        if steps > self.plain_steps().steps or any(len(tokens.get(seq.id, ())) != steps for seq in running):
            raise EngineFault(f"{steps} steps are not plain, or their tokens are missing")
        changes = sorted(block_changes(running, steps, self.config.block_size))
        began = [seq.computed for seq in running]
        for seq in running:
            seq.tokens += tokens[seq.id]
            named = len(seq.chain.keys)
            self._name_blocks(seq)
            self._pending_blocks.make(seq, seq.chain.keys[named:])
        for step, fills, place in changes:
            seq = running[place]
            if fills:
                seq.computed = began[place] + step + 1
                self._seal_filled(seq)
            else:
                self._pool.extend(seq.lease, 1)
        self._in_flight.next_step += steps
        for seq, first in zip(running, began, strict=True):
            seq.computed = seq.scheduled = first + steps
            seq.last_step = self._in_flight.next_step - 1
            self._waiting.charge(seq)

    def drop_in_flight(self) -> None:
        """Take back every plan in flight: running sequences wait again with their tokens and are recomputed.

        For a runner that was interrupted and has forgotten every slot (`Runner.reset`).
        """
        self._in_flight.drop()
        if self._states is not None:
            self._states.drop()
        for seq in tuple(self._running):
            self._requeue(seq)
        for each in self._in_flight.let_go():
            self._give_back(each.lease, each.slot)
        self._releases.clear()

    def fail_step(self, *, killed: bool = False) -> tuple[SeqEvent, ...]:
        """Take back all plans in flight, one of which failed as a whole, and find out which sequence makes steps fail.

        For a runner that raised and has forgotten every slot (`Runner.reset`). Returns the end of the guilty sequence
        once it is known.

        Args:
            killed: something outside killed the runner: most likely no sequence is to blame.
        """
        guilty = self._suspects.suspect(self._in_flight.everyone(), killed=killed)
        self.drop_in_flight()
        if guilty is None:
            return ()
        return (self._finish(guilty, Finished(guilty.id, FinishReason.ERROR, message=POISONED, poisoned=True)),)

    def check(self) -> None:
        """Verify every invariant of pool, queue and sequences. For tests and idle moments: it reads all that is live.

        Raises:
            EngineFault: one does not hold.
        """
        self._pool.check()
        leases = [each.lease for each in self._in_flight.departed]
        check_sequences(self.config, self._seqs, self._running, self._waiting, leases, self._pool, self._pending_blocks)
        check_plans(self.config, self._running, self._in_flight, self._states, self._suspects, self._free_slots)

    # ---- planning: running sequences

    def _continue_running(self, builder: PlanBuilder, resting: Seq | None = None) -> None:
        """A row for each running sequence, except `resting` and those that the builder does not take.

        Oldest first; prompts that need no more blocks last, in turn. No chunk takes budget that a later row needs to
        decode.
        """
        if self._restoring is not None:
            self._continue_restoring(builder, resting)
        todo = [(seq, seq.remaining) for seq in self._rows_in_turn() if seq is not resting]
        todo = [(seq, remaining) for seq, remaining in todo if builder.takes(seq)]
        reserved = [remaining for _, remaining in todo].count(1)
        for seq, remaining in todo:
            if seq.state is not SeqState.RUNNING:  # an older one needed its blocks
                continue
            reserved -= remaining == 1
            count = builder.room(seq.scheduled, remaining, reserved)
            if count < 1:
                continue
            lease, end = seq.lease, seq.scheduled + count
            covered = end <= len(lease.blocks) * self.config.block_size
            new_blocks = () if covered else self._cover(seq, end)
            if new_blocks is not None:
                builder.add(seq, lease, remaining, count, new_blocks)
            elif seq.state is SeqState.RUNNING:  # the youngest is in flight: let it be preempted in the next plan
                break

    def _continue_restoring(self, builder: PlanBuilder, resting: Seq | None) -> None:
        """A row for each running sequence that has stored blocks to read."""
        for seq in self._running:
            if seq.to_restore > 0 and seq is not resting and builder.takes(seq):
                builder.restore(seq, seq.lease)

    def _rows_in_turn(self) -> list[Seq]:
        """Running sequences in the order in which they get rows: by age if blocks may run out."""
        if self.config.policy != "fair":
            return list(self._running)
        size = self.config.block_size
        prompts = [
            seq
            for seq in self._running
            if seq.remaining > 1 and seq.scheduled + seq.remaining <= len(seq.lease.blocks) * size
        ]
        if len(prompts) < 2:
            return list(self._running)
        later = set(prompts)
        return [seq for seq in self._running if seq not in later] + self._waiting.in_turn(prompts)

    def _cover(self, seq: Seq, num_positions: int) -> tuple[int, ...] | None:
        """Extend the lease to `num_positions`, preempting the youngest if blocks are missing.

        Returns:
            The new blocks; None if `seq` itself was the youngest, or if the youngest's blocks are in use by a plan in
            flight, so that `seq` has to wait.
        """
        need = self._pool.blocks_for(num_positions) - len(seq.lease.blocks)
        while not self._pool.extend(seq.lease, need):
            youngest = self._running[-1]
            if self._in_flight.uses(youngest):
                return None
            self._preempt(youngest)
            if youngest is seq:
                return None
        return tuple(seq.lease.blocks[-need:])

    def _preempt(self, seq: Seq) -> None:
        self._requeue(seq)
        self._preemptions += 1

    def _requeue(self, seq: Seq) -> None:
        """Put `seq` back in the queue with its tokens; its full blocks stay findable until others need them."""
        self._leave(seq)
        seq.preempt()
        self._waiting.add(seq)

    def _admit(self, builder: PlanBuilder) -> Stall | None:
        """Admit from the queue; nothing if a tenant took a slot in this plan and steps have a target."""
        if builder.limit is not None and builder.admits:
            return self._stall(StallReason.NEWCOMER, len(builder.admits))
        return self._admitter.admit_in_order(builder)

    def _continue_suspect(self, builder: PlanBuilder) -> Stall | None:
        """A row for the first suspect alone: all blocks and slots are free for it."""
        suspect = self._suspects.first
        if suspect.state is SeqState.RUNNING:
            self._continue_running(builder)
        elif stall := self._admitter.try_admit(suspect, builder, 0):
            return stall
        return self._stall(StallReason.SUSPECTS, len(self._suspects))

    def _stall(self, reason: StallReason, have: int) -> Stall | None:
        """Why the head of the queue, if any, is not admitted while a suspect is computed."""
        head = next(self._waiting.in_order(), None)
        return None if head is None else Stall(head.id, reason, need=0, have=have)

    # ---- committing

    def _learn(self, plan: StepPlan, result: StepResult, results: Sequence[RowResult | None]) -> None:
        """Learn how long the step took, and what it read."""
        if self._restoring is not None and plan.num_restored:
            plan, result = self._restoring.learn(plan, result, results)
        guessing = 0.0 if result.guessing is None else result.guessing.seconds
        self._times.learn(plan, result.seconds - guessing)
        if self._drafting.guessing is not None:
            self._drafting.guessing.learn(result)

    def _take_restored(self, row: Row, seq: Seq, result: RowResult | None) -> None:
        """Count what a row read as computed, as if it had been in memory when the sequence came."""
        if self._states is None:
            count = row.count if result is None else result.restored * self.config.block_size
        elif result is None and not row.state:
            seq.read = row.start + row.count
            return
        else:
            count = 0 if result is not None else seq.restore_end - seq.computed
        self._advance(seq, count)
        if not seq.announced:
            seq.cached += count
        seq.restored(complete=result is None)

    def _take_in(self, row: Row, seq: Seq, result: RowResult | None, events: list[SeqEvent]) -> None:
        """Apply the result of one row of a live sequence; adds to `events`."""
        if row.stored:
            self._take_restored(row, seq, result)
            return
        if not seq.announced:
            seq.announced = True
            events.append(Admitted(seq.id, seq.cached))
        if result is None:  # a chunk in the middle of a prompt
            self._advance(seq, row.count)
            return
        if result.failure and not result.tokens:
            events.append(self._fail(seq, result.failure))
            return
        self._advance(seq, row.count - len(row.drafts) - result.waits)
        if result.prompt is not None:
            of = result.prompt
            events.append(PromptScored(seq.id, of.start, of.logprobs, of.top_logprobs, of.ranks))
        if row.sample:
            seq.draw_waits = result.waits
            events += self._drafting.judge(seq, row, result.tokens)
            seq.foreseen = result.foreseen
            self._take_tokens(seq, result.tokens, len(result.right), events)
            if self.config.draft_context:
                self._take_guess(seq, result)
        if result.failure and seq.state is SeqState.RUNNING:
            events.append(self._fail(seq, result.failure))
        if result.embedding is not None:
            events.append(Embedded(seq.id, result.embedding))
            events.append(self._finish(seq, Finished(seq.id, FinishReason.STOP)))

    def _take_guess(self, seq: Seq, result: RowResult) -> None:
        """Note what the draft model guessed for a sequence that goes on."""
        if seq.state is SeqState.RUNNING:
            seq.offer = Draft(seq.id, result.guess, MODEL) if result.guess else None
            seq.lag = result.lag if result.lag >= 0 else None

    def _fail(self, seq: Seq, message: str) -> Finished:
        return self._finish(seq, Finished(seq.id, FinishReason.ERROR, message=message))

    def _take_tokens(self, seq: Seq, tokens: tuple[SampledToken, ...], right: int, events: list[SeqEvent]) -> None:
        """Append what a row drew until a token ends the sequence. The first `right` tokens were drafts."""
        for index, token in enumerate(tokens):
            self._append(seq, token, events)
            if seq.state is SeqState.FINISHED:
                return
            if index < right:
                self._advance(seq, 1)  # computed as a draft
        seq.take_draw()

    def _advance(self, seq: Seq, count: int) -> None:
        """Note `count` more computed positions: seal the blocks they fill, give back those that the window leaves."""
        seq.computed += count
        self._waiting.charge(seq)
        if seq.computed >= (seq.lease.sealed + 1) * self.config.block_size:  # seldom
            self._seal_filled(seq)
        if self.config.window is not None:
            self._pool.leave_behind(seq.lease, seq.computed)

    def _seal_filled(self, seq: Seq) -> None:
        sealed = seq.lease.sealed
        filled = seq.chain.keys[sealed : seq.computed // self.config.block_size]
        found: list[int] = []  # those that others can find from now on
        parent = seq.chain.keys[sealed - 1] if sealed else seq.chain.root
        for index, key in enumerate(filled, start=sealed):
            if self._pool.seal(seq.lease, index, key, parent):
                found.append(index)
            parent = key
            if self._restoring is not None:
                self._restoring.sealed(seq, index)
        if self._cache_log is not None:
            self._cache_log.stored(seq.chain, found, seq.tokens, seq.request.cache_salt, seq.request.adapter)
        self._pending_blocks.settle(seq, filled)

    def _append(self, seq: Seq, token: SampledToken, events: list[SeqEvent]) -> None:
        """Append one token, which may end the sequence and may fill a block."""
        seq.tokens.append(token.id)
        events.append(Generated(seq.id, token.id, token.logprob, token.top_logprobs, token.rank))
        ending = seq.ending()
        if ending is not None:
            events.append(self._finish(seq, ending))
        elif len(seq.tokens) % self.config.block_size == 0:
            named = len(seq.chain.keys)
            self._name_blocks(seq)
            self._pending_blocks.make(seq, seq.chain.keys[named:])

    def _name_blocks(self, seq: Seq) -> None:
        if self.config.prefix_caching:
            seq.chain.follow(seq.tokens)

    def _acquit(self, step: InFlightStep, results: Sequence[RowResult | None]) -> None:
        """A suspect that has drawn a token alone is acquitted, and waits until the others have been tried."""
        for row, seq, result in zip(step.plan.rows, step.seqs, results, strict=True):
            drew = row.sample and not (result is not None and result.waits)
            if drew and self._suspects.acquit(seq) and self._suspects and seq.state is SeqState.RUNNING:
                self._requeue(seq)

    # ---- leaving

    def _finish(self, seq: Seq, ending: Finished) -> Finished:
        if seq.state is SeqState.RUNNING:
            self._leave(seq)
        else:
            self._waiting.remove(seq)
        seq.finish()
        self._suspects.acquit(seq)
        del self._seqs[seq.id]
        return ending

    def _leave(self, seq: Seq) -> None:
        """Give back pending blocks, the lease and the slot; the last two once no plan uses them."""
        self._withdraw(seq)
        if self._states is not None:
            self._states.leave(seq)
        self._running.remove(seq)
        self._waiting.stopped(seq)
        if self._in_flight.uses(seq):
            self._in_flight.keep(seq)
        else:
            self._give_back(seq.lease, seq.slot)

    def _give_back(self, lease: Lease, slot: int) -> None:
        self._pool.release(lease)
        heapq.heappush(self._free_slots, slot)
        self._releases.append(slot)

    def _withdraw(self, seq: Seq) -> None:
        self._pending_blocks.settle(seq, seq.chain.keys[seq.lease.sealed :])
