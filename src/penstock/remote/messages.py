"""What an engine and its runner's process say to each other. Plain values: no message can make anybody run anything.

The engine gives orders; each has one answer, but for lines of the start report, which come before `Ready`.
"""

from __future__ import annotations

import msgspec

from penstock.contract.config import EngineConfig
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.plan import StepPlan, StepResult

__all__ = [
    "Answer",
    "Done",
    "Failed",
    "Load",
    "Order",
    "Ran",
    "Ready",
    "Refused",
    "Reset",
    "Run",
    "Said",
    "StartProfile",
    "StopProfile",
]


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first order: load a model. Answered by `Ready` or `Refused`.

    Attributes:
        cache_dir: where fetched models are kept.
        like: sizes of a runner that was made before, for the same plans; None to size it from the free memory.
    """

    config: EngineConfig
    cache_dir: str
    like: MemoryReport | None = None


class Run(msgspec.Struct, frozen=True, tag=True):
    """Compute a plan. Answered by `Ran` or `Failed`."""

    plan: StepPlan


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Forget every slot, as `Runner.reset`. Answered by `Done`."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Record what is computed from now on. Answered by `Done` or `Failed`."""


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Record no more, and write what was recorded to a new file. Answered by `Done` or `Failed`."""

    path: str


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line of the start report."""

    line: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    facts: RunnerFacts


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded: what the operator gave is wrong.

    Attributes:
        option: the option at fault, or "".
        message: without the option's name.
    """

    option: str
    message: str


class Ran(msgspec.Struct, frozen=True, tag=True):
    """What came of a plan."""

    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The order raised; the process goes on.

    Attributes:
        report: the exception and where it came from, for the log.
    """

    report: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The order is carried out."""


Order = Load | Run | Reset | StartProfile | StopProfile
Answer = Said | Ready | Refused | Ran | Failed | Done
