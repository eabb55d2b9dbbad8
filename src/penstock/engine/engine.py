"""The engine, stepped by its caller: one file, because scheduler, runner and text must see all events in one order.

The events in a request's life are: submitted, stepped, finished, failed, aborted.
One `step` is: plan, record, run, commit, and turn token ids into text. With a runner that overlaps, the engine makes
and starts the next plan before it waits for the result of this one. A failure that belongs to one request (its logits,
its text) ends only that request. A step that fails as a whole is taken back and computed again, and the guilty request
is found (`Scheduler.fail_step`). Only a runner whose every step fails leaves the engine dead, and the engine says so.
Not thread-safe: one owner.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable

from penstock.contract.adapter import AdapterFacts
from penstock.contract.cache_events import CacheEvents
from penstock.contract.engine_views import TenantShare
from penstock.contract.errors import ConfigError, EngineDead, RequestError, RunnerLost
from penstock.contract.events import (
    Admitted,
    ChoiceFinished,
    DraftsJudged,
    Embedded,
    Embedding,
    Finished,
    FinishReason,
    Generated,
    Output,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SeqEvent,
    Usage,
)
from penstock.contract.measurements import UNTIMED, AdaptersInUse, Measurements, Timings
from penstock.contract.plan import Draft, Draftable, Guess, StepPlan, StepResult
from penstock.contract.ports import AdaptingRunner, Clock, Drafter, Health, OverlappingRunner, Runner
from penstock.contract.stored_blocks import StoredBlocks
from penstock.core import Scheduler
from penstock.engine.adapters import AdapterBook
from penstock.engine.best_of import BestOfRanker
from penstock.engine.certifier import Certifier
from penstock.engine.certifying import Certifying
from penstock.engine.choice import Choice
from penstock.engine.expected_answers import ExpectedAnswers
from penstock.engine.intake import ResolvedRequest
from penstock.engine.interrupts import interruptible, interrupts_held
from penstock.engine.metrics_collector import MetricsCollector
from penstock.engine.profile import Profile
from penstock.engine.prompt_echo import PromptEcho
from penstock.engine.recent_steps import StepRing
from penstock.engine.recorder import NoRecorder, Recorder
from penstock.engine.stand_ins import NoClock, NoRunner, OneAtATime
from penstock.text import TextModel

__all__ = ["Engine", "StepOutputs"]

StepOutputs = list[tuple[str, Output]]
"""The outputs of a step in order: (request id, output)."""

_MOST_FAILURES_A_SLOT = 2
"""The engine dies after more failed steps in a row than this, times the sequences that can run at once: finding all
guilty sequences takes no more."""

log = logging.getLogger(__name__)


class _LiveRequest:
    """A request whose choices are not all finished. Owned by the engine."""

    __slots__ = ("cached", "choices", "echo", "id", "open", "resolved")

    def __init__(self, resolved: ResolvedRequest, choices: list[Choice]) -> None:
        self.id = resolved.id
        self.resolved = resolved
        self.choices = choices
        self.open = len(choices)
        self.cached = 0
        self.echo: PromptEcho | None = None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.resolved.prompt_tokens,
            completion_tokens=sum(choice.generated for choice in self.choices),
            cached_tokens=self.cached,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
        )


class Engine:
    """Generates and embeds for many requests at once, one step at a time.

    Args:
        clock: the clock of arrival times; without it every duration is measured as 0.
        stored: knows which stored blocks exist, if the scheduler asks for any.
        drafter: guesses next tokens; without it only the runner's own guesses are used.
        cache_events: publishes what enters and leaves the prefix cache, if the scheduler notes it.
        adapting: loads adapters into the runner: usually the runner itself; None if the runner takes none.
        most_adapters: how many may be loaded at once.
        certifying: certifies the answers to requests that want it; None if answers cannot be certified.

    Raises:
        ConfigError: the scheduler would have more plans in flight than the runner takes.

    Attributes:
        scheduler: makes the decisions; `scheduler.stats` may be read between steps.
        metrics: the measurements.
        recent_steps: the latest steps, for those who want to see what the engine does.
        adapters: the adapters that requests may name; any thread may read it.
        before_waiting: called in each step before the engine waits for a result or, after a failed step, for another
            runner.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner | OverlappingRunner,
        text: TextModel,
        recorder: Recorder | NoRecorder | None = None,
        clock: Clock | None = None,
        drafter: Drafter | None = None,
        stored: StoredBlocks | None = None,
        cache_events: CacheEvents | None = None,
        adapting: AdaptingRunner | None = None,
        most_adapters: int = 0,
        certifying: Certifying | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock or NoClock()
        self._at = self._clock.now()  # when the event happened that is being handled
        self.metrics = MetricsCollector(self._clock, scheduler.config.max_model_len, scheduler.times)
        self.recent_steps = StepRing()
        self._runner = runner if isinstance(runner, OverlappingRunner) else OneAtATime(runner)
        self._adapting = adapting
        if scheduler.config.depth > self._runner.depth:
            raise ConfigError("depth", f"is {scheduler.config.depth}, but the runner takes {self._runner.depth} plans")
        self.adapters = AdapterBook(0 if adapting is None else most_adapters)
        self._in_flight: deque[StepPlan] = deque()
        self._drafter = drafter
        self._expected = ExpectedAnswers()
        self._stored = stored
        self._cache_events = cache_events
        self._text = text
        self._recorder = recorder or NoRecorder()
        self._record_parts(None)
        self._requests: dict[str, _LiveRequest] = {}
        self._owners: dict[str, tuple[_LiveRequest, Choice]] = {}
        self._rankers: dict[str, BestOfRanker] = {}
        self._certifying = certifying
        self._certifiers: dict[str, Certifier] = {}
        self._steps = 0
        self._failed_in_a_row = 0  # steps
        self.before_waiting: Callable[[], None] = lambda: None
        self._num_computed = 0  # positions
        self._num_generated = 0  # tokens
        self._death = ""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self._death and (self.scheduler.has_work or bool(self._in_flight))

    @property
    def profiled(self) -> bool:
        """Whether a profile is running, or has ended by itself and waits to be stopped."""
        return self._profile is not None

    def health(self) -> Health:
        """The engine's state now."""
        numbers = self.scheduler.stats.numbers() | {"steps": self._steps}  # computed ones, not planned ones
        return Health(
            **numbers,
            alive=not self._death,
            reason=self._death,
            slots=self.scheduler.config.max_num_seqs,
            computed_tokens=self._num_computed,
            generated_tokens=self._num_generated,
        )

    def measurements(self) -> Measurements:
        """The measurements so far."""
        config, adapters = self.scheduler.config, None
        if self.adapters.most:
            adapters = AdaptersInUse(self.adapters.most, *map(tuple, map(sorted, self.scheduler.adapters_in_use())))
        return self.metrics.measurements(self.scheduler.stats, config.block_size, config.prefix_caching, adapters)

    def tenant_shares(self) -> tuple[TenantShare, ...]:
        """Each tenant's share of the engine now."""
        return self.metrics.tenant_shares(self.scheduler.tenant_loads())

    def submit(self, resolved: ResolvedRequest) -> None:
        """Queue all choices of a request, or none.

        Raises:
            RequestError: the request can never be served; nothing was queued.
            EngineDead: the engine is dead.
        """
        if self._death:
            raise EngineDead(self._death)
        for sequence in resolved.sequences:
            self.adapters.check(sequence)
        tokenizer, reader = self._text.tokenizer, resolved.reader
        choices = [Choice(s.choice, s.stop, tokenizer, reader, s.id, s.prompt) for s in resolved.sequences]
        request = _LiveRequest(resolved, choices)
        if PromptEcho.wanted(resolved):
            request.echo = PromptEcho(resolved, self._text.tokenizer)
        queued: list[str] = []
        self._at = self._clock.now()
        try:
            for sequence in resolved.sequences:
                self.scheduler.submit(sequence)
                queued.append(sequence.id)
                self._recorder.submitted(sequence, self._at)
        except Exception:  # a refusal, or a defect of ours
            for seq_id in queued:
                self._drop(seq_id)
            raise
        if resolved.answered < len(choices):
            self._rankers[resolved.id] = BestOfRanker(resolved.answered)
        if resolved.certified and self._certifying is not None:
            self._certifiers[resolved.id] = Certifier(self._certifying, resolved)
        self._requests[resolved.id] = request
        self.metrics.submitted(resolved.sequences, self._at)
        for sequence, choice in zip(resolved.sequences, choices, strict=True):
            self._owners[sequence.id] = (request, choice)
        for sequence, tokens in zip(resolved.sequences, resolved.expected, strict=False):  # none, for most requests
            self._expected.add(sequence.id, tokens)

    def abort(self, request_id: str) -> StepOutputs:
        """End a request now; unknown ids are no error. Its blocks are free before the next step."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        outputs: StepOutputs = []
        self._at = self._clock.now()
        for sequence in request.resolved.sequences:
            if sequence.id in self._owners:
                self._drop(sequence.id)
                outputs += self._close(sequence.id, ChoiceFinished(sequence.choice, FinishReason.ABORT))
        held = request.echo.held if request.echo is not None else []
        return self._filter_outputs([*((request_id, output) for output in held), *outputs])

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV; running sequences keep theirs."""
        self.scheduler.reset_prefix_cache()
        self._recorder.reset()
        self._publish_cache_events()

    def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """Load an adapter, which requests may name from now on. Must be called between steps.

        Raises:
            RequestError: the name cannot be used, or there is no room.
            SetupError: the adapter cannot be used.
            EngineFault: loading failed, through no fault of the adapter.
        """
        self.adapters.check_name(name)
        if self._adapting is None:
            raise EngineDead(self._death)
        return self.adapters.add(self._adapting.load_adapter(name, path))

    def unload_adapter(self, name: str, gone: Callable[[], None] = lambda: None) -> None:
        """Take no more requests for an adapter, and unload it when no live request uses it; then call `gone`.

        Raises:
            UnknownModel: no adapter has this name.
        """
        self.adapters.retire(name, gone)
        self._unload_retired()

    def _unload_retired(self) -> None:
        """Unload the retired adapters that no live request uses any more."""
        used = {request.resolved.sequences[0].adapter for request in self._requests.values()}
        for name in self.adapters.unused(used):
            if self._adapting is not None:
                self._adapting.unload_adapter(name)
            self.adapters.remove(name)

    def start_profile(self, profile: Profile) -> None:
        """Record every step from now on. Must be called by the thread that steps.

        Raises:
            RequestError: a profile is running already.
            EngineFault: the profiler could not be started.
        """
        if self.profiled:
            raise RequestError("A profile is running; POST /stop_profile ends it.", code="profile_running")
        profile.start()
        self._record_parts(profile)

    def stop_profile(self) -> Profile:
        """End the running profile, on the thread that started it. Then it can be written.

        Raises:
            RequestError: no profile is running.
            EngineFault: what the profile recorded is lost.
        """
        profile = self._profile
        if profile is None:
            raise RequestError("No profile is running; POST /start_profile begins one.", code="profile_not_running")
        self._record_parts(None)
        profile.stop()
        return profile

    def step(self) -> StepOutputs:
        """Compute one step and return its outputs; nothing if there is no work.

        Ctrl-C (or any other exception that is not an `Exception`) interrupts the computation: the plans in flight are
        taken back, and the next step computes their rows again. Ctrl-C is held while a step is planned and committed.

        Raises:
            EngineDead: the engine was dead before. The step that kills it returns failures instead; a failed step
                also returns failures, for the requests found guilty.
        """
        if self._death:
            raise EngineDead(self._death)
        with interrupts_held():
            return self._step()

    def _step(self) -> StepOutputs:
        while not self._in_flight or self.scheduler.can_plan_ahead:
            if self._stored is not None:
                self._look_up(self._stored)
            self._in_flight.append(self._plan())
            try:
                self._runner.start(self._in_flight[-1])
            except Exception as error:
                return self._fail_step(self._in_flight[-1], error)
        self.before_waiting()
        plan = self._in_flight[0]
        try:
            result = interruptible(self._finish_run)
        except Exception as error:
            return self._fail_step(plan, error)
        except BaseException:
            self._at = self._clock.now()
            lost = self._forget_in_flight()
            self.scheduler.drop_in_flight()
            self._recorder.dropped(self._at)
            self.metrics.dropped(self._at)
            if lost:
                self.reset_prefix_cache()
            raise
        self._in_flight.popleft()
        self._steps += 1
        self._failed_in_a_row = 0
        self._at = self._clock.now()
        shares = self.metrics.ran(result, self._at)
        self._num_computed += plan.num_tokens
        self._num_generated += result.num_tokens
        outputs = self._commit(plan, result)
        self.recent_steps.add(plan, shares, self.scheduler.times.foreseen, self._at)
        if self._profile is not None:
            self._profile.stepped(plan, self.scheduler)
        return outputs

    def _record_parts(self, profile: Profile | None) -> None:
        """Have `profile`, if there is one, record each part of a step from now on; None costs nothing."""
        self._profile = profile
        self._plan, self._finish_run, self._commit = self._plan_next, self._runner.finish, self._commit_result
        if profile is not None:
            self._plan = profile.around("plan", self._plan)
            self._finish_run = profile.around("run", self._finish_run)
            self._commit = profile.around("commit", self._commit)

    def _plan_next(self) -> StepPlan:
        drafts: tuple[Draft, ...] = ()
        if self._drafter is not None or self._expected:
            drafts = tuple([draft for one in self.scheduler.draftable() for draft in self._draft(one)])
        if drafts:
            self._recorder.drafted(drafts)
        plan = self.scheduler.plan(drafts)
        now = self._clock.now()
        self._recorder.planned(plan, now)
        self.metrics.planned(plan, now)
        return plan

    def _draft(self, sequence: Draftable) -> Guess:
        return self._expected.draft(sequence) or (() if self._drafter is None else self._drafter.draft(sequence))

    def _forget_drafts(self, seq_id: str) -> None:
        """A sequence has ended."""
        self._expected.forget(seq_id)
        if self._drafter is not None:
            self._drafter.forget(seq_id)

    def _look_up(self, stored: StoredBlocks) -> None:
        """Tell the scheduler how many leading blocks are stored, for the sequences that may be admitted next."""
        for seq_id, present, keys in self.scheduler.unsought():
            found = present + stored.leading(keys)
            if found:
                self._recorder.stored(seq_id, found)
                self.scheduler.note_stored(seq_id, found)

    def _forget_in_flight(self) -> bool:
        """Take back the plans in flight, however far the runner got with them. Returns whether all KV is lost."""
        self._in_flight.clear()
        lost = self._runner.reset()
        if lost:
            self.metrics.runner_lost()
        return lost

    def _fail_step(self, plan: StepPlan, error: Exception) -> StepOutputs:
        """Take back what is in flight because of the exception being handled, and find the guilty request."""
        killed = isinstance(error, RunnerLost) and error.killed
        self._at = self._clock.now()
        self.metrics.step_failed(self._at)
        self._failed_in_a_row += 1
        if self._failed_in_a_row > _MOST_FAILURES_A_SLOT * self.scheduler.config.max_num_seqs:
            log.exception("step %d failed, as did all before it; the engine stops", plan.step)
            return self.die(f"{self._failed_in_a_row} steps in a row failed, the last one was step {plan.step}")
        if isinstance(error, RunnerLost):
            log.error("step %d was lost and is computed again: %s", plan.step, error)
        else:
            log.exception("step %d failed; its rows are computed again one by one", plan.step)
        self.before_waiting()
        try:
            lost = self._forget_in_flight()
        except Exception:
            log.exception("the runner could not be reset after step %d failed; the engine stops", plan.step)
            return self.die(f"the engine failed in step {plan.step}, and again when it was to go on")
        events = self.scheduler.fail_step(killed=killed)
        self._recorder.failed(killed, self._at)
        if lost:
            self.reset_prefix_cache()
        self._publish_cache_events()  # of the plans that were taken back
        return self._filter_outputs([output for event in events for output in self._translate(event)])

    def die(self, reason: str) -> StepOutputs:
        """Stop serving; every live request fails with `reason`."""
        self._death, self._at = reason, self._clock.now()
        ends: dict[str, Timings] = {}
        for seq_id, (request, _) in self._owners.items():
            ends[request.id] = self.metrics.ended(seq_id, FinishReason.ERROR, self._at)
        outputs: StepOutputs = [
            (request_id, RequestFailed(reason, request.usage(), ends[request_id]))
            for request_id, request in self._requests.items()
        ]
        self._requests.clear()
        self._owners.clear()
        self.adapters.close()
        return self._filter_outputs(outputs)

    def close(self) -> None:
        """Fail live requests, end the recording, and release the runner with its weights and KV cache."""
        self.die("the engine was closed")
        self._recorder.close()
        self._runner, self._adapting = OneAtATime(NoRunner()), None
        self._record_parts(None)

    def _commit_result(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        self._recorder.ran(result, self._at)
        if result.store is not None:
            self.metrics.stored(result.store)
        outputs: StepOutputs = []
        for event in self.scheduler.commit(plan, result):
            outputs += self._translate(event)
        if (error := self.scheduler.times.error) is not None:
            self.metrics.foreseen(error)
        if self._cache_events is not None:
            self._publish_cache_events()
        return self._filter_outputs(outputs)

    def _publish_cache_events(self) -> None:
        """Pass on what entered and left the prefix cache since the last time."""
        events = self.scheduler.take_cache_events()
        if self._cache_events is not None and events:
            self._cache_events.publish(events)
            self.metrics.cache_events(self._cache_events.counts)

    def _filter_outputs(self, outputs: StepOutputs) -> StepOutputs:
        """Withhold the outputs of a request with `best_of` until its choices are ranked; certify answers if wanted."""
        if self._rankers:
            outputs = self._ranked(outputs)
        return self._certified(outputs) if self._certifiers else outputs

    def _certified(self, outputs: StepOutputs) -> StepOutputs:
        passed: StepOutputs = []
        for request_id, output in outputs:
            certifier = self._certifiers.get(request_id)
            passed.append((request_id, output if certifier is None else certifier.take(output)))
            if isinstance(output, RequestFinished | RequestFailed):
                self._certifiers.pop(request_id, None)
        return passed

    def _ranked(self, outputs: StepOutputs) -> StepOutputs:
        kept: StepOutputs = []
        for request_id, output in outputs:
            ranker = self._rankers.get(request_id)
            kept += [(request_id, output)] if ranker is None else [(request_id, each) for each in ranker.take(output)]
            if isinstance(output, RequestFinished | RequestFailed):
                self._rankers.pop(request_id, None)
        return kept

    def _translate(self, event: SeqEvent) -> StepOutputs:
        if isinstance(event, Finished):
            self._forget_drafts(event.seq_id)
        owner = self._owners.get(event.seq_id)
        if owner is None:  # its choice ended earlier in this step, by a stop string
            return []
        request, choice = owner
        try:
            match event:
                case Generated():  # nearly every event
                    generated = self._generated(request, choice, event)
                    return generated if request.echo is None else self._after_prompt(request, generated)
                case DraftsJudged():
                    self.metrics.drafted(event)
                    return []
                case Admitted():
                    self._note_admission(request, choice, event)
                    return self._after_prompt(request, [])
                case PromptScored():
                    return self._scored(request, event)
                case Embedded():
                    self.metrics.embedded(event.seq_id)
                    return [(request.id, Embedding(event.vector))]
                case Finished():
                    return self._after_prompt(request, self._finished(request, choice, event))
        except Exception as error:
            # Its message is left out: it may hold the text of a prompt or an answer.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("request %s failed outside the model: %s at\n%s", request.id, type(error).__name__, frames)
            return self._fail(request, "the text of this request could not be produced")

    def _scored(self, request: _LiveRequest, event: PromptScored) -> StepOutputs:
        if request.echo is not None:  # else the scores came already and were computed again after a preemption
            request.echo.take(event)
        return self._after_prompt(request, [])

    def _after_prompt(self, request: _LiveRequest, outputs: StepOutputs) -> StepOutputs:
        """`outputs`, preceded by the prompt if it is due now; or nothing while it is still incomplete."""
        echo = request.echo
        if echo is None or (outputs and isinstance(outputs[-1][1], RequestFailed)):
            return outputs
        echo.held += [output for _, output in outputs]
        if not echo.complete:
            return []
        request.echo = None
        return [(request.id, output) for output in (echo.output(), *echo.held)]

    def _note_admission(self, request: _LiveRequest, choice: Choice, event: Admitted) -> None:
        self.metrics.admitted(event.seq_id, event.cached)
        if choice.index == 0:  # the other choices find what choice 0 computed: that is not the caller's cache hit
            request.cached = event.cached

    def _generated(self, request: _LiveRequest, choice: Choice, event: Generated) -> StepOutputs:
        self.metrics.generated(event.seq_id)
        delta = choice.push(event.token, event.logprob, event.top, event.rank)
        outputs: StepOutputs = [] if delta.empty else [(request.id, delta)]
        if not choice.ended:
            return outputs
        self._drop(event.seq_id)
        finished = ChoiceFinished(choice.index, choice.reason(FinishReason.STOP), choice.matched)
        return outputs + self._close(event.seq_id, finished)

    def _finished(self, request: _LiveRequest, choice: Choice, event: Finished) -> StepOutputs:
        if event.reason is FinishReason.ERROR:
            return self._fail(request, event.message, event.poisoned)
        delta = choice.finish()
        outputs: StepOutputs = [] if delta.empty else [(request.id, delta)]
        if choice.matched is not None:
            finished = ChoiceFinished(choice.index, choice.reason(FinishReason.STOP), choice.matched)
        else:
            reason = choice.reason(event.reason)
            finished = ChoiceFinished(choice.index, reason, self._visible_stop(event.stop_token))
        return outputs + self._close(event.seq_id, finished)

    def _visible_stop(self, stop_token: int) -> int | None:
        """The stop token shown to the caller: only one that the request named, not the model's end of sequence."""
        return None if stop_token < 0 or stop_token in self._text.eos_token_ids else stop_token

    def _close(self, seq_id: str, finished: ChoiceFinished) -> StepOutputs:
        request, _ = self._owners.pop(seq_id)
        request.open -= 1
        timings = self.metrics.ended(seq_id, finished.reason, self._at)
        outputs: StepOutputs = [(request.id, finished)]
        if not request.open:
            self._forget(request)
            outputs.append((request.id, RequestFinished(request.usage(), timings)))
        return outputs

    def _fail(self, request: _LiveRequest, message: str, poisoned: bool = False) -> StepOutputs:
        timings = UNTIMED
        for sequence in request.resolved.sequences:
            if self._owners.pop(sequence.id, None) is not None:
                self._drop(sequence.id)
                timings = self.metrics.ended(sequence.id, FinishReason.ERROR, self._at)
        self._forget(request)
        return [(request.id, RequestFailed(message, request.usage(), timings, poisoned))]

    def _forget(self, request: _LiveRequest) -> None:
        """A request is over."""
        del self._requests[request.id]
        if self.adapters.retiring:
            self._unload_retired()

    def _drop(self, seq_id: str) -> None:
        """End a sequence in the scheduler, which returns no event for an abort."""
        self.scheduler.abort(seq_id)
        self._forget_drafts(seq_id)
        self._recorder.aborted(seq_id, self._at)
