"""The messages between an engine and its runner's process. They are plain values: no message can inject code.

The engine gives orders, and each gets one answer, except for `Load`: lines of the start report and `Found` come before
`Ready`. A process whose first order is `Fork` is a zygote, and accepts only `Fork` and `Reap`.
"""

from __future__ import annotations

import msgspec

from penstock.contract.adapter import AdapterFacts
from penstock.contract.config import EngineConfig
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.model import GgufVocabulary, HuggingFaceText, ModelFacts
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.sampling import SamplingScalar

__all__ = [
    "AdapterLoaded",
    "Answer",
    "Close",
    "Done",
    "Ended",
    "Failed",
    "Fork",
    "Forked",
    "Found",
    "Load",
    "LoadAdapter",
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
    "UnloadAdapter",
]


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first order to a runner: load a model. Answered by `Found` and then `Ready`, or by `Refused`.

    Attributes:
        cache_dir: where downloaded models are kept.
        like: memory sizes of an earlier runner, so that the same plans fit; None to size it from the free memory.
    """

    config: EngineConfig
    cache_dir: str
    like: MemoryReport | None = None


class Run(msgspec.Struct, frozen=True, tag=True):
    """Compute a plan. Answered by `Ran` or `Failed`."""

    plan: StepPlan


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Clear every slot, as `Runner.reset`. Answered by `Done` or `Failed`."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Save what must outlive the process; this is the last order. Answered by `Done` or `Failed`."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Start profiling. Answered by `Done` or `Failed`."""


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Stop profiling, and write the profile to the file `path`. Answered by `Done` or `Failed`."""

    path: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter. Answered by `AdapterLoaded`, by `Refused` if it cannot be used, or by `Failed`.

    Attributes:
        digest: what its digest must be; "" for any.
    """

    name: str
    path: str
    digest: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter. Answered by `Done` or `Failed`."""

    name: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that takes its orders from the socket passed along. Answered by `Forked` or `Failed`."""


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Reap a forked process, and report how it ended. Answered by `Ended`."""

    pid: int


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line of the start report."""

    line: str


class Found(msgspec.Struct, frozen=True, tag=True):
    """What the model's files say, before its weights are loaded. The fields of `ModelFacts`.

    Attributes:
        text: a directory in Hugging Face layout, or the vocabulary of a GGUF file. Not a union of two dataclasses,
            which MessagePack could not tell apart.
    """

    name: str
    text: str | GgufVocabulary
    embedding: EmbeddingSpec
    sampling_defaults: tuple[tuple[str, SamplingScalar], ...]
    sampling_origin: str

    @classmethod
    def of(cls, facts: ModelFacts) -> Found:
        """The message with these facts."""
        text = facts.text.directory if isinstance(facts.text, HuggingFaceText) else facts.text
        return cls(facts.name, text, facts.embedding, facts.sampling_defaults, facts.sampling_origin)

    @property
    def facts(self) -> ModelFacts:
        """The facts in this message."""
        text = HuggingFaceText(self.text) if isinstance(self.text, str) else self.text
        return ModelFacts(self.name, text, self.embedding, self.sampling_defaults, self.sampling_origin)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    facts: RunnerFacts


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The adapter is loaded."""

    facts: AdapterFacts


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The model or adapter cannot be loaded, because of a mistake in the operator's configuration.

    Attributes:
        option: the option at fault, or "".
        message: the error, without the option's name.
    """

    option: str
    message: str


class Ran(msgspec.Struct, frozen=True, tag=True):
    """The result of a plan."""

    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The order raised an exception; the process goes on.

    Attributes:
        report: the exception, with its traceback unless it is a failed fork; for the log.
    """

    report: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process has been forked."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How a forked process ended.

    Attributes:
        status: as `subprocess.Popen.returncode`: minus the signal that ended it, or its exit status; None if it is
            still running, or was not forked here.
    """

    status: int | None


class Done(msgspec.Struct, frozen=True, tag=True):
    """The order has been carried out."""


Order = Load | Run | Reset | Close | StartProfile | StopProfile | LoadAdapter | UnloadAdapter | Fork | Reap
Answer = Said | Found | Ready | Refused | Ran | AdapterLoaded | Failed | Forked | Ended | Done
