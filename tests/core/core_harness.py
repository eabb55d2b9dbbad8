"""Drives a scheduler and the paged-memory fake runner together and holds every call to the laws.

Raises `Violation` (or the runner's `PlanViolation`, or the core's `EngineFault`) at the first law that is broken, so
that it serves directed tests, random episodes, the state machine and the planted bugs alike.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from unittest.mock import patch

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import RequestError
from penstock.contract.events import Admitted, DraftsJudged, Embedded, Finished, FinishReason, Generated, SeqEvent
from penstock.contract.plan import Draft, StepPlan, StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import CacheLog, chunk_limit, trace
from penstock.core.block_keys import block_key, root_key
from penstock.core.repetition import loops
from penstock.core.scheduler import Scheduler
from penstock.sim import FakeRunner, golden
from penstock.sim.fake_model import golden_embedding, log_probability

VOCAB = 11


WINDOWS = [None, None, 1, 2, 5, 9]
SHARES = {"": 1.0, "a": 2.0, "b": 0.5}


class Violation(AssertionError):
    """A law was broken."""


def require(holds: bool, law: str) -> None:
    if not holds:
        raise Violation(law)


def config(num_blocks: int = 32, **options) -> SchedulerConfig:
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    defaults["weigh_drafts"] = False  # all that fit
    return SchedulerConfig(num_blocks, **{**defaults, **options})


def request(seq_id: str, prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 4, **options) -> SequenceRequest:
    rules = {name: options.pop(name) for name in ("min_tokens", "token_ids", "repetition") if name in options}
    return SequenceRequest(seq_id, tuple(prompt), stop=StopRules(max_tokens=max_tokens, **rules), **options)


def embedding(seq_id: str, prompt: Iterable[int], pooling: Pooling = Pooling.MEAN, **options) -> SequenceRequest:
    spec, fresh = EmbeddingSpec(pooling), not pooling.takes_cached
    return SequenceRequest(seq_id, tuple(prompt), embedding=spec, fresh_prompt=fresh, **options)


def answer(req: SequenceRequest, cfg: SchedulerConfig) -> tuple[tuple[int, ...], FinishReason, int]:
    """What must come out: tokens, reason and stop id, from the golden model and the stop rules alone."""
    if req.embedding is not None:
        return (), FinishReason.STOP, -1
    room, stateful = min(req.stop.max_tokens, cfg.max_model_len - len(req.prompt)), cfg.checkpoints is not None
    tokens = golden(req.prompt, room, VOCAB, req.sampling, req.choice, cfg.window, stateful, req.adapter)
    for count, token in enumerate(tokens, start=1):
        if token in req.stop.token_ids and count >= req.stop.min_tokens:
            return tokens[:count], FinishReason.STOP, token
        if req.stop.repetition and count >= req.stop.min_tokens and loops(tokens[:count], 0, *req.stop.repetition):
            return tokens[:count], FinishReason.REPETITION, -1
    return tokens, FinishReason.LENGTH, -1


class FakeDrafter:
    """Drafts `count` of the golden tokens that come next, or 1 to 5, each of them right with probability `right`.

    Sometimes these are more than can be used; the scheduler must leave out the rest.
    """

    def __init__(self, right: float, seed: int = 0, count: int = 0) -> None:
        self._right = right
        self._count = count
        self._rng = random.Random(seed)

    def draft(self, req: SequenceRequest, known: int, cfg: SchedulerConfig) -> tuple[int, ...]:
        count = self._count or self._rng.randint(1, 5)
        stateful = cfg.checkpoints is not None
        of = req.sampling, req.choice, cfg.window, stateful, req.adapter
        tokens = golden(req.prompt, known + count, VOCAB, *of)[known:]
        return tuple(t if self._rng.random() < self._right else (t + 1) % VOCAB for t in tokens)


class Mirror:
    """A prefix cache as known to a listener that only hears what enters and leaves it."""

    def __init__(self, cfg: SchedulerConfig) -> None:
        self._config = cfg
        self.keys: set[bytes] = set()
        self.digests = {"": {""}}  # of all adapters that had a name
        self.stored = self.removed = self.cleared = 0

    def hear(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved(keys):
                    require(self.keys.issuperset(keys), "only what was there leaves")
                    self.keys.difference_update(keys)
                    self.removed += len(keys)
                case CacheCleared():
                    self.keys.clear()
                    self.cleared += 1

    def _store(self, event: BlocksStored) -> None:
        size, model = self._config.block_size, self._config.model_digest
        befores = [root_key(model, event.salt, digest) for digest in self.digests[event.adapter]]
        befores = befores if event.parent is None else [event.parent]
        require(len(event.tokens) == len(event.keys) * size > 0, "every block comes with its tokens")
        for index, key in enumerate(event.keys):
            tokens = event.tokens[index * size : (index + 1) * size]
            require(key in [block_key(before, tokens) for before in befores], "tokens are those of the key")
            befores = [key]
        require(self.keys.isdisjoint(event.keys), "only what was not there enters")
        self.keys.update(event.keys)
        self.stored += len(event.keys)


class Harness:
    """A scheduler, a runner, and a record of all that was promised.

    `drafter` guesses what comes next whenever a plan is made.
    """

    def __init__(self, cfg: SchedulerConfig, drafter: FakeDrafter | None = None) -> None:
        self.config = cfg
        self.drafter = drafter
        self.events: dict[str, list[SeqEvent]] = {}
        self.judged: list[DraftsJudged] = []
        self.offers: dict[str, tuple[int, tuple[int, ...]]] = {}  # tokens drawn, and what was guessed behind them
        self.scheduler = Scheduler(cfg, CacheLog())
        self.mirror = Mirror(cfg)
        self.takers: list[str] = []  # sequences for which others were stopped, in the plan being made
        self.taken = 0  # how many were stopped for them
        self._watch_takings()
        self.runner = FakeRunner(cfg, VOCAB)
        self.trace = [trace.encode_header(cfg)]
        self.requests: dict[str, SequenceRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.vectors: dict[str, bytes] = {}
        self.admitted: dict[str, int] = {}
        self.finished: dict[str, Finished] = {}
        self.allowed_ends: dict[str, FinishReason] = {}
        self.flights: deque[StepPlan] = deque()
        self.writers: dict[int, tuple[str, int]] = {}  # block -> (salt, cache era) of its writer
        self.era = 0
        self.eras: dict[str, int] = {}  # sequence -> cache era of its present admission
        self.plans: list[StepPlan] = []
        self.resumed = 0  # admissions with cached positions whose first block is gone
        self.left = 0  # the most blocks that a sequence had left behind
        self.kept = 0  # checkpoints that plans had written
        self.drops = 0  # times that plans in flight were taken back
        self.poisoned: set[str] = set()
        self.failed_steps = 0
        self.kills = 0
        self.ahead = 0  # rows planned while another row of their sequence was in flight
        self.stopwatch: random.Random | None = None  # draws how long steps took, if given
        self.memory_of_disk = random.Random(len(self.trace[0])) if cfg.storing else None  # which forgets, and lies
        self.savers: dict[bytes, str] = {}  # key -> salt of the sequence that saved it
        self.saved = self.restored = self.short = 0  # blocks
        self.saved_states = self.restored_states = 0
        self.cut = 0  # plans in which a prompt got less than the token budget would have given it

    def _watch_takings(self) -> None:
        to_stop = self.scheduler._claims._to_stop

        def watched(seq, stoppable):
            stopped = to_stop(seq, stoppable)
            if stopped:
                self.takers.append(seq.id)
                self.taken += len(stopped)
                giver, own = stopped[0].request, seq.request
                left = sum(each.request.tenant == giver.tenant for each in self.scheduler._running) - len(stopped)
                has = sum(each.request.tenant == own.tenant for each in self.scheduler._running)
                require((has + 1) / own.share <= left / giver.share, "a taker has no more then than a giver")
            return stopped

        self.scheduler._claims._to_stop = watched

    @property
    def live(self) -> list[str]:
        return [seq_id for seq_id in self.requests if seq_id not in self.finished]

    def submit(self, req: SequenceRequest) -> None:
        self.mirror.digests.setdefault(req.adapter, set()).add(req.adapter_digest)
        self.scheduler.submit(req)
        self.trace.append(trace.encode_submit(req))
        self.requests[req.id] = req
        self.tokens[req.id] = []
        self.events[req.id] = []
        self.check()

    def abort(self, seq_id: str) -> None:
        was_live = seq_id in self.live
        if was_live:
            self.allowed_ends[seq_id] = FinishReason.ABORT
        self.trace.append(trace.encode_abort(seq_id))
        events = self.scheduler.abort(seq_id)
        require(len(events) == was_live, "an abort of a live sequence yields its Finished, any other nothing")
        self.note(events)
        self.check()

    def reset(self) -> None:
        self.trace.append(trace.encode_reset())
        self.scheduler.reset_prefix_cache()
        self.era += 1
        self.check()

    def drop(self) -> None:
        """What an engine does when its runner was interrupted."""
        self.flights.clear()
        self.runner.reset()
        self.trace.append(trace.encode_drop())
        self.scheduler.drop_in_flight()
        require(not self.scheduler.stats.running, "whoever ran waits again")
        self.drops += 1
        self.check()

    def poison(self, seq_id: str) -> None:
        """Let every step from now on fail that has a row of this sequence."""
        self.allowed_ends[seq_id] = FinishReason.ERROR
        self.poisoned.add(seq_id)
        self.runner.poison(seq_id)

    def fail_step(self, *, killed: bool = False) -> tuple[SeqEvent, ...]:
        """What an engine does when its runner raised, for whatever reason."""
        self.flights.clear()
        lost = self.runner.reset()
        self.trace.append(trace.encode_fail(killed))
        events = self.scheduler.fail_step(killed=killed)
        require(not self.scheduler.stats.running, "whoever ran waits again")
        ended = {event.seq_id for event in events}
        require(ended <= self.poisoned, f"nobody ends but those who are to blame: {ended}")
        self.failed_steps += 1
        self.note(events)
        self.check()
        if lost:
            self.reset()
        return events

    def kill(self) -> None:
        """What an engine does when its runner's process was killed from outside."""
        suspected = self.finds_out
        self.runner.lose()
        self.fail_step(killed=True)
        self.kills += 1
        require(suspected or self.kills > 2 or not self.finds_out, "nobody is suspected when a process is killed twice")

    @property
    def finds_out(self) -> bool:
        """Whether suspects are computed alone."""
        return bool(self.scheduler._suspects)

    def fail(self, seq_id: str) -> None:
        self.allowed_ends[seq_id] = FinishReason.ERROR
        self.runner.fail_sequence(seq_id, "planted")

    def let_wait(self, seq_id: str, draws: int) -> None:
        """The sequence's form is not ready: its next draws come later, and are the same."""
        self.runner.let_wait(seq_id, draws)

    def plan(self) -> StepPlan:
        drafts, alone = self._drafts(), not self.flights
        self._look_up()
        if drafts:
            self.trace.append(trace.encode_drafts(drafts))
        self.takers.clear()
        plan = self.scheduler.plan(drafts)
        admitted = {admit.seq_id for admit in plan.admits}
        require(admitted.issuperset(self.takers), "nobody is stopped for one who is not admitted")
        flying = {row.slot for each in self.flights for row in each.rows}
        self.ahead += sum(row.slot in flying for row in plan.rows)
        self.runner.start(plan)
        self.flights.append(plan)
        self.plans.append(plan)
        self.trace.append(trace.encode_plan(plan))
        self._check_admits(plan)
        self._check_drafts(plan, drafts)
        self._check_stored(plan)
        self.kept += sum(len(row.checkpoints) for row in plan.rows)
        left = any(seq.remaining > 1 for seq in self.scheduler._running)
        self.cut += bool(self.config.step_target_ms) and left and plan.num_tokens < self.config.max_num_batched_tokens
        require(len(plan.stalls) <= 1, "at most one stall")
        require(plan.waiting == self.scheduler.num_waiting, "the plan counts who waits")
        waits = plan.waiting > 0
        require(waits == bool(plan.stalls), "a waiting head is explained, and nobody else is")
        if alone:
            require(bool(plan.rows) == self.scheduler.has_work, "a step with work at hand computes something")
        self.check()
        return plan

    def _look_up(self) -> None:
        """What an engine does with a store that forgets: a block that was found may be gone when it is read."""
        rng = self.memory_of_disk
        for seq_id, present, keys in self.scheduler.unsought():
            require(rng is not None, "nobody looks where nothing is stored")
            found = stored_prefix(self.runner, keys)
            if rng.random() < 0.1:
                found = rng.randint(0, len(keys))
            self.note_stored(seq_id, present + found)
        if rng is not None and self.runner.stored and rng.random() < 0.1:
            del self.runner.stored[rng.choice(list(self.runner.stored))]
        if rng is not None and self.runner.stored_states and rng.random() < 0.1:
            del self.runner.stored_states[rng.choice(list(self.runner.stored_states))]

    def note_stored(self, seq_id: str, blocks: int) -> None:
        self.trace.append(trace.encode_stored(seq_id, blocks))
        self.scheduler.note_stored(seq_id, blocks)
        self.check()

    def _check_stored(self, plan: StepPlan) -> None:
        for save in plan.saves:
            salt, _ = self.writers[save.block]
            require(self.savers.setdefault(save.key, salt) == salt, "a key is one salt's")
        self.saved += len(plan.saves)
        self.saved_states += len(plan.state_saves)
        names = {seq.slot: seq.id for seq in self.scheduler._running}
        for row in plan.rows:
            salt = self.requests[names[row.slot]].cache_salt
            require(all(self.savers.get(key, salt) == salt for key in row.stored), "KV is read within its salt only")

    def _drafts(self) -> tuple[Draft, ...]:
        if self.drafter is None:
            return ()
        drafts = []
        for one in self.scheduler.draftable():
            req = self.requests[one.seq_id]
            require(tuple(one.tokens) == (*req.prompt, *self.tokens[req.id]), "drafts follow what is known")
            drafts.append(Draft(req.id, self.drafter.draft(req, len(self.tokens[req.id]), self.config)))
        return tuple(drafts)

    def _check_drafts(self, plan: StepPlan, drafts: tuple[Draft, ...]) -> None:
        given = {draft.seq_id: draft.tokens for draft in drafts}
        names = {seq.slot: seq.id for seq in self.scheduler._running}
        for row in plan.rows:
            name, count = names[row.slot], len(row.drafts)
            known, offer = self.offers.get(name, (0, ()))
            offer = offer if known == len(self.tokens[name]) else ()
            fits = row.drafts in (given.get(name, ())[:count], offer[:count])
            require(fits, "a row carries the drafts that were given or that the draft model offered, or the first")

    def commit(self) -> tuple[SeqEvent, ...]:
        try:
            result = self.runner.finish()
        except RuntimeError:
            return self.fail_step()
        result = self._timed(result)
        plan = self.flights.popleft()
        self._note_writes(plan)
        self.restored += sum(len(row.stored) for row in plan.rows)
        answered = {row.slot for row in result.rows}
        self.short += any(row.stored and row.slot in answered for row in plan.rows)
        self.restored_states += sum(bool(row.state) and row.slot not in answered for row in plan.rows)
        self.trace.append(trace.encode_result(result))
        events = self.scheduler.commit(plan, result)
        self.note(events)
        names = {seq.slot: seq.id for seq in self.scheduler._running}
        for of in result.rows:
            if of.guess and of.slot in names:
                self.offers[names[of.slot]] = len(self.tokens[names[of.slot]]), of.guess
        self.left = max([self.left, *(seq.lease.left for seq in self.scheduler._running)])
        self.check()
        return events

    def _timed(self, result: StepResult) -> StepResult:
        """The result with one of the times that a clock may report."""
        if self.stopwatch is None:
            return result
        said = [result.seconds, self.stopwatch.expovariate(1000), 0.0, 60.0, float("inf")]
        return replace(result, seconds=self.stopwatch.choice(said))

    def step(self) -> tuple[SeqEvent, ...]:
        """Step as the engine does: make as many plans as may be in flight, and commit one."""
        while not self.flights or self.scheduler.can_plan_ahead:
            self.plan()
        return self.commit()

    def drain(self) -> int:
        """Run until nothing is left, within a bound on steps; then everything must be back."""
        bound = self.drain_bound()
        steps = 0
        while self.scheduler.has_work or self.flights:
            require(steps <= bound, f"everything ends within {bound} steps")
            self.step()
            steps += 1
        self.plan()
        self.commit()
        self.check_end()
        return steps

    def drain_bound(self) -> int:
        """The oldest waits at most for all slots and all that may pass it, and each of these advances in every step."""
        longest = max((self.limit(seq_id) for seq_id in self.live), default=0)
        waits = len(self.live) * (self.config.max_num_seqs + self.config.max_bypasses + 1) * longest
        tried_alone = (2 * len(self.poisoned) + self.finds_out) * (self.config.max_num_seqs + 1) * longest
        return waits * self.config.depth + len(self.flights) + tried_alone + self.config.storing

    def limit(self, seq_id: str) -> int:
        req = self.requests[seq_id]
        return min(len(req.prompt) + req.stop.max_tokens, self.config.max_model_len)

    def check(self) -> None:
        self.scheduler.check()
        self.check_told()
        stats = self.scheduler.stats
        require(stats.running + stats.waiting == len(self.live), "each live sequence runs or waits")
        slots = getattr(self.scheduler._waiting, "_slots", None)
        counted = None if slots is None else sum(len(seqs) for seqs in slots._running.values())
        require(counted in (None, stats.running), "who runs is counted for its tenant")
        require(stats.running <= self.config.max_num_seqs, "never more than max_num_seqs run")

    def check_told(self) -> None:
        self.mirror.hear(self.scheduler.take_cache_events())
        require(self.mirror.keys == self.scheduler._pool._index.keys(), "all that enters and leaves the cache is told")

    def check_end(self) -> None:
        stats = self.scheduler.stats
        require(stats.free_blocks == stats.total_blocks, "all blocks are back")
        require(stats.running == stats.waiting == 0, "nobody is left")
        require(self.runner.occupied == {}, "the runner has forgotten everybody")
        require(set(self.finished) == set(self.requests), "everybody finished")
        require(not self.finds_out, "nobody is suspected any more")
        require(self.runner.crashes <= 2 * len(self.poisoned), "whoever makes steps fail is found in two")
        memory = self.scheduler
        require(not memory._seqs and not memory._pending_blocks.makers, "no trace of finished sequences remains")
        require(not len(memory._waiting) and not len(memory._running), "no trace of finished sequences remains")

    def note(self, events: Sequence[SeqEvent]) -> None:
        for event in events:
            require(event.seq_id in self.requests, "events are about accepted sequences")
            require(event.seq_id not in self.finished, "nothing comes after Finished")
            if isinstance(event, DraftsJudged):
                require(0 <= event.right <= event.drafts, "no more drafts are right than there were")
                self.judged.append(event)
                continue
            self.events[event.seq_id].append(event)
            match event:
                case Admitted(seq_id, cached):
                    require(seq_id not in self.admitted, "Admitted comes once")
                    require(0 <= cached < len(self.requests[seq_id].prompt), "a position of the prompt is computed")
                    self.admitted[seq_id] = cached
                case Generated(seq_id, token, logprob):
                    require(seq_id in self.admitted, "Admitted comes first")
                    require(logprob == log_probability(token), "a logprob stays with its token")
                    self.tokens[seq_id].append(token)
                case Embedded(seq_id, vector):
                    require(seq_id in self.admitted, "Admitted comes first")
                    require(seq_id not in self.vectors, "a vector comes once")
                    self.vectors[seq_id] = vector
                case Finished(seq_id):
                    self.finished[seq_id] = event
                    self._check_answer(event)

    def _check_answer(self, event: Finished) -> None:
        tokens, reason, stop_token = answer(self.requests[event.seq_id], self.config)
        got = tuple(self.tokens[event.seq_id])
        if self.allowed_ends.get(event.seq_id) is event.reason:
            require(got == tokens[: len(got)], f"{event.seq_id}: cut short, but right: {got} of {tokens}")
            return
        require(got == tokens, f"{event.seq_id}: the answer is the golden one: {got} != {tokens}")
        spec = self.requests[event.seq_id].embedding
        vector = (
            None
            if spec is None
            else golden_embedding(
                self.requests[event.seq_id].prompt,
                spec.pooling,
                self.config.window,
                self.config.checkpoints is not None,
            )
        )
        require(self.vectors.get(event.seq_id) == vector, f"{event.seq_id}: the vector is the golden one")
        require((event.reason, event.stop_token) == (reason, stop_token), f"{event.seq_id}: ends as it should")

    def _check_admits(self, plan: StepPlan) -> None:
        for admit in plan.admits:
            req = self.requests[admit.seq_id]
            require(admit.tokens == (*req.prompt, *self.tokens[req.id]), "an admission tells all known tokens")
            self.eras[req.id] = self.era
            size, first = self.config.block_size, self.runner._first_seen(admit.computed)
            for block in admit.blocks[first // size : -(-admit.computed // size)]:
                require(self.writers.get(block) == (req.cache_salt, self.era), "KV is shared within salt and era only")
            require(admit.computed == 0 or self.config.prefix_caching, "no cache, no hits")
            seq = self.scheduler._seqs[req.id]
            self.resumed += admit.computed > 0 and seq.chain.keys[0] not in self.scheduler._pool._index

    def _note_writes(self, plan: StepPlan) -> None:
        for row in plan.rows:
            slot = self.runner._slots[row.slot]
            req = self.requests[slot.admit.seq_id]
            for block in self.runner._written(row):
                self.writers[block] = (req.cache_salt, self.eras[req.id])


def stored_prefix(runner: FakeRunner, keys: Sequence[bytes]) -> int:
    """How many leading blocks a truthful store has; if the model carries state, up to the last with a stored state."""
    count = next((at for at, key in enumerate(keys) if key not in runner.stored), len(keys))
    if not runner._stateful:
        return count
    return max((at for at in range(1, count + 1) if keys[at - 1] in runner.stored_states), default=0)


def with_draft_model(cfg: SchedulerConfig, seed: int) -> SchedulerConfig:
    """Add a draft model in every second episode, if the model allows one; its context may be shorter."""
    possible = cfg.window is None
    return replace(cfg, draft_context=(8, 30, 64)[seed // 2 % 3]) if possible and seed % 2 else cfg


def random_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.randint(1, 5)
    return SchedulerConfig(
        num_blocks=rng.choice([6, 8, 12, 20]),
        block_size=rng.choice([1, 2, 3, 4]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 8, 40]),
        max_model_len=rng.choice([10, 20, 40]),
        policy=rng.choice(["fcfs", "priority", "fair"]),
        prefix_caching=rng.random() < 0.9,
        max_bypasses=rng.choice([0, 1, 3, 16]),
        model_digest=b"model",
        weigh_drafts=rng.random() < 0.3,
    )


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    """A prompt that often shares a prefix with others: a common stem, cut anywhere, and a short tail."""
    stem = rng.choice([(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2), (1, 2, 3, 4, 9, 9, 9, 9), (0,) * 10])
    tail = tuple(rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 3])))
    return stem[: rng.randint(1, len(stem))] + tail


def random_request(rng: random.Random, number: int, policy: str) -> SequenceRequest:
    drawn = _random_generation(rng, number, policy)
    if rng.random() < 0.8:
        return drawn
    pooling = rng.choice([Pooling.MEAN, Pooling.LAST])
    if pooling is Pooling.MEAN and number % 3 == 0:
        pooling = Pooling.CLS  # scheduled like a mean
    spec = EmbeddingSpec(pooling)
    return replace(drawn, embedding=spec, stop=StopRules(), fresh_prompt=not spec.pooling.takes_cached)


def _random_generation(rng: random.Random, number: int, policy: str) -> SequenceRequest:
    tenant = list(SHARES)[number % 7 % len(SHARES)]
    return SequenceRequest(
        id=f"s{number}",
        prompt=random_prompt(rng),
        choice=rng.choice([0, 0, 0, 1]),
        sampling=SamplingSpec((("seed", 7),)) if rng.random() < 0.2 else SamplingSpec(),
        stop=StopRules(
            max_tokens=rng.choice([1, 2, 5, 12]),
            min_tokens=rng.choice([0, 0, 2]),
            token_ids=rng.choice([(), (), (3,), (1, 7)]),
            repetition=rng.choice([(), (), (1, 3, 2)]),
        ),
        priority=rng.randrange(3) if policy == "priority" else 0,
        tenant=tenant,
        share=SHARES[tenant],
        cache_salt=rng.choice(["", "", "other"]),
        arrival=float(number // 3),
    )


def random_drafter(rng: random.Random) -> FakeDrafter | None:
    right = rng.choice([None, 0.0, 0.5, 0.9, 1.0])
    return None if right is None else FakeDrafter(right, rng.randrange(1000))


def run_episode(seed: int, moves: int = 60) -> Harness:
    """One random life of an engine, checked after every call, drained at the end."""
    with patch.object(chunk_limit, "LEAST", least_of(seed)):
        return _run_episode(seed, moves)


def least_of(seed: int) -> int:
    """The least that a step of this episode reads of a prompt; the real number exceeds these prompts' lengths."""
    return random.Random(f"{seed} least").choice([1, 2, 16])


def _run_episode(seed: int, moves: int) -> Harness:
    timing = random.Random(f"{seed} timing")
    rng, ahead = random.Random(seed), random.Random(f"{seed} ahead")
    broken, failing = random.Random(f"{seed} broken"), random.Random(f"{seed} failing")
    killing, waiting = random.Random(f"{seed} killing"), random.Random(f"{seed} waiting")
    troubled = failing.random() < 0.3
    cfg = replace(random_config(rng), depth=ahead.choice([1, 1, 2, 2, 3]), step_target_ms=timing.choice([0, 1, 2, 5]))
    drafter = random_drafter(ahead)
    flooding = random.Random(f"{seed} flooding")
    if floods := flooding.random() < 0.4:
        cfg = replace(
            cfg, policy="fair", max_num_seqs=rng.randint(3, 5), max_num_batched_tokens=flooding.randint(5, 40)
        )
    cfg = replace(cfg, window=ahead.choice(WINDOWS), **random_checkpoints(seed, cfg.block_size))
    storing = random.Random(f"{seed} store")
    if stores := cfg.prefix_caching and storing.random() < 0.3:
        cfg = replace(cfg, window=None, storing=True)
    harness = Harness(with_draft_model(cfg, seed), drafter)
    harness.stopwatch = timing if timing.random() < 0.7 else None
    for number in range(moves):
        if floods and number % 20 == 5:
            flood(harness, flooding, number)
        if stores and harness.flights and storing.random() < 0.1 and not harness.finds_out and harness.kills < 2:
            harness.kill()  # most of what is read was computed before a kill
        if harness.flights and broken.random() < 0.08:
            harness.drop()
        if troubled and harness.flights and failing.random() < 0.08 and not harness.finds_out:  # else it would convict
            harness.fail_step()
        if troubled and harness.flights and killing.random() < 0.06 and not harness.finds_out:
            harness.kill()
        if troubled and harness.live and failing.random() < 0.05:
            harness.poison(failing.choice(harness.live))
        if harness.live and waiting.random() < 0.1:
            harness.let_wait(waiting.choice(harness.live), waiting.randint(1, 3))
        move = rng.random()
        if move < 0.35:
            req = random_request(rng, number, harness.config.policy)
            try:
                harness.submit(req)
            except RequestError:
                continue
        elif move < 0.42 and harness.live:
            harness.abort(rng.choice(harness.live))
        elif move < 0.44 and harness.live:
            harness.fail(rng.choice(harness.live))
        elif move < 0.46:
            harness.reset()
        elif len(harness.flights) == cfg.depth or (harness.flights and move < 0.55):
            harness.commit()
        elif move < 0.7:
            harness.plan()
        else:
            harness.step()
    harness.drain()
    return harness


def flood(harness: Harness, rng: random.Random, number: int) -> None:
    """One tenant sends more than can run, and another sends one sequence a few steps later."""
    counts = {"": 2 * harness.config.max_num_seqs, "a": 1}
    for tenant, count in counts.items():
        for index in range(count):
            drawn = random_request(rng, number, harness.config.policy)
            name, stop = f"flood{number}{tenant}-{index}", replace(drawn.stop, max_tokens=12)
            stop = stop if drawn.embedding is None else drawn.stop
            with suppress(RequestError):
                harness.submit(
                    replace(drawn, id=name, tenant=tenant, share=SHARES[tenant], priority=0, stop=stop, arrival=number)
                )
        for _ in range(2):
            if not harness.finds_out:
                harness.step()


def random_checkpoints(seed: int, block_size: int) -> dict[str, int]:
    """Options of a scheduler whose model carries state, for every other seed."""
    rng = random.Random(f"{seed} state")
    if rng.random() < 0.5:
        return {}
    interval = rng.choice([0, 1, 2, 4]) * block_size
    return {
        "checkpoints": rng.choice([0, 1, 2, 3, 8]),
        "checkpoint_interval": interval,
        "spare_states": rng.choice([0, 1, 3, 20]),
    }


def run_workload(
    seed: int, depth: int = 1, right: float | None = None, window: int | None = None, **options: int
) -> Harness:
    """Run random requests that nothing disturbs: their events are the same however they are computed."""
    rng = random.Random(seed)
    cfg = replace(random_config(rng), depth=depth, window=window, **options)
    harness = Harness(cfg, None if right is None else FakeDrafter(right, seed))
    for number in range(12):
        with suppress(RequestError):
            harness.submit(random_request(rng, number, cfg.policy))
        for _ in range(rng.randrange(3)):
            harness.step()
    harness.drain()
    return harness
