"""The ports: what one room needs from another, as Protocols. Only `app.py` and its neighbours name implementations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.contract.adapter import AdapterFacts
from penstock.contract.engine_views import EngineViews
from penstock.contract.events import Output
from penstock.contract.grammar import Grammar
from penstock.contract.measurements import Measurements
from penstock.contract.plan import Draftable, Guess, StepPlan, StepResult
from penstock.contract.request import EngineRequest, Prompt
from penstock.contract.stats import SchedulerStats
from penstock.contract.thinking import ThinkingBudget

__all__ = [
    "AdaptingRunner",
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
            Exception: an exception concerns the whole step (out of memory, a failed kernel). A failure of one row is
                returned in its `RowResult.failure`.
        """
        ...

    def reset(self) -> bool:
        """Forget every slot, and a step that was interrupted (by Ctrl-C, for example).

        Returns:
            Whether keys and values are lost too, for example because the process that held them is gone.
        """
        ...


@runtime_checkable
class OverlappingRunner(Protocol):
    """A runner that accepts the next plan while it still computes one. It computes plans in order."""

    @property
    def depth(self) -> int:
        """The most plans that may be started and not finished."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Begin to compute `plan`, after those begun before; raises as `Runner.run` does."""
        ...

    def finish(self) -> StepResult:
        """Wait for the oldest unfinished plan, and return its result.

        A row of a sequence that failed in an earlier plan fails again. Raises as `Runner.run` does.

        Raises:
            RunnerLost: the runner's process is gone; `reset` starts another.
        """
        ...

    def reset(self) -> bool:
        """As `Runner.reset`; also forgets the plans that were started."""
        ...


class AdaptingRunner(Protocol):
    """A runner whose model may be adapted, beside its other ports. `reset` leaves its adapters loaded."""

    def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """Load an adapter, which plans may name from now on; between two steps.

        Args:
            name: one that no loaded adapter has.
            path: where its files are.

        Raises:
            SetupError: it cannot be used.
            EngineFault: it could not be loaded, although nothing is wrong with it.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; sequences that were admitted with it and are not released yet keep it."""
        ...


class Drafter(Protocol):
    """Guesses next tokens, so that one step may yield several. Wrong guesses change no answer.

    Called by the engine's thread between two steps: every sequence waits for it.
    """

    def draft(self, sequence: Draftable) -> Guess:
        """Guesses of the next tokens of a sequence, each following the one before; () for none.

        They have at most `most` token ids (at least 1) together. The drafter also passes on what is foreseen of the
        sequence.
        """
        ...

    def forget(self, seq_id: str) -> None:
        """A sequence has ended or was dropped; an unknown one is no error."""
        ...


class Profiler(Protocol):
    """Records what one thread computes, one recording at a time. Used by that thread alone."""

    def start(self) -> None:
        """Begin to record.

        Raises:
            EngineFault: recording cannot begin.
        """
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """While recording: mark what is computed inside with `name`."""
        ...

    def stop(self) -> Callable[[Path], None]:
        """Stop recording. The returned function writes the record as Chrome trace events to a new file, in any thread.

        Raises:
            EngineFault: the record is lost.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(SchedulerStats):
    """State of the engine: whether it is alive, and what it is doing. Counts are since the start.

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
    """A prompt as the model would read it.

    Attributes:
        pieces: the bytes of each token of `token_ids`.
        text: the rendered conversation, or the text prompt itself; "" for token ids.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    text: str


class EngineClient(EngineViews, Protocol):
    """An engine as a server sees it: the same methods whether it runs in this process, in another or elsewhere."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """Submit on the first iteration, and stream outputs. Closing early (`aclose`, cancellation) aborts the request.

        Raises:
            RequestError: before the first output, when the request cannot be served.
            Overloaded: before the first output, when it cannot be accepted now.
            EngineDead: before the first output, when the engine is dead.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are no error. Its stream ends with finish reason `abort`."""
        ...

    def check_queue(self, tenant: str) -> None:
        """Make sure that the queue had room for a smallest request of this tenant a moment ago, without waiting.

        Raises:
            Overloaded: it had no room.
        """
        ...

    def health(self) -> Health:
        """The present state, without waiting for the engine."""
        ...

    async def heartbeat(self) -> None:
        """Return when the engine has handled an empty message that took the same way as work.

        Raises:
            EngineDead: the engine is dead.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached KV; running requests keep theirs.

        Raises:
            EngineDead: the engine is dead.
        """
        ...

    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests may name, in the order in which they were loaded. Waits for nothing."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """Load an adapter from the operator's folder for them, by a path in it.

        Raises:
            RequestError: the name is taken, there is no room, or the adapter or its path cannot be used.
            EngineFault: it could not be loaded, or the engine is dead.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter, and unload it when those that use it have ended; waits for that.

        Raises:
            UnknownModel: no adapter has this name.
            EngineFault: the engine is dead.
        """
        ...

    async def start_profile(self) -> None:
        """Record every step from now on.

        Raises:
            RequestError: a profile is running, or the operator named no folder for profiles.
            EngineFault: it could not be started, or the engine is dead.
        """
        ...

    async def stop_profile(self) -> tuple[str, ...]:
        """Stop recording and write the record. Returns the names of the files in the operator's folder.

        Raises:
            RequestError: no profile is running.
            EngineFault: it could not be written, or the engine is dead.
        """
        ...

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """The prompt as `generate` would read it; nothing is queued.

        Args:
            prompt: of any kind.
            tenant: the tenant; the long prompts of different tenants take turns.

        Raises:
            RequestError: it cannot be read, or is longer than any context could hold.
            Overloaded: too many long prompts wait, in all or of this tenant.
        """
        ...

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """The text of these tokens, including control tokens; incomplete characters become U+FFFD.

        Raises:
            RequestError: an id lies outside the vocabulary.
        """
        ...

    def measurements(self) -> Measurements:
        """The measurements until the last step, without waiting for the engine."""
        ...


class Clock(Protocol):
    """Where time comes from. Real at the edges, simulated in tests."""

    def now(self) -> float:
        """Seconds, monotone, from an arbitrary origin."""
        ...


class StepWatch(Protocol):
    """Knows how long the current step has taken. Usable from any thread; never waits."""

    def overdue(self) -> str:
        """What takes longer than it should, in words; "" if nothing does."""
        ...

    def lost(self) -> str:
        """Why only a new process would help, in words; "" otherwise."""
        ...

    def began(self) -> float:
        """When the current step began, in seconds of `time.monotonic`; infinity if none is being computed."""
        ...


class Matcher(Protocol):
    """The state of one answer in its grammar. Used by one thread at a time."""

    def mask(self) -> bytes:
        """The tokens that may come next: bit `i % 8` of byte `i // 8` is token id `i`; as wide as the vocabulary.

        An end-of-sequence token is allowed exactly where the answer may end. Deterministic; allows at least one token.

        Raises:
            EngineFault: the grammar cannot be followed any further; concerns this answer alone.
        """
        ...

    def take(self, token: int) -> bool:
        """Advance past `token`; False, and no change, if the answer could not be completed after it."""
        ...

    def take_at_once(self, token: int) -> bool | None:
        """`take` if it takes microseconds; None, and no change, if it may take longer."""
        ...

    def closing(self) -> int:
        """The next token of a known completion of the answer; it is always allowed."""
        ...

    def copy(self) -> Matcher:
        """An independent copy of this state; takes microseconds."""
        ...

    def foresee(self, most: int) -> tuple[int, ...]:
        """A guess of at most `most` next tokens, where the grammar leaves hardly a choice.

        It holds no end-of-sequence token. Takes a fraction of a millisecond and changes nothing.
        """
        ...


class Grammars(Protocol):
    """Compiles grammars. Safe to call from several threads."""

    def check(self, grammar: Grammar, max_new_tokens: int, tenant: str = "") -> Grammar:
        """Judge a grammar; returns it for `matcher`, or refuses one that cannot be served in `max_new_tokens`.

        Args:
            grammar: what a caller sent.
            max_new_tokens: the most tokens of its answer, the end-of-sequence token included.
            tenant: the tenant; requests of different tenants that wait for verdicts take turns.

        Raises:
            InvalidParameter: it is wrong, unsupported or too large, or no document fits; names
                `structured_outputs` or `max_tokens`.
            Overloaded: too many requests wait for verdicts, in all or of this tenant.
            Unavailable: the process that compiles was killed again and again.
        """
        ...

    def matcher(self, grammar: Grammar, max_new_tokens: int, prompt: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning of an answer of at most `max_new_tokens`.

        Waits for no process if `grammar` comes from `check` with the same `max_new_tokens`. Guesses look at `prompt`.
        """
        ...


class Thinking(Protocol):
    """The state of one answer's reasoning, which has a budget. Used by one thread at a time."""

    @property
    def over(self) -> bool:
        """Whether no more reasoning can come; then no token is ever due again."""
        ...

    @property
    def due(self) -> int | None:
        """The token that must come next; None if any may. Deterministic."""
        ...

    def take(self, token: int) -> None:
        """Advance past `token`, which is the due one, if one was due."""
        ...


class ThinkingBudgets(Protocol):
    """Knows where in an answer the reasoning is. Safe to call from several threads."""

    def begin(self, budget: ThinkingBudget, prompt: Sequence[int]) -> Thinking:
        """The state at the beginning of an answer to `prompt` (token ids)."""
        ...
