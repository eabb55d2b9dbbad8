"""A replica in made-up time: slots, KV blocks with a prefix cache, and one prompt read after the other.

What it has in common with the engine is what a router can spoil: prompts queue, what is cached is not read again, what
was not used for longest is dropped, and sequences that decode hold slots and blocks and slow the reading down.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_sim.trace import BLOCK
from penstock.routing import ReplicaLoad

__all__ = ["Job", "ReplicaConfig", "SimReplica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """What a replica is like.

    Attributes:
        tokens_per_second: that it reads with nobody beside.
        slots: sequences at once.
        blocks: of KV memory.
        waiting: requests that it lets wait before it refuses more.
        token_seconds: from a token of an answer to the next with one sequence; with all slots taken, twice as long.
        request_seconds: that beginning a request costs beside its tokens.
        patience: seconds after which somebody whose answer has not begun leaves.
    """

    tokens_per_second: float = 4000.0
    slots: int = 24
    blocks: int = 1500
    waiting: int = 96
    token_seconds: float = 0.015
    request_seconds: float = 0.005
    patience: float = 30.0


@dataclass(slots=True, eq=False)
class Job:
    """One request at one replica.

    Attributes:
        tokens: of the prompt.
        answer: tokens to come.
        prompt_keys: of the prompt's full blocks.
        all_keys: of the full blocks of prompt and answer.
        came: second in which the client sent it.
        cached: tokens found in the prefix cache.
    """

    tokens: int
    answer: int
    prompt_keys: Sequence[bytes]
    all_keys: Sequence[bytes]
    came: float
    unread: float = 0.0
    cached: int = 0
    private: int = 0
    pinned: Sequence[bytes] = field(default_factory=tuple)


class SimReplica:
    """One replica. Whoever owns it calls `next` when something has changed, and then knows when the reading ends."""

    def __init__(self, name: str, config: ReplicaConfig, speed: float = 1.0) -> None:
        self.name = name
        self.config = config
        self.rate = config.tokens_per_second * speed
        self.waiting: deque[Job] = deque()
        self.reading: Job | None = None
        self.read_at = 0.0
        self.running: set[Job] = set()
        self.busy_seconds = 0.0
        self.served = 0
        self._held: dict[bytes, int] = {}  # key -> sequences that hold its block
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # blocks that nobody holds, the longest unused first
        self._private = 0

    @property
    def at_once(self) -> int:
        """Requests that it has."""
        return len(self.running) + len(self.waiting) + (self.reading is not None)

    def offer(self, job: Job) -> bool:
        """Queue it; False if the queue is full."""
        if len(self.waiting) >= self.config.waiting:
            return False
        job.unread = job.tokens - self._found(job.prompt_keys) * BLOCK
        self.waiting.append(job)
        return True

    def next(self, now: float) -> tuple[Job | None, list[Job]]:
        """Begin to read the next prompt if that is possible; the job that was begun, and those who left meanwhile."""
        left: list[Job] = []
        while self.reading is None and self.waiting:
            if now - self.waiting[0].came > self.config.patience:
                left.append(self.waiting.popleft())
                continue
            if len(self.running) >= self.config.slots or not self._admit(self.waiting[0]):
                break
            job = self.reading = self.waiting.popleft()
            slower = 1 + len(self.running) / self.config.slots
            seconds = self.config.request_seconds + max(1, job.tokens - job.cached) / self.rate * slower
            self.busy_seconds += seconds
            self.read_at = now + seconds
            return job, left
        return None, left

    def read(self) -> tuple[Job, float]:
        """The prompt is read: its first token is there. The job, and the seconds that the rest of its answer takes."""
        job = self.reading
        assert job is not None
        self.reading = None
        self.running.add(job)
        self._share(job)
        slower = 1 + len(self.running) / self.config.slots
        return job, job.answer * self.config.token_seconds * slower * self.config.tokens_per_second / self.rate

    def end(self, job: Job) -> None:
        """The answer is complete: its blocks are cached, and nobody's."""
        self.running.discard(job)
        self.served += 1
        self._private -= job.private
        for key in reversed(job.pinned):
            self._release(key)
        for key in reversed(job.all_keys[len(job.prompt_keys) :]):
            if key not in self._held:
                self._cached[key] = None
                self._cached.move_to_end(key)
        self._shrink()

    def load(self, now: float) -> ReplicaLoad:
        """What it says of itself."""
        backlog = sum(job.unread for job in self.waiting) / self.rate
        backlog += max(0.0, self.read_at - now) if self.reading is not None else 0.0
        return ReplicaLoad(
            backlog_seconds=backlog,
            running=len(self.running) + (self.reading is not None),
            waiting=len(self.waiting),
            slots=self.config.slots,
            free_blocks=self.config.blocks - len(self._held) - self._private,
            total_blocks=self.config.blocks,
            tokens_per_second=self.rate,
        )

    def _found(self, keys: Sequence[bytes]) -> int:
        for place, key in enumerate(keys):
            if key not in self._held and key not in self._cached:
                return place
        return len(keys)

    def _admit(self, job: Job) -> bool:
        """Take the blocks that it needs to its end, if there are as many; what is found is held and not read."""
        found = self._found(job.prompt_keys)
        known = job.prompt_keys[:found]
        needed = -(-(job.tokens + job.answer) // BLOCK) - sum(key in self._held for key in known)
        if len(self._held) + self._private + needed > self.config.blocks and (self._held or self._private):
            return False
        for key in known:
            self._hold(key)
        job.cached = min(found * BLOCK, job.tokens - 1)
        job.pinned = known
        job.private = -(-(job.tokens + job.answer) // BLOCK) - found
        self._private += job.private
        self._shrink()
        return True

    def _share(self, job: Job) -> None:
        """What was read can be found from now on."""
        new = job.prompt_keys[len(job.pinned) :]
        for key in new:
            self._hold(key)
        job.private -= len(new)
        self._private -= len(new)
        job.pinned = job.prompt_keys
        self._shrink()

    def _hold(self, key: bytes) -> None:
        self._held[key] = self._held.get(key, 0) + 1
        self._cached.pop(key, None)

    def _release(self, key: bytes) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            self._cached[key] = None

    def _shrink(self) -> None:
        room = max(0, self.config.blocks - len(self._held) - self._private)
        while len(self._cached) > room:
            self._cached.popitem(last=False)
