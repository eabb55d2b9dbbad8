"""The ports: what one room needs of another, as Protocols. Implementations are named in `app.py` alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.contract.events import Output
from penstock.contract.grammar import Grammar
from penstock.contract.measurements import Measurements
from penstock.contract.plan import Draftable, Guess, StepPlan, StepResult
from penstock.contract.request import EngineRequest, Prompt
from penstock.contract.stats import SchedulerStats
from penstock.contract.thinking import ThinkingBudget

__all__ = [
    "Clock",
    "Drafter",
    "EngineClient",
    "Grammars",
    "Health",
    "Matcher",
    "OverlappingRunner",
    "Profiler",
    "Runner",
    "StepWatch",
    "Thinking",
    "ThinkingBudgets",
    "Tokenized",
]


class Runner(Protocol):
    """Executes plans. Owns the model, its KV memory and the slot tables; decides nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        """Apply releases and admits, compute every row, sample where asked.

        Raises:
            Exception: anything raised concerns the whole step (out of memory, a kernel that failed). What concerns one
                row only is returned in its `RowResult.failure`.
        """
        ...

    def reset(self) -> bool:
        """Forget every slot, and a step that was broken off in the middle, by Ctrl-C say.

        Returns:
            Whether keys and values are lost too, as where the process that had them is gone.
        """
        ...


@runtime_checkable
class OverlappingRunner(Protocol):
    """A runner that may be given the next plan while it still computes one. It computes them in the order given."""

    @property
    def depth(self) -> int:
        """Most plans that may be started and not finished."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Begin to compute `plan`, behind those that were begun before; raises as `Runner.run` does."""
        ...

    def finish(self) -> StepResult:
        """Wait for the eldest plan that was started and not finished, and return what came of it.

        A row of a sequence that failed in an earlier plan fails again. Raises as `Runner.run` does.

        Raises:
            RunnerLost: what computes is gone; `reset` brings another.
        """
        ...

    def reset(self) -> bool:
        """As `Runner.reset`; plans that were started are forgotten too."""
        ...


class Drafter(Protocol):
    """Guesses what comes next, so that one step may bring several tokens. It may be wrong, and cannot change anything.

    Called by the engine's thread between two steps: what it takes, every sequence waits for.
    """

    def draft(self, sequence: Draftable) -> Guess:
        """Guesses of what follows a sequence, each of what stands behind the one before; () for none.

        They have at most `most` token ids (at least 1) together. What is foreseen of the sequence is for the drafter to
        pass on.
        """
        ...

    def forget(self, seq_id: str) -> None:
        """A sequence has ended, or was dropped; one that was never asked about is no error."""
        ...


class Profiler(Protocol):
    """Records what one thread computes, once at a time. Used by that thread alone."""

    def start(self) -> None:
        """Begin to record.

        Raises:
            EngineFault: it cannot.
        """
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """While recording: what is computed inside is marked with `name`."""
        ...

    def stop(self) -> Callable[[Path], None]:
        """Record no more; what is returned writes the record, as Chrome's trace events, to a new file, by any thread.

        Raises:
            EngineFault: the record is lost.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(SchedulerStats):
    """How the engine is: `alive` until it died, and what it is doing. Counts are since the start.

    Attributes:
        reason: why it is not alive; "" while it is.
        slots: sequences that can run at once.
        computed_tokens: positions computed, in chunks and one by one.
        generated_tokens: tokens sampled.
    """

    alive: bool
    reason: str
    slots: int
    computed_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt as the model would be given it.

    Attributes:
        pieces: the bytes that each token stands for, beside `token_ids`.
        text: a conversation as its template wrote it, a text prompt as it is; "" for one given in token ids.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    text: str


class EngineClient(Protocol):
    """An engine as seen by a server: the same verbs for one in this process, in another, or elsewhere."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """Submit when the first output is asked for, and stream. Closing early (`aclose`, cancellation) aborts it.

        Raises:
            RequestError: before the first output, when the request cannot be served.
            Overloaded: before the first output, when it cannot be taken now.
            EngineDead: before the first output, when nothing can be served any more.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are no error. Its stream ends with finish reason `abort`."""
        ...

    def check_queue(self, tenant: str) -> None:
        """Make sure that the queue had room for the least request of this tenant a moment ago; waits for nothing.

        Raises:
            Overloaded: it had none.
        """
        ...

    def health(self) -> Health:
        """The present state, without waiting for the engine."""
        ...

    async def heartbeat(self) -> None:
        """Return when the engine has taken a message that does nothing, on the way that work takes too.

        Raises:
            EngineDead: nothing can be served any more.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached KV; running requests keep theirs.

        Raises:
            EngineDead: nothing can be served any more.
        """
        ...

    async def start_profile(self) -> None:
        """Record every step from now on.

        Raises:
            RequestError: a profile is running, or the operator named no folder for them.
            EngineFault: it could not be started, or nothing can be served any more.
        """
        ...

    async def stop_profile(self) -> tuple[str, ...]:
        """Record no more, and write what was recorded; the names of the files in the operator's folder.

        Raises:
            RequestError: no profile is running.
            EngineFault: it could not be written, or nothing can be served any more.
        """
        ...

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """The prompt as `generate` would read it; nothing is queued.

        Args:
            prompt: of any kind.
            tenant: on whose behalf: long prompts take turns by it.

        Raises:
            RequestError: it cannot be read, or is longer than any context could hold.
            Overloaded: too many long prompts wait, of all or of this tenant.
        """
        ...

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """The text of these tokens, control tokens included; bytes that are no whole character become U+FFFD.

        Raises:
            RequestError: an id lies outside the vocabulary.
        """
        ...

    def measurements(self) -> Measurements:
        """What was measured until the last step, without waiting for the engine."""
        ...


class Clock(Protocol):
    """Where time comes from. Real at the edges, simulated in tests."""

    def now(self) -> float:
        """Seconds, monotone, from an arbitrary origin."""
        ...


class StepWatch(Protocol):
    """Knows how long the step that is being computed has taken. Usable from any thread; waits for nothing."""

    def overdue(self) -> str:
        """What takes longer than it should; "" if nothing does."""
        ...

    def lost(self) -> str:
        """Why nothing but a new process would help; "" as long as something else may."""
        ...

    def began(self) -> float:
        """When the step that is being computed began, in seconds of `time.monotonic`; infinity when none is."""
        ...


class Matcher(Protocol):
    """One answer on its way through its grammar. Used by one thread at a time."""

    def mask(self) -> bytes:
        """The tokens that may come next: bit `i % 8` of byte `i // 8` is token id `i`; as wide as the vocabulary.

        An end-of-sequence token is among them exactly where the answer may end. Deterministic, and at least one is.

        Raises:
            EngineFault: the grammar cannot be followed any further; it concerns this answer alone.
        """
        ...

    def take(self, token: int) -> bool:
        """Go on past `token`; false, and nothing has changed, if the answer could not be completed after it."""
        ...

    def take_at_once(self, token: int) -> bool | None:
        """`take`, as far as that takes microseconds; None, and nothing has changed, if it may take longer."""
        ...

    def closing(self) -> int:
        """The next token of a known way to complete the answer; it can always be taken."""
        ...

    def copy(self) -> Matcher:
        """The same place, to go on from separately; takes microseconds."""
        ...

    def foresee(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that are likely to come next, because the form leaves hardly a choice; a mere guess.

        No end-of-sequence token is among them. Takes a fraction of a millisecond, and changes nothing.
        """
        ...


class Grammars(Protocol):
    """Compiles grammars. Safe to call from several threads."""

    def check(self, grammar: Grammar, max_new_tokens: int, tenant: str = "") -> Grammar:
        """The same grammar, to be given to `matcher`; refuses one that cannot be served in `max_new_tokens`.

        Args:
            grammar: what a caller sent.
            max_new_tokens: the room for its answer, the end-of-sequence token included.
            tenant: on whose behalf: those who wait for verdicts take turns by it.

        Raises:
            InvalidParameter: it is wrong, unsupported, too large, or no document of it fits; names
                `structured_outputs` or `max_tokens`.
            Overloaded: too many wait for verdicts, of all or of this tenant.
            Unavailable: the process that compiles was killed again and again.
        """
        ...

    def matcher(self, grammar: Grammar, max_new_tokens: int, prompt: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning of an answer of at most `max_new_tokens`.

        Waits for no process if `grammar` comes from `check`, for as many tokens. Guesses look at the `prompt`.
        """
        ...


class Thinking(Protocol):
    """One answer on its way through its reasoning, which has a budget. Used by one thread at a time."""

    @property
    def over(self) -> bool:
        """Whether no more reasoning can come: then nothing is ever due again."""
        ...

    @property
    def due(self) -> int | None:
        """The token that must come next; None where any may. Deterministic."""
        ...

    def take(self, token: int) -> None:
        """Go on past `token`, which is the one that was due, if one was."""
        ...


class ThinkingBudgets(Protocol):
    """Knows where in an answer the reasoning is. Safe to call from several threads."""

    def begin(self, budget: ThinkingBudget, prompt: Sequence[int]) -> Thinking:
        """An answer to `prompt`, token ids, at its beginning."""
        ...
