"""The engine as a plain object that is stepped: it joins scheduler, runner and text, in whichever thread calls it.

One `step` is: plan, record, run, commit, and turn token ids into text. With a runner that overlaps, the next plan is
made and started before the result of this one is waited for. A failure that belongs to one ask (its logits, its text)
ends that ask alone; a runner that raises leaves the engine dead, and says so. Not thread-safe: one owner.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque

from penstock.contract.errors import ConfigError, EngineDead, RequestError
from penstock.contract.events import (
    Admitted,
    AskFailed,
    AskFinished,
    ChoiceFinished,
    Embedded,
    Embedding,
    Finished,
    FinishReason,
    Generated,
    Output,
    PromptScored,
    SeqEvent,
    Usage,
)
from penstock.contract.measurements import UNTIMED, Measurements, Timings
from penstock.contract.plan import Draft, StepPlan, StepResult
from penstock.contract.ports import Clock, Drafter, Health, OverlappingRunner, Runner
from penstock.core import Scheduler
from penstock.engine.best_of import BestOfRanker
from penstock.engine.choice import Choice
from penstock.engine.intake import ResolvedRequest
from penstock.engine.interrupts import interrupts_allowed, interrupts_held
from penstock.engine.metrics_collector import MetricsCollector
from penstock.engine.prompt_echo import PromptEcho
from penstock.engine.recorder import NoRecorder, Recorder
from penstock.text import TextModel

__all__ = ["Engine", "StepOutputs"]

StepOutputs = list[tuple[str, Output]]
"""What a step has to say: (ask id, output) in the order in which it happened."""

log = logging.getLogger(__name__)


class _LiveAsk:
    """An ask whose choices are not all finished. Owned by the engine."""

    __slots__ = ("cached", "choices", "echo", "open", "submission")

    def __init__(self, submission: ResolvedRequest, choices: list[Choice]) -> None:
        self.submission = submission
        self.choices = choices
        self.open = len(choices)
        self.cached = 0
        self.echo: PromptEcho | None = None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.submission.prompt_tokens,
            completion_tokens=sum(choice.generated for choice in self.choices),
            cached_tokens=self.cached,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
        )


class _NoRunner:
    """What a closed engine has in place of a runner."""

    def run(self, plan: StepPlan) -> StepResult:
        raise EngineDead(f"step {plan.step} came after the engine was closed")

    def reset(self) -> None:
        """See `Runner`."""


class _OneAtATime:
    """A plain runner as one that overlaps: it computes when its result is asked for. Owned by the engine."""

    depth = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._started: StepPlan | None = None

    def start(self, plan: StepPlan) -> None:
        """See `OverlappingRunner`."""
        self._started = plan

    def finish(self) -> StepResult:
        """See `OverlappingRunner`."""
        assert self._started is not None, "a result was asked for and no plan was started"
        return self._runner.run(self._started)

    def reset(self) -> None:
        """See `OverlappingRunner`."""
        self._started = None
        self._runner.reset()


class _NoClock:
    """What an engine has that is not asked to measure time."""

    def now(self) -> float:
        return 0.0


class Engine:
    """Generates and embeds for many asks at once, one step at a time.

    Args:
        clock: the one that arrival times come from; without it every duration is measured as 0.
        drafter: guesses what comes next; without it nothing is drafted.

    Raises:
        ConfigError: the scheduler would make more plans at once than the runner takes.

    Attributes:
        scheduler: the decisions; open to learners, who may look at `scheduler.stats` between steps.
        meter: what is measured.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner | OverlappingRunner,
        text: TextModel,
        recorder: Recorder | NoRecorder | None = None,
        clock: Clock | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.meter = MetricsCollector(clock or _NoClock(), scheduler.config.max_model_len)
        self._runner = runner if isinstance(runner, OverlappingRunner) else _OneAtATime(runner)
        if scheduler.config.depth > self._runner.depth:
            raise ConfigError("depth", f"is {scheduler.config.depth}, but the runner takes {self._runner.depth} plans")
        self._in_flight: deque[StepPlan] = deque()
        self._drafter = drafter
        self._text = text
        self._recorder = recorder or NoRecorder()
        self._asks: dict[str, _LiveAsk] = {}
        self._owners: dict[str, tuple[_LiveAsk, Choice]] = {}
        self._contests: dict[str, BestOfRanker] = {}
        self._steps = 0
        self._num_computed = 0  # positions
        self._num_generated = 0  # tokens
        self._death = ""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self._death and (self.scheduler.has_work or bool(self._in_flight))

    def health(self) -> Health:
        """The present state."""
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
        """What was measured until now."""
        config = self.scheduler.config
        return self.meter.measurements(self.scheduler.stats, config.block_size, config.prefix_caching)

    def submit(self, submission: ResolvedRequest) -> None:
        """Queue every choice of an ask, or none.

        Raises:
            RequestError: it can never be served; nothing was queued.
            EngineDead: nothing can be served any more.
        """
        if self._death:
            raise EngineDead(self._death)
        queued: list[str] = []
        try:
            for request in submission.requests:
                self.scheduler.submit(request)
                self._recorder.submitted(request)
                queued.append(request.id)
        except RequestError:
            for seq_id in queued:
                self._drop(seq_id)
            raise
        tokenizer, reader = self._text.tokenizer, submission.reader
        choices = [Choice(r.choice, r.stop, tokenizer, reader, r.id, r.prompt) for r in submission.requests]
        ask = _LiveAsk(submission, choices)
        if PromptEcho.wanted(submission):
            ask.echo = PromptEcho(submission, self._text.tokenizer)
        if submission.answered < len(choices):
            self._contests[submission.id] = BestOfRanker(submission.answered)
        self._asks[submission.id] = ask
        self.meter.submitted(submission.requests)
        for request, choice in zip(submission.requests, choices, strict=True):
            self._owners[request.id] = (ask, choice)

    def abort(self, ask_id: str) -> StepOutputs:
        """End an ask now; unknown ids are no error. Its blocks are free before the next step."""
        ask = self._asks.get(ask_id)
        if ask is None:
            return []
        outputs: StepOutputs = []
        for request in ask.submission.requests:
            if request.id in self._owners:
                self._drop(request.id)
                outputs += self._close(request.id, ChoiceFinished(request.choice, FinishReason.ABORT))
        held = ask.echo.held if ask.echo is not None else []
        return self._told([*((ask_id, output) for output in held), *outputs])

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV; what runs goes on with its own."""
        self.scheduler.reset_prefix_cache()
        self._recorder.reset()

    def step(self) -> StepOutputs:
        """Compute one step and return what it brought; nothing when there is no work.

        Ctrl-C (or whatever else is no `Exception`) breaks off the computation: then the plans in flight are taken
        back, and the next step computes their rows again. While a step is planned and committed it is held back.

        Raises:
            EngineDead: the engine was dead before. A step that kills it returns the failures instead.
        """
        if self._death:
            raise EngineDead(self._death)
        with interrupts_held():
            return self._step()

    def _step(self) -> StepOutputs:
        while not self._in_flight or self.scheduler.can_plan_ahead:
            self._in_flight.append(self._plan())
            try:
                self._runner.start(self._in_flight[-1])
            except Exception:
                return self._die_in(self._in_flight[-1])
        plan = self._in_flight[0]
        try:
            with interrupts_allowed():
                result = self._runner.finish()
        except Exception:
            return self._die_in(plan)
        except BaseException:
            self._take_back()
            raise
        self._in_flight.popleft()
        self._steps += 1
        self.meter.ran()
        self._num_computed += plan.num_tokens
        self._num_generated += result.num_tokens
        return self._commit(plan, result)

    def _plan(self) -> StepPlan:
        drafts: tuple[Draft, ...] = ()
        if self._drafter is not None:
            guesses = ((one.seq_id, self._drafter.draft(one.tokens, one.most)) for one in self.scheduler.draftable())
            drafts = tuple(Draft(seq_id, tokens) for seq_id, tokens in guesses if tokens)
        if drafts:
            self._recorder.drafted(drafts)
        plan = self.scheduler.plan(drafts)
        self._recorder.planned(plan)
        self.meter.planned(plan)
        return plan

    def _take_back(self) -> None:
        """Forget the plans in flight: nobody knows how far the runner came with them."""
        self._in_flight.clear()
        self._runner.reset()
        self.scheduler.drop_in_flight()
        self._recorder.dropped()

    def _die_in(self, plan: StepPlan) -> StepOutputs:
        """Die of the exception that is being handled."""
        log.exception("step %d failed; the engine stops", plan.step)
        return self.die(f"the engine failed in step {plan.step}")

    def die(self, reason: str) -> StepOutputs:
        """Serve nothing any more; every live ask fails with `reason`."""
        self._death = reason
        ends: dict[str, Timings] = {}
        for seq_id, (ask, _) in self._owners.items():
            ends[ask.submission.id] = self.meter.ended(seq_id, FinishReason.ERROR)
        outputs: StepOutputs = [
            (ask_id, AskFailed(reason, ask.usage(), ends[ask_id])) for ask_id, ask in self._asks.items()
        ]
        self._asks.clear()
        self._owners.clear()
        return self._told(outputs)

    def close(self) -> None:
        """Fail what is live, end the recording, and let go of the runner: weights and KV cache go with it."""
        self.die("the engine was closed")
        self._recorder.close()
        self._runner = _OneAtATime(_NoRunner())

    def _commit(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        self._recorder.ran(result)
        outputs: StepOutputs = []
        for event in self.scheduler.commit(plan, result):
            outputs += self._translate(event)
        return self._told(outputs)

    def _told(self, outputs: StepOutputs) -> StepOutputs:
        """`outputs` less those of choices that must wait for others to be judged."""
        if not self._contests:
            return outputs
        told: StepOutputs = []
        for ask_id, output in outputs:
            contest = self._contests.get(ask_id)
            told += [(ask_id, output)] if contest is None else [(ask_id, each) for each in contest.take(output)]
            if isinstance(output, AskFinished | AskFailed):
                self._contests.pop(ask_id, None)
        return told

    def _translate(self, event: SeqEvent) -> StepOutputs:
        owner = self._owners.get(event.seq_id)
        if owner is None:  # its choice ended earlier in this very step, by a stop string
            return []
        ask, choice = owner
        try:
            match event:
                case Generated():  # nearly every event
                    generated = self._generated(ask, choice, event)
                    return generated if ask.echo is None else self._after_prompt(ask, generated)
                case Admitted():
                    self._note_admission(ask, choice, event)
                    return self._after_prompt(ask, [])
                case PromptScored():
                    return self._scored(ask, event)
                case Embedded():
                    self.meter.embedded(event.seq_id)
                    return [(ask.submission.id, Embedding(event.vector))]
                case Finished():
                    return self._after_prompt(ask, self._finished(ask, choice, event))
        except Exception as error:
            # Not its message: that may hold the text of a prompt or an answer.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("ask %s failed outside the model: %s at\n%s", ask.submission.id, type(error).__name__, frames)
            return self._fail(ask, "the text of this request could not be produced")

    def _scored(self, ask: _LiveAsk, event: PromptScored) -> StepOutputs:
        if ask.echo is not None:  # else it is computed, and told, once more
            ask.echo.take(event)
        return self._after_prompt(ask, [])

    def _after_prompt(self, ask: _LiveAsk, outputs: StepOutputs) -> StepOutputs:
        """`outputs` with the prompt in front if it is due now, or nothing while it is still awaited."""
        echo = ask.echo
        if echo is None or (outputs and isinstance(outputs[-1][1], AskFailed)):
            return outputs
        echo.held += [output for _, output in outputs]
        if not echo.complete:
            return []
        ask.echo = None
        return [(ask.submission.id, output) for output in (echo.output(), *echo.held)]

    def _note_admission(self, ask: _LiveAsk, choice: Choice, event: Admitted) -> None:
        self.meter.admitted(event.seq_id, event.cached)
        if choice.index == 0:  # the other choices find what choice 0 computed: that is not the caller's cache hit
            ask.cached = event.cached

    def _generated(self, ask: _LiveAsk, choice: Choice, event: Generated) -> StepOutputs:
        self.meter.generated(event.seq_id)
        delta = choice.push(event.token, event.logprob, event.top, event.rank)
        outputs: StepOutputs = [] if delta.empty else [(ask.submission.id, delta)]
        if not choice.ended:
            return outputs
        self._drop(event.seq_id)
        finished = ChoiceFinished(choice.index, choice.reason(FinishReason.STOP), choice.matched)
        return outputs + self._close(event.seq_id, finished)

    def _finished(self, ask: _LiveAsk, choice: Choice, event: Finished) -> StepOutputs:
        if event.reason is FinishReason.ERROR:
            return self._fail(ask, event.message)
        delta = choice.finish()
        outputs: StepOutputs = [] if delta.empty else [(ask.submission.id, delta)]
        if choice.matched is not None:
            finished = ChoiceFinished(choice.index, choice.reason(FinishReason.STOP), choice.matched)
        else:
            reason = choice.reason(event.reason)
            finished = ChoiceFinished(choice.index, reason, self._visible_stop(event.stop_token))
        return outputs + self._close(event.seq_id, finished)

    def _visible_stop(self, stop_token: int) -> int | None:
        """The stop token as told to the caller: only an id that he asked for, not the model's own end of sequence."""
        return None if stop_token < 0 or stop_token in self._text.eos_token_ids else stop_token

    def _close(self, seq_id: str, finished: ChoiceFinished) -> StepOutputs:
        ask, _ = self._owners.pop(seq_id)
        ask.open -= 1
        timings = self.meter.ended(seq_id, finished.reason)
        outputs: StepOutputs = [(ask.submission.id, finished)]
        if not ask.open:
            del self._asks[ask.submission.id]
            outputs.append((ask.submission.id, AskFinished(ask.usage(), timings)))
        return outputs

    def _fail(self, ask: _LiveAsk, message: str) -> StepOutputs:
        timings = UNTIMED
        for request in ask.submission.requests:
            if self._owners.pop(request.id, None) is not None:
                self._drop(request.id)
                timings = self.meter.ended(request.id, FinishReason.ERROR)
        del self._asks[ask.submission.id]
        return [(ask.submission.id, AskFailed(message, ask.usage(), timings))]

    def _drop(self, seq_id: str) -> None:
        """End a sequence in the scheduler; what it says of that is known already."""
        self.scheduler.abort(seq_id)
        self._recorder.aborted(seq_id)
