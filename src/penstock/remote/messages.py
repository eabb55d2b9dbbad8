"""What an engine and its runner's process say to each other. Plain values: no message can make anybody run anything.

The engine gives orders; each has one answer, but for `Load`, whose lines of the start report and `Found` come before
`Ready`. A process whose first order is `Fork` is a zygote, and takes `Fork` and `Reap` alone.
"""

from __future__ import annotations

import msgspec

from penstock.contract.config import EngineConfig
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.model import GgufVocabulary, HuggingFaceText, ModelFacts
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.sampling import SamplingScalar

__all__ = [
    "Answer",
    "Close",
    "Done",
    "Ended",
    "Failed",
    "Fork",
    "Forked",
    "Found",
    "Load",
    "Order",
    "Ran",
    "Ready",
    "Reap",
    "Refused",
    "Reset",
    "Run",
    "Said",
    "StartProfile",
    "StopProfile",
]


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first order to a runner: load a model. Answered by `Found` and then `Ready`, or by `Refused`.

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


class Close(msgspec.Struct, frozen=True, tag=True):
    """Save what is to be kept beyond the process; there will be no other order. Answered by `Done` or `Failed`."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Record what is computed from now on. Answered by `Done` or `Failed`."""


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Record no more, and write what was recorded to a new file. Answered by `Done` or `Failed`."""

    path: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that takes its orders from the socket that comes with this. Answered by `Forked` or `Failed`."""


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Say how a forked process ended, and let the system give its number to another. Answered by `Ended`."""

    pid: int


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line of the start report."""

    line: str


class Found(msgspec.Struct, frozen=True, tag=True):
    """What the model's files say; its weights are still to be loaded. The fields of `ModelFacts`.

    Attributes:
        text: a directory in Hugging Face layout, or the vocabulary of a GGUF file: a union of two dataclasses is none
            that MessagePack could tell apart.
    """

    name: str
    text: str | GgufVocabulary
    embedding: EmbeddingSpec
    sampling_defaults: tuple[tuple[str, SamplingScalar], ...]
    sampling_origin: str

    @classmethod
    def of(cls, facts: ModelFacts) -> Found:
        """The message that says so."""
        text = facts.text.directory if isinstance(facts.text, HuggingFaceText) else facts.text
        return cls(facts.name, text, facts.embedding, facts.sampling_defaults, facts.sampling_origin)

    @property
    def facts(self) -> ModelFacts:
        """What it says."""
        text = HuggingFaceText(self.text) if isinstance(self.text, str) else self.text
        return ModelFacts(self.name, text, self.embedding, self.sampling_defaults, self.sampling_origin)


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


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process is there."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How a forked process ended.

    Attributes:
        status: as `subprocess.Popen.returncode`: minus the signal that ended it, or its exit status; None where it
            runs, or is nobody's that was forked here.
    """

    status: int | None


class Done(msgspec.Struct, frozen=True, tag=True):
    """The order is carried out."""


Order = Load | Run | Reset | Close | StartProfile | StopProfile | Fork | Reap
Answer = Said | Found | Ready | Refused | Ran | Failed | Forked | Ended | Done
