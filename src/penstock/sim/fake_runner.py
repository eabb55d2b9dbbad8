"""A runner with a paged KV memory and no tensors: one file, because a plan's writes and their reads belong together.

Implements the port `Runner`.

It executes plans like a real runner, through the same block tables: it writes a value for each position, reads the
whole prefix back and derives the next token from what it read. So a block that is stale, shared too early, aliased or
in the wrong order changes the answer, and silent KV corruption becomes a failed equality with `golden`. Blocks are
poisoned when they are handed out; reading a position that was never written raises. With `config.depth` above 1 it
computes a plan when its result is requested, after the next plan was started, so a block that was handed out too early
is written late. The recurrent state, if the model carries one, is a hash of all positions; plans say when it is kept in
checkpoints and spare places, and from which place a row continues. Saved blocks and states are kept unchanged, by key,
in `stored` and `stored_states`, and rows read them back; if a test removes an entry, a row that reads it falls short.
With `config.draft_context` there is a draft model, whose guesses are right at two of three positions.

It also checks each plan against the rules of `contract.plan`, and raises `PlanViolation` if the plan breaks one. It
decides nothing else, and does not know the scheduler.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.contract.adapter import AdapterFacts
from penstock.contract.embedding import Pooling
from penstock.contract.errors import EngineFault, SetupError
from penstock.contract.plan import Admit, GuessWork, Row, RowResult, SampledToken, Save, StepPlan, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.sim.clock import SimClock
from penstock.sim.fake_model import (
    START,
    carry,
    cell,
    golden,
    hidden_state,
    log_probability,
    next_token,
    pooled_places,
    seen,
    vector,
)

__all__ = ["FakeRunner", "PlanViolation", "StepCost"]


class PlanViolation(EngineFault):
    """A plan broke a rule of `contract.plan`, or led the runner to KV that is not there."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of a step: a linear model, in seconds per step, per computed token and per token of context read."""

    step: float = 0.001
    token: float = 0.0001
    context: float = 0.000001

    def seconds(self, plan: StepPlan) -> float:
        """Simulated duration of a plan."""
        context = sum(row.start + row.count for row in plan.rows)
        return self.step + self.token * plan.num_tokens + self.context * context


@dataclass(slots=True)
class _Slot:
    """What the runner knows about the sequence in a slot: all of it came with plans or was computed here."""

    admit: Admit
    tokens: list[int]
    table: list[int]
    computed: int
    failure: str = ""
    followed: int = 0  # positions that the draft model has computed
    pooled: int = 0  # for an embedding: the sum of its hidden states
    state: int | None = None  # in the slot's own place, after all positions of the newest row; None before the first
    states: list[int] = field(default_factory=list)  # before the newest row, and after each of its positions
    held: bool = False  # the newest row waits, and its last position is not carried again


@dataclass(frozen=True, slots=True)
class _Started:
    """A plan in flight, and the slot of each of its rows."""

    plan: StepPlan
    slots: list[_Slot]
    behind: set[int] = field(default_factory=set)  # slots whose earlier row waits, so this row waits too


class FakeRunner:
    """Executes plans in a fake memory. Owns that memory and the slot tables.

    Args:
        config: the scheduler's configuration; plans must keep to its sizes.
        vocab_size: tokens are drawn from `range(vocab_size)`.
        cost: the duration of steps.
        clock: advanced by each step's cost, if given.

    Attributes:
        crashes: how many steps raised because a test ordered it.
        stored: saved blocks, by key; survives every reset, and may be shared with another runner.
        stored_states: saved recurrent states, as `stored`.
        adapters: path of each loaded adapter, by name; a sequence's values in memory depend on its adapter's name.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        vocab_size: int = 64,
        cost: StepCost | None = None,
        clock: SimClock | None = None,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._cost = cost or StepCost()
        self._clock = clock
        self._memory: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self._stateful = config.checkpoints is not None
        self._checkpoints: list[int | None] = [None] * (config.checkpoints or 0)
        self._spares: list[int | None] = [None] * config.spare_states
        self._slots: dict[int, _Slot] = {}
        self._in_flight: deque[_Started] = deque()
        self._step = 0
        self._failing: dict[str, str] = {}
        self._waits: dict[str, int] = {}
        self._crashes: set[int] = set()
        self._poisonous: set[str] = set()
        self._lost = False
        self.crashes = 0
        self.stored: dict[bytes, list[int]] = {}
        self.stored_states: dict[bytes, int] = {}
        self.adapters: dict[str, str] = {}

    @property
    def occupied(self) -> dict[int, str]:
        """Slot -> id of the sequence in it."""
        return {index: slot.admit.seq_id for index, slot in self._slots.items()}

    def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """See `AdaptingRunner`; a path that holds `bad` is refused."""
        if "bad" in path:
            raise SetupError(f"{path} is no adapter")
        self._require(name not in self.adapters, f"the adapter {name} is loaded twice")
        self.adapters[name] = path
        digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
        return AdapterFacts(name, path, digest, rank=8, modules=1, bytes=64)

    def unload_adapter(self, name: str) -> None:
        """See `AdaptingRunner`."""
        del self.adapters[name]

    def fail_sequence(self, seq_id: str, message: str) -> None:
        """Make the next row of this sequence fail."""
        self._failing[seq_id] = message

    def let_wait(self, seq_id: str, draws: int) -> None:
        """Make the next `draws` draws of this sequence wait."""
        self._waits[seq_id] = draws

    def crash_at(self, step: int) -> None:
        """Make this whole step raise."""
        self._crashes.add(step)

    def poison(self, seq_id: str) -> None:
        """Make every step that has a row of this sequence raise."""
        self._poisonous.add(seq_id)

    @property
    def depth(self) -> int:
        """See `OverlappingRunner`."""
        return self._config.depth

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan in its order: releases, admits, rows.

        Raises:
            PlanViolation: the plan breaks a rule.
            RuntimeError: a crash was ordered for this step, or one of its sequences is poisoned.
        """
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        """Change the tables and save blocks; rows are computed only by `finish`, which exposes blocks reused too early.

        Raises:
            PlanViolation: the plan breaks a rule.
            RuntimeError: a crash was ordered for this step.
        """
        self._require(plan.step == self._step, f"step {plan.step} came where {self._step} was due")
        self._require(len(self._in_flight) < self.depth, f"more than {self.depth} plans are in flight")
        self._step += 1
        if plan.step in self._crashes:
            self.crashes += 1
            raise RuntimeError(f"step {plan.step} was told to crash")
        for index in plan.releases:
            self._require(self._slots.pop(index, None) is not None, f"slot {index} was released but is free")
            used = self._has_row(index)
            self._require(not used, f"slot {index} was released while a plan in flight computes its row")
        for save in plan.saves:
            self._save(save)
        for save in plan.state_saves:
            self._save_state(save)
        for admit in plan.admits:
            self._admit(admit)
        self._check_rows(plan)
        self._in_flight.append(_Started(plan, [self._slots[row.slot] for row in plan.rows]))

    def finish(self) -> StepResult:
        """Compute the oldest plan in flight.

        Raises:
            PlanViolation: its rows do not continue what was computed.
            RuntimeError: one of its sequences is poisoned.
        """
        started = self._in_flight[0]
        plan, slots = started.plan, started.slots
        for row, slot in zip(plan.rows, slots, strict=True):
            if row.slot not in started.behind:
                self._check_continuation(row, slot)
        if not self._poisonous.isdisjoint(slot.admit.seq_id for slot in slots):
            self.crashes += 1
            raise RuntimeError(f"a row of step {plan.step} is poison")
        self._in_flight.popleft()
        if self._stateful:
            self._carry_states(started)
        pairs = [(row, slot) for row, slot in zip(plan.rows, slots, strict=True) if row.slot not in started.behind]
        prefixes = [[] if slot.failure else self._read(slot, row.start, row.start) for row, slot in pairs]
        results = [RowResult(slot, waits=True) for slot in sorted(started.behind)]
        for (row, slot), prefix in zip(pairs, prefixes, strict=True):
            result = self._compute(row, slot, prefix)
            if result is not None:
                results.append(result)
                if result.waits:
                    self._let_those_behind_wait(row.slot, slot)
        seconds = self._cost.seconds(plan)
        guessing = self._guess_work(plan)
        if guessing is not None:
            seconds += guessing.seconds
        if self._clock is not None:
            self._clock.advance(seconds)
        return StepResult(plan.step, tuple(results), seconds, guessing=guessing)

    def _guess_work(self, plan: StepPlan) -> GuessWork | None:
        """An upper bound on the draft model's work: a pass costs a fifth of a step, a position a fifth of a token."""
        passes = max([row.guesses for row in plan.rows], default=0)
        positions = sum([row.follow + row.guesses for row in plan.rows])
        if not positions:
            return None
        passes = max(1, passes)
        return GuessWork((self._cost.step * passes + self._cost.token * positions) / 5, passes, positions)

    def _has_row(self, index: int, *, reading: bool = False) -> bool:
        """Whether a plan in flight has a row of this slot; with `reading`, a row that reads stored blocks."""
        rows = (row for started in self._in_flight for row in started.plan.rows if row.slot == index)
        return any(row.stored or not reading for row in rows)

    def _save(self, save: Save) -> None:
        """Keep what a block holds now; saving a block that is not full, or has other tokens, raises."""
        cells = [value for value in self._memory[save.block] if value is not None]
        name = f"block {save.block}, which is to be saved,"
        self._require(len(cells) == self._config.block_size, f"{name} was not written whole")
        self._require(self.stored.setdefault(save.key, cells) == cells, f"{name} is not what its key says")
        first = cells[0] - cell(save.tokens[0], 0)  # the part that the block's position and adapter add
        right = [cell(token, at) + first for at, token in enumerate(save.tokens)]
        self._require(cells == right, f"{name} has other tokens")

    def _save_state(self, save: Save) -> None:
        name, state = f"checkpoint {save.block}, which is to be saved,", self._checkpoints[save.block]
        self._require(state is not None, f"{name} was not written")
        self._require(len(save.tokens) == self._config.block_size, f"{name} lacks tokens of its block")
        if state is not None:
            self._require(self.stored_states.setdefault(save.key, state) == state, f"{name} is not what its key says")

    def _restore(self, row: Row, slot: _Slot) -> RowResult | None:
        """Read the stored blocks that exist into memory; with recurrent state, all of them and the state, or none."""
        size = self._config.block_size
        for count, key in enumerate(row.stored):
            cells = self.stored.get(key)
            if cells is None:
                return self._come_short(row, slot, count)
            self._memory[slot.table[slot.computed // size]][:] = cells
            slot.computed += size
        if not row.state:
            return None
        state = self.stored_states.get(row.state)
        if state is None:
            return self._come_short(row, slot, 0)
        slot.state = state
        for kept in row.checkpoints:
            self._checkpoints[kept.slot] = state
        return None

    def _come_short(self, row: Row, slot: _Slot, count: int) -> RowResult:
        if self._stateful:
            slot.computed, count = slot.admit.computed, 0
        return RowResult(row.slot, restored=count)

    def _let_those_behind_wait(self, index: int, slot: _Slot) -> None:
        for later in self._in_flight:
            of_slot = zip(later.plan.rows, later.slots, strict=True)
            if any(row.slot == index and other is slot for row, other in of_slot):
                later.behind.add(index)

    def lose(self) -> None:
        """Make the next reset find keys, values and state lost, as if another process computed from now on."""
        self._lost = True

    def reset(self) -> bool:
        """Forget every slot and plan; positions and checkpoints that rows in flight were to write become unwritten."""
        for started in self._in_flight:
            for row, slot in zip(started.plan.rows, started.slots, strict=True):
                for position in range(row.start, row.start + row.count):
                    block = slot.table[position // self._config.block_size]
                    self._memory[block][position % self._config.block_size] = None
                for kept in row.checkpoints:
                    self._checkpoints[kept.slot] = None
        self._spares = [None] * len(self._spares)  # no sequence continues from them
        self._in_flight.clear()
        self._slots.clear()
        lost, self._lost = self._lost, False
        if lost:
            self._memory = [[None] * self._config.block_size for _ in self._memory]
            self._checkpoints = [None] * len(self._checkpoints)
        return lost

    def _admit(self, admit: Admit) -> None:
        size = self._config.block_size
        self._require(0 <= admit.slot < self._config.max_num_seqs, f"slot {admit.slot} does not exist")
        self._require(admit.slot not in self._slots, f"slot {admit.slot} is taken")
        self._require(0 <= admit.computed < len(admit.tokens), f"{admit.seq_id}: nothing is left to compute")
        self._require(admit.computed <= len(admit.blocks) * size, f"{admit.seq_id}: computed exceeds its blocks")
        kept = admit.blocks[self._first_seen(admit.computed) // size :]
        self._require(len(set(kept)) == len(kept), f"{admit.seq_id}: a block is listed twice")
        skips = admit.computed and admit.embedding is not None and not admit.embedding.pooling.takes_cached
        self._require(not skips, f"{admit.seq_id}: pools positions that are not computed")
        known = not admit.adapter or admit.adapter in self.adapters
        self._require(known, f"{admit.seq_id}: there is no adapter {admit.adapter!r}")
        restores = self._stateful and admit.computed > 0
        self._require(
            restores == (admit.checkpoint >= 0), f"{admit.seq_id}: a hit restores its state, nothing else does"
        )
        slot = _Slot(admit, list(admit.tokens), list(admit.blocks), admit.computed)
        first_new = -(-admit.computed // size)
        self._poison(admit.blocks[first_new:], admit.seq_id)
        self._slots[admit.slot] = slot

    def _poison(self, blocks: tuple[int, ...], seq_id: str) -> None:
        """Check that new blocks belong to nobody, and clear them: nothing in them may be read before it is written."""
        if not blocks:
            return
        taken = set(self._holders())
        pairs = (pair for each in self._in_flight for pair in zip(each.plan.rows, each.slots, strict=True))
        used = {block for row, slot in pairs for block in self._seen_blocks(slot, row.start)}
        for block in blocks:
            self._require(0 <= block < self._config.num_blocks, f"{seq_id}: block {block} does not exist")
            self._require(block not in taken, f"{seq_id}: new block {block} belongs to another slot")
            self._require(block not in used, f"{seq_id}: new block {block} is in use by a plan in flight")
            self._memory[block] = [None] * self._config.block_size

    def _check_rows(self, plan: StepPlan) -> None:
        """Extend the tables, then check all rows against the rules, before any of them writes."""
        self._require(plan.num_tokens <= self._config.max_num_batched_tokens, "the token budget is exceeded")
        self._require(len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows")
        for row in plan.rows:
            self._require(row.slot in self._slots, f"slot {row.slot} has a row but no sequence")
            reads = self._has_row(row.slot, reading=True)
            self._require(not reads, f"slot {row.slot} has a row behind one that reads")
            slot = self._slots[row.slot]
            self._poison(row.new_blocks, slot.admit.seq_id)
            slot.table += row.new_blocks
            if not self._in_flight:  # else the positions before it are not computed yet
                self._check_continuation(row, slot)
            self._check_row(row, slot)
        readers = self._holders()
        for row in plan.rows:
            for block in self._written(row):
                self._require(readers[block] == 1, f"slot {row.slot} writes block {block}, which others hold too")

    def _check_row(self, row: Row, slot: _Slot) -> None:
        name, end = slot.admit.seq_id, row.start + row.count
        self._require(row.count >= 1, f"{name}: a row computes nothing")
        self._require(len(row.drafts) < row.count, f"{name}: a row of nothing but drafts")
        self._require(row.sample or not row.drafts, f"{name}: drafts in a row that does not sample")
        places = [kept.position for kept in row.checkpoints]
        within = all(row.start < place <= end and place % self._config.block_size == 0 for place in places)
        self._require(within and sorted(set(places)) == places, f"{name}: checkpoints at {places} of a row to {end}")
        before_drafts = len(row.drafts) if self._stateful else 0
        self._require(len(row.spares) == before_drafts, f"{name}: {before_drafts} drafts, spare places {row.spares}")
        self._require(row.resume < len(self._spares), f"{name}: there is no such spare place")
        self._check_guessing(row, slot)
        self._require(end <= self._config.max_model_len, f"{name}: goes beyond the context")
        blocks, rest = divmod(row.start, self._config.block_size)
        whole = not rest and row.count == len(row.stored) * self._config.block_size and end < len(slot.tokens)
        self._require(not row.stored or whole, f"{name}: reads {blocks} blocks and more, not whole ones, or all")
        right = not row.state or (self._stateful and row.stored[-1:] == (row.state,))
        self._require(right, f"{name}: reads a state that is not the one at its end")
        self._require(end <= len(slot.table) * self._config.block_size, f"{name}: too few blocks")

    def _check_guessing(self, row: Row, slot: _Slot) -> None:
        """Check the draft model's work: all positions that it computes are within the context and have a block."""
        if not (row.follow or row.guesses):
            return
        name, end = slot.admit.seq_id, row.start + row.count + max(1, row.guesses)
        self._require(row.sample and row.follow > 0, f"{name}: a guess behind a row that draws nothing, or for nothing")
        self._require(end <= self._config.draft_context, f"{name}: guesses beyond the draft model's context")
        self._require(end <= self._config.max_model_len, f"{name}: guesses beyond the context")
        self._require(end <= len(slot.table) * self._config.block_size, f"{name}: too few blocks for guesses")

    def _check_continuation(self, row: Row, slot: _Slot) -> None:
        """Check that a row continues what was computed and drawn before it; a failed sequence is exempt."""
        name, known = slot.admit.seq_id, row.start + row.count - len(row.drafts)
        if slot.failure:
            return
        self._require(row.start == slot.computed, f"{name}: starts at {row.start}, but {slot.computed} are computed")
        self._require(known <= len(slot.tokens), f"{name}: goes beyond its known tokens")
        samples = known == len(slot.tokens) and slot.admit.embedding is None
        self._require(row.sample == samples, f"{name}: samples exactly when it has caught up, an embedding never")
        whole = row.start == 0 and row.count == len(slot.tokens)
        self._require(whole or not self._config.looks_ahead, f"{name}: looks ahead, and has a part of its prompt")

    def _holders(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for slot in self._slots.values():
            for block in self._seen_blocks(slot, slot.computed):
                counts[block] = counts.get(block, 0) + 1
        return counts

    def _written(self, row: Row) -> list[int]:
        size = self._config.block_size
        return self._slots[row.slot].table[row.start // size : (row.start + row.count - 1) // size + 1]

    def _first_seen(self, position: int) -> int:
        """The first position that attention at `position` sees."""
        return 0 if self._config.window is None else max(0, position - self._config.window + 1)

    def _seen_blocks(self, slot: _Slot, position: int) -> list[int]:
        """The blocks that positions from `position` on see or write; earlier blocks may belong to others by now."""
        return slot.table[self._first_seen(position) // self._config.block_size :]

    def _read(self, slot: _Slot, start: int, count: int) -> list[int]:
        """The KV of positions `[0, count)` through the block table; 0 for positions that `start` does not see."""
        first = self._first_seen(start)
        found = [
            self._memory[slot.table[at // self._config.block_size]][at % self._config.block_size]
            for at in range(first, count)
        ]
        cells = [value for value in found if value is not None]
        self._require(len(cells) == len(found), f"{slot.admit.seq_id}: reads a position that was never written")
        return [0] * first + cells

    def _carry_states(self, started: _Started) -> None:
        """Carry every row's state through its positions, and keep it where the plan says.

        Places to be written are poisoned first: a real runner computes the rows of a plan all at once.
        """
        plan, slots = started.plan, started.slots
        self._poison_states(self._checkpoints, [kept.slot for row in plan.rows for kept in row.checkpoints])
        self._poison_states(self._spares, [spare for row in plan.rows for spare in row.spares])
        for row, slot in zip(plan.rows, slots, strict=True):
            if slot.failure or row.slot in started.behind:
                continue
            if slot.state is None:
                slot.state = self._initial_state(slot.admit)
            if not row.stored:
                self._carry(row, slot)

    def _poison_states(self, places: list[int | None], written: list[int]) -> None:
        self._require(len(set(written)) == len(written), "two rows write one state")
        for number in written:
            places[number] = None

    def _carry(self, row: Row, slot: _Slot) -> None:
        """Carry one row's state through its positions; the state of a row after one that waits is there already."""
        name, known = slot.admit.seq_id, row.start + row.count - len(row.drafts)
        before = slot.state if row.resume < 0 else self._spares[row.resume]
        self._require(before is not None, f"{name}: continues from a state that was not kept")
        if before is None:
            return
        if slot.held:
            self._require(row.count == 1, f"{name}: a row behind one that waits computes more than its position")
            slot.states = [START, before]
        else:
            slot.states = [before]
            for position, token in enumerate((*slot.tokens[row.start : known], *row.drafts), start=row.start):
                slot.states.append(carry(slot.states[-1], [cell(token, position, slot.admit.adapter)]))
        slot.state, slot.held = slot.states[-1], False
        if name in self._failing:
            return
        for kept in row.checkpoints:
            self._checkpoints[kept.slot] = slot.states[kept.position - row.start]
        for position, spare in enumerate(row.spares, start=known):
            self._spares[spare] = slot.states[position - row.start]

    def _initial_state(self, admit: Admit) -> int:
        if not admit.computed:
            return START
        self._require(admit.checkpoint < len(self._checkpoints), f"{admit.seq_id}: there is no such checkpoint")
        found = self._checkpoints[admit.checkpoint]
        self._require(found is not None, f"{admit.seq_id}: restores a state that was never kept")
        return START if found is None else found

    def _compute(self, row: Row, slot: _Slot, prefix: list[int]) -> RowResult | None:
        """Write the row's positions, then draw or embed, or fail as ordered; None if the row has no result yet."""
        if row.stored:
            return self._restore(row, slot)
        slot.failure = self._failing.pop(slot.admit.seq_id, slot.failure)
        if slot.failure:
            return RowResult(row.slot, failure=slot.failure)
        known = row.start + row.count - len(row.drafts)
        tokens = (*slot.tokens[row.start : known], *row.drafts)
        for position, token in enumerate(tokens, start=row.start):
            block, offset = divmod(position, self._config.block_size)
            self._memory[slot.table[block]][offset] = cell(token, position, slot.admit.adapter)
        cells = prefix + self._read(slot, row.start, row.start + row.count)[row.start :]
        slot.computed = known
        if slot.admit.embedding is not None:
            return self._embed(row, slot, cells, slot.admit.embedding.pooling)
        if not row.sample:
            return None
        drawn = tuple(self._draw(row, slot, cells))
        right = [token.id for token in drawn] == list(row.drafts[: len(drawn)])
        if not right or len(drawn) > len(row.drafts):
            guess = self._guess(row, slot)
            lag = len(slot.tokens) - slot.followed if self._config.draft_context else -1
            return RowResult(row.slot, drawn, guess=guess, lag=lag)
        self._waits[slot.admit.seq_id] -= 1
        slot.computed -= 1
        slot.held = self._stateful
        return RowResult(row.slot, drawn, waits=True)

    def _guess(self, row: Row, slot: _Slot) -> tuple[int, ...]:
        """The draft model's guesses; none until it has caught up."""
        slot.followed = min(len(slot.tokens), slot.followed + row.follow)
        if slot.followed < len(slot.tokens):
            return ()
        sampling, choice = slot.admit.sampling, slot.admit.choice
        coming = golden(slot.tokens, row.guesses, self._vocab_size, sampling, choice, None, self._stateful)
        places = enumerate(coming, start=len(slot.tokens))
        return tuple((token + (at % 3 == 0)) % self._vocab_size for at, token in places)

    def _draw(self, row: Row, slot: _Slot, cells: list[int]) -> Iterator[SampledToken]:
        """Draw the token after the known ones and after each draft that was right, up to where the sequence waits.

        It waits before the first token, or, if it has many drafts, after some tokens.
        """
        waits_at = len(row.drafts) // 3 if self._waits.get(slot.admit.seq_id) else -1
        for count, draft in enumerate((*row.drafts, None)):
            if count == waits_at:
                return
            token = self._next_token(row, slot, cells)
            slot.tokens.append(token)
            yield SampledToken(token, log_probability(token))
            if token != draft:
                return
            slot.computed += 1

    def _next_token(self, row: Row, slot: _Slot, cells: list[int]) -> int:
        """The token that follows the computed positions; `cells` may extend beyond them."""
        visible = self._visible(row, slot, cells, slot.computed)
        return next_token(visible, self._vocab_size, slot.admit.sampling, slot.admit.choice)

    def _embed(self, row: Row, slot: _Slot, cells: list[int], pooling: Pooling) -> RowResult | None:
        """Pool the row's positions; None while the prompt is not complete."""
        end = row.start + row.count
        places = pooled_places(pooling, row.start, end)
        states = sum(hidden_state(self._visible(row, slot, cells, each)) for each in places)
        slot.pooled = states if pooling is Pooling.LAST else slot.pooled + states
        whole = end == len(slot.tokens)
        return RowResult(row.slot, embedding=vector(slot.pooled)) if whole else None

    def _visible(self, row: Row, slot: _Slot, cells: list[int], count: int) -> list[int]:
        """The values that position number `count` of the sequence sees, up to its own; `row` computes the position."""
        state = slot.states[count - row.start : count - row.start + 1]
        return [*seen(cells[:count], self._config.window), *state]

    def _require(self, holds: bool, law: str) -> None:
        if not holds:
            raise PlanViolation(f"step {self._step - 1}: {law}")
