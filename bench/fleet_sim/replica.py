"""A replica of a simulated fleet: the scheduler that serves, and a machine of round numbers for its steps.

How fast it reads and decodes is said by a few numbers instead of a measurement, so that everybody can tell what a
figure follows from. The parts of a step (`penstock.core.step_time`) follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet_sim.trace import BLOCK
from penstock.contract.known_times import KnownParts, KnownTimes
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.step_time import Chunks, Decoding, StepTimes
from penstock.foresight.engine import SimulatedEngine
from penstock.foresight.step_costs import Measurements, StepCosts

__all__ = ["ReplicaConfig", "replica_engine"]

_SURE = 0.01
"""How far the parts of a step may be off in the scheduler's eyes, as a share: they are what steps really take."""

_MANY = 1000
"""Steps from which it has learned them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """What a replica is like.

    Attributes:
        tokens_per_second: of prompts that it reads with nobody beside, apart from what each step takes.
        slots: sequences at once.
        blocks: of KV memory.
        waiting: requests that it lets wait before it refuses more.
        token_seconds: from a token of an answer to the next with one sequence; with all slots taken, twice as long.
        step_tokens: that a step computes at most.
        step_target_ms: that a step with prompts should take at most while somebody decodes.
        context: tokens of a request at most.
        patience: seconds after which somebody whose answer has not begun leaves.
    """

    tokens_per_second: float = 4000.0
    slots: int = 24
    blocks: int = 1500
    waiting: int = 96
    token_seconds: float = 0.015
    step_tokens: int = 512
    step_target_ms: int = 100
    context: int = 32_768
    patience: float = 30.0

    def parts(self, speed: float = 1.0) -> KnownTimes:
        """What the parts of a step take at so many times the speed."""
        row = self.token_seconds / self.slots
        decoding = Decoding(self.token_seconds - row, row, row, 0.0)
        seconds = tuple(each / speed for each in (*decoding, *Chunks(1 / self.tokens_per_second, 0.0)))
        return KnownTimes(KnownParts(seconds, tuple(_SURE * each for each in seconds), learned=_MANY), chunks=True)


def replica_engine(config: ReplicaConfig, speed: float = 1.0, *, every: bool = False) -> SimulatedEngine:
    """An engine without any work.

    Args:
        config: what it is like.
        speed: that many times as fast.
        every: see `SimulatedEngine`.
    """
    known = config.parts(speed)
    scheduler = SchedulerConfig(
        config.blocks,
        block_size=BLOCK,
        max_num_seqs=config.slots,
        max_num_batched_tokens=config.step_tokens,
        max_model_len=config.context,
        step_target_ms=config.step_target_ms,
        step_times=known,
    )
    costs = StepCosts(StepTimes(None, known), Measurements(()), Measurements(()))
    return SimulatedEngine(scheduler, costs, every=every)
