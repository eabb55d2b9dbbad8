"""Makes a replica of a simulated fleet: the scheduler that serves, and a machine described by a few round numbers.

These numbers, instead of a measurement, say how fast the replica prefills and decodes, so that everybody can tell what
a figure follows from. The parts of a step (`penstock.core.step_time`) follow from them.
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
"""The scheduler's uncertainty about the parts of a step, as a share: small, as steps take exactly these times."""

_MANY = 1000
"""Steps from which the scheduler has learned the parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Describes a replica.

    Attributes:
        tokens_per_second: prefill rate with no other sequence running, apart from the fixed time of each step.
        slots: most sequences at once.
        blocks: blocks of KV memory.
        waiting: most requests in its queue; more are refused.
        token_seconds: seconds between two tokens of an answer with one sequence; with all slots taken, twice as long.
        step_tokens: most tokens of a step.
        step_target_ms: most milliseconds that a step with prompts should take while a sequence decodes.
        context: most tokens of a request.
        patience: seconds after which a client whose answer has not begun leaves.
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
        """Return how long the parts of a step take at `speed` times the speed."""
        row = self.token_seconds / self.slots
        decoding = Decoding(self.token_seconds - row, row, row, 0.0)
        seconds = tuple(each / speed for each in (*decoding, *Chunks(1 / self.tokens_per_second, 0.0)))
        return KnownTimes(KnownParts(seconds, tuple(_SURE * each for each in seconds), learned=_MANY), chunks=True)


def replica_engine(config: ReplicaConfig, speed: float = 1.0, *, every: bool = False) -> SimulatedEngine:
    """Return a simulated engine without any work.

    Args:
        config: describes the replica.
        speed: makes the replica this many times as fast.
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
