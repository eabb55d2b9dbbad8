"""One sequence on its way through the scheduler.

Decides which changes of state are legal, and when a sequence's own rules end it. Does not know other sequences, the
pool or the queue. Invariants: it holds a lease and a slot exactly while it runs; `computed < len(tokens)` between
steps, because the last sampled token is never computed yet.
"""

from __future__ import annotations

from enum import StrEnum

from penstock.contract.errors import EngineFault
from penstock.contract.events import Finished, FinishReason
from penstock.contract.plan import Draft, Guess
from penstock.contract.request import SequenceRequest
from penstock.core.block_keys import KeyChain
from penstock.core.block_pool import Lease
from penstock.core.draft_chances import Judgements
from penstock.core.repetition import loops
from penstock.core.spare_states import NO_SPARE

__all__ = ["Seq", "SeqState"]


class SeqState(StrEnum):
    """Where a sequence is. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[SeqState, frozenset[SeqState]] = {
    SeqState.WAITING: frozenset({SeqState.RUNNING, SeqState.FINISHED}),
    SeqState.RUNNING: frozenset({SeqState.WAITING, SeqState.FINISHED}),
    SeqState.FINISHED: frozenset(),
}


class Seq:
    """A request and its progress. Owned by the scheduler; mutable, and never seen outside the core.

    Args:
        request: what is asked for.
        rank: its place in the policy's order; smaller is earlier, no two are equal.
        limit: most tokens it may ever have, prompt and output together.
        chain: names its blocks.

    Attributes:
        id: the request's.
        tokens: every token known: the prompt, then what was generated.
        computed: leading positions whose KV lies in the lease's blocks.
        scheduled: leading positions that are computed, or that plans in flight compute.
        drawing: how many rows in flight draw its next token, which is not in `tokens` yet.
        drafted: whether a row in flight has drafts; then its progress is unknown until that row is committed.
        last_step: the last plan that has a row of it; -1 before the first.
        bypasses: admissions that passed it while it was the head of the queue and lacked blocks.
        cached: prompt tokens found in the prefix cache at the first admission.
        announced: whether `Admitted` has been emitted.
        branches: positions at which its recurrent state is wanted because another sequence continues from there.
        newest_state: the key of its newest checkpoint among generated tokens; b"" for none.
        foreseen: the next tokens that its last row's result foresaw.
        guesses: guesses of the tokens that its row in flight draws, best first; drafts come from the first.
        draw_waits: whether its newest row waits, so that the next one draws in its place.
        resume: the spare place from which its next row continues its recurrent state; -1 for none.
        offer: what the draft model guessed after the last token; None for nothing.
        lag: known positions that the draft model has not computed; None if unknown.
        judgements: how good earlier guesses were.
        promised: right tokens that its guesses of recent steps promised, on average.
        doubt: how many more of its recent rows had no guess, or a wrong one, than had a right one.
        charged: leading positions that its tenant was charged for (`core.fair_shares`).
        sought: whether its blocks were looked for in the store while it waits.
        stored: how many leading blocks were found there, or in memory.
        restore_end: leading positions that are or were read from the store instead of computed; 0 for none.
        read: leading positions that were read, and count as computed once their recurrent state is read too.
    """

    __slots__ = (
        "_lease",
        "_slot",
        "announced",
        "branches",
        "bypasses",
        "cached",
        "chain",
        "charged",
        "computed",
        "doubt",
        "drafted",
        "draw_waits",
        "drawing",
        "foreseen",
        "guesses",
        "id",
        "judgements",
        "lag",
        "last_step",
        "limit",
        "newest_state",
        "offer",
        "promised",
        "rank",
        "read",
        "request",
        "restore_end",
        "resume",
        "scheduled",
        "sought",
        "state",
        "stop_ids",
        "stored",
        "tokens",
    )

    def __init__(self, request: SequenceRequest, rank: tuple[float, ...], limit: int, chain: KeyChain) -> None:
        self.request = request
        self.rank = rank
        self.limit = limit
        self.chain = chain
        self.id = request.id
        self.stop_ids = frozenset(request.stop.token_ids)
        self.tokens = list(request.prompt)
        self.computed = 0
        self.scheduled = 0
        self.drawing = 0
        self.drafted = False
        self.last_step = -1
        self.bypasses = 0
        self.cached = 0
        self.announced = False
        self.branches: tuple[int, ...] = ()
        self.newest_state = b""
        self.foreseen: tuple[int, ...] = ()
        self.guesses: tuple[Guess, ...] = ()
        self.draw_waits = False
        self.resume = NO_SPARE
        self.offer: Draft | None = None
        self.lag: int | None = None
        self.judgements = Judgements()
        self.promised = 0.0
        self.doubt = 0
        self.charged = 0
        self.sought = False
        self.stored = 0
        self.restore_end = 0
        self.read = 0
        self.state = SeqState.WAITING
        self._lease: Lease | None = None
        self._slot = -1

    @property
    def lease(self) -> Lease:
        """Its blocks; only while it runs."""
        if self._lease is None:
            raise EngineFault(f"sequence {self.id} is {self.state} and holds no lease")
        return self._lease

    @property
    def slot(self) -> int:
        """Its slot; only while it runs."""
        if self._slot < 0:
            raise EngineFault(f"sequence {self.id} is {self.state} and has no slot")
        return self._slot

    @property
    def holds_nothing(self) -> bool:
        """Whether it has neither lease nor slot."""
        return self._lease is None and self._slot < 0

    def holds(self, lease: Lease) -> bool:
        """Whether `lease` is its current one: it still runs, and was not preempted and admitted again meanwhile."""
        return self._lease is lease

    @property
    def remaining(self) -> int:
        """Positions that its next row could compute; 1 while it decodes, 0 if there are none or it is not known yet."""
        if self.computed < self.restore_end:
            return 0
        if not self.drawing:
            return len(self.tokens) - self.scheduled
        coming = len(self.tokens) + self.drawing
        return 0 if self.drafted or coming >= self.limit else coming - self.scheduled

    @property
    def to_restore(self) -> int:
        """Positions that its next row could read from the store; 0 while a row in flight reads some."""
        return self.restore_end - self.scheduled if self.scheduled == self.reached else 0

    @property
    def reached(self) -> int:
        """Leading positions that are computed, or read."""
        return max(self.computed, self.read)

    def restored(self, complete: bool) -> None:
        """A row that read stored blocks was committed; if some were missing, the rest is computed."""
        if not complete:
            self.restore_end = self.scheduled = self.computed
            self.read = 0

    def schedule(self, step: int, count: int, draws: bool) -> None:
        """Note a row of `count` positions in plan `step`."""
        self.scheduled += count
        self.drawing += draws
        self.last_step = step

    def add_drafts(self, count: int) -> None:
        """Note that the last scheduled row also has `count` drafts."""
        self.scheduled += count
        self.drafted = True

    def take_draw(self) -> None:
        """A row that draws was committed: its drafts, if any, are accepted or forgotten.

        If the row waits, so do the rows planned after it; after the last of them, its last position is scheduled again.
        """
        self.drawing -= 1
        if self.drafted or not self.drawing:
            self.drafted = False
            self.scheduled = self.computed

    def admit(self, lease: Lease, slot: int, computed: int) -> None:
        """Start to run, with the KV of `computed` positions already there."""
        if not self.announced:
            self.cached = computed
        self._change(SeqState.RUNNING)
        self._lease = lease
        self._slot = slot
        self.computed = self.scheduled = computed
        self.bypasses = 0

    def preempt(self) -> None:
        """Give up everything except the tokens, and wait again."""
        self._change(SeqState.WAITING)
        self._let_go()

    def finish(self) -> None:
        """End, from wherever it is."""
        self._change(SeqState.FINISHED)
        self._let_go()

    def ending(self) -> Finished | None:
        """How the newest token ends the sequence, if it does: a stop id, a loop, or no more tokens are allowed."""
        rules = self.request.stop
        generated = len(self.tokens) - len(self.request.prompt)
        if self.tokens[-1] in self.stop_ids and generated >= rules.min_tokens:
            return Finished(self.id, FinishReason.STOP, stop_token=self.tokens[-1])
        looped = rules.repetition and loops(self.tokens, len(self.request.prompt), *rules.repetition)
        if looped and generated >= rules.min_tokens:
            return Finished(self.id, FinishReason.REPETITION)
        if len(self.tokens) >= self.limit:
            return Finished(self.id, FinishReason.LENGTH)
        return None

    def _let_go(self) -> None:
        self._lease = None
        self._slot = -1
        self.computed = self.scheduled = self.drawing = 0
        self.drafted = False
        self.foreseen = ()
        self.guesses = ()
        self.draw_waits = False
        self.resume = NO_SPARE
        self.offer = self.lag = None
        self.branches = ()
        self.sought = False
        self.stored = self.restore_end = self.read = 0

    def _change(self, state: SeqState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise EngineFault(f"sequence {self.id} cannot go from {self.state} to {state}")
        self.state = state
