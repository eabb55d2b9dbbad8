"""How many prompt tokens a step reads, so that decoding sequences get their next token in time.

Decides by `core.step_time`. While any sequence decodes, a step should take no longer than the target, and prompts get
the time that decoding leaves. Prompts always advance: by at least `LEAST` positions, and, when decoding alone is near
the target or above it, for half the time that decoding takes. Without decoding sequences there is no limit. If tenants
are left out of a step for a newcomer (`core.slot_claims`), prompts get the time that they would have used.

No answer depends on this: the size of chunks changes no token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.sequence import Seq
from penstock.core.step_time import StepTimes, chunk_of

__all__ = ["LEAST", "ChunkLimit", "chunk_limit", "decodes", "seconds_for_prompts"]

LEAST = 16
"""Positions of a prompt that a step reads, however long they take. With fewer, fixed costs dominate the step."""


def chunk_limit(config: SchedulerConfig, times: StepTimes, running: Iterable[Seq]) -> ChunkLimit | None:
    """The limit of the next plan; None if steps have no target or prompts cannot be split."""
    if not config.step_target_ms or config.looks_ahead:
        return None
    return ChunkLimit(times, config.step_seconds, running)


class ChunkLimit:
    """The time that one plan has for prompts. Owned by the plan's builder.

    Args:
        times: what steps take.
        target: seconds that the step should take at most.
        running: all sequences that hold a slot; read only when the first prompt asks for time, so that a plan without
            prompts costs nothing.

    Attributes:
        cut: whether a prompt got less than it could have computed.
    """

    __slots__ = ("_decoding", "_grace", "_left", "_running", "_taken", "_target", "_times", "cut")

    def __init__(self, times: StepTimes, target: float, running: Iterable[Seq]) -> None:
        self._times = times
        self._target = target
        self._running = running
        self._decoding = 0.0  # seconds that decoding takes
        self._left: float | None = None  # seconds; None until it is first needed
        self._grace = 0.0  # extra seconds for a prompt that can be read whole with them
        self._taken = False
        self.cut = False

    @property
    def crowded(self) -> bool:
        """Whether decoding alone takes more than half of the target."""
        self._seconds_left()
        return 2 * self._decoding > self._target

    def leave_out(self, tenants: Collection[str]) -> None:
        """These tenants have no rows in this step, which leaves more time for prompts. Call before `take`.

        The first prompt may then take one more target's time if that is enough to read all of it.
        """
        left = self._seconds_left()
        self._decoding = self._seconds_to_decode(self._starts(tenants))
        self._left = max(left, seconds_for_prompts(self._target, self._decoding))
        self._grace = self._target

    @property
    def spent(self) -> bool:
        """Whether no time is left for further prompts."""
        return self._taken and self._seconds_left() < self._times.of(chunk_of(0, LEAST, self._times.window))

    def fit(self, start: int, wanted: int) -> int:
        """How many of `wanted` positions from `start` on the step may compute; 0 if no time is left."""
        left = self._seconds_left()
        if left == float("inf"):
            return wanted
        count = 0
        if not self.spent:
            count = min(wanted, max(self._affordable(start, left, wanted), 1 if self._taken else LEAST))
            if self._grace and not self._taken and self._affordable(start, left + self._grace, wanted) == wanted:
                count = wanted  # its rest would need another step, in which all sequences may decode
        self.cut = self.cut or count < wanted
        return count

    def take(self, start: int, count: int) -> None:
        """The step computes these positions."""
        self._left = self._seconds_left() - self._times.of(chunk_of(start, count, self._times.window))
        self._taken = True

    def _affordable(self, start: int, left: float, wanted: int) -> int:
        """How many positions from `start` on take `left` seconds, or a few less."""
        if not self._times.knows_chunks:
            return LEAST
        count = 0
        for _ in range(2):  # by the price of the first one, then by that of the one in their middle
            price = self._times.of(chunk_of(start + count // 2, 1, self._times.window))
            count = min(wanted, int(left / price)) if price > 0 else wanted
        return count

    def _seconds_left(self) -> float:
        if self._left is None:
            starts = self._starts(())
            self._decoding = self._seconds_to_decode(starts)
            self._left = seconds_for_prompts(self._target, self._decoding) if starts else float("inf")
        return self._left

    def _starts(self, left_out: Collection[str]) -> list[int]:
        """How many tokens each decoding sequence has, except those of these tenants."""
        return [len(seq.tokens) for seq in self._running if decodes(seq) and seq.request.tenant not in left_out]

    def _seconds_to_decode(self, starts: list[int]) -> float:
        return self._times.of(self._times.decoding(starts)) if starts else 0.0


def seconds_for_prompts(target: float, decoding: float) -> float:
    """The seconds for prompts in a step that should take `target` seconds and decodes for `decoding` seconds."""
    return max(target - decoding, decoding / 2)


def decodes(seq: Seq) -> bool:
    """Whether the client has received a token of this sequence and waits for the next one."""
    return len(seq.tokens) > len(seq.request.prompt) and seq.remaining <= 1
