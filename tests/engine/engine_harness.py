"""A harness: the real scheduler, text and engine around the paged-memory fake runner. No tensors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.contract.answer_contract import AnswerContract
from penstock.contract.cache_events import CacheEvents
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Output, RequestFailed, RequestFinished
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import GgufVocabulary, ModelCard
from penstock.contract.plan import PromptScores, RowResult, StepPlan, StepResult
from penstock.contract.ports import Runner
from penstock.contract.request import EngineRequest, StopRules, TokenPrompt
from penstock.contract.sampling import SamplingSpec
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import CacheLog, Scheduler
from penstock.engine import Certifying, Engine, Intake, NoRecorder, Recorder
from penstock.sim.clock import SimClock
from penstock.sim.fake_model import golden
from penstock.sim.fake_runner import FakeRunner
from penstock.text import TextModel, open_text

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?"
END = "<|end|>"
VOCABULARY = (*LETTERS.replace(" ", "Ġ"), END)
END_ID = len(LETTERS)
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def text_model(*, add_eos: bool = False) -> TextModel:
    """A tokenizer of single letters, so that texts are easy to foresee; with `add_eos` it ends each with `END`."""
    return open_text(
        GgufVocabulary(
            file="harness.gguf",
            model="gpt2",
            pre="gpt-2",
            tokens=VOCABULARY,
            token_types=(*[1] * len(LETTERS), 3),
            merges=(),
            scores=(),
            bos=-1,
            eos=END_ID,
            unknown=-1,
            add_bos=False,
            add_space_prefix=False,
            chat_template=TEMPLATE,
            add_eos=add_eos,
        )
    )


@dataclass
class Harness:
    """The parts, for tests to reach into."""

    engine: Engine
    intake: Intake
    runner: FakeRunner
    text: TextModel
    clock: SimClock
    config: SchedulerConfig
    card: ModelCard
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    ids: itertools.count = field(default_factory=itertools.count)

    def submit(self, prompt: str = "hello", **fields) -> str:
        """Queue a request for a text prompt; unless told otherwise it ignores the model's end and is seeded."""
        return self.submit_request(request_of(f"request-{next(self.ids)}", self.text, prompt, **fields))

    def submit_request(self, one: EngineRequest) -> str:
        self.engine.submit(self.intake.resolve(one))
        self.outputs[one.id] = []
        return one.id

    def step(self) -> None:
        self.collect(self.engine.step())

    def collect(self, outputs) -> None:
        for request_id, output in outputs:
            self.outputs[request_id].append(output)

    def run(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine did not finish")

    def expected(self, prompt: str, count: int, seed: int = 7, choice: int = 0) -> tuple[int, ...]:
        ids = self.text.tokenizer.encode(prompt)
        return golden(ids, count, len(VOCABULARY), SamplingSpec((("seed", seed),)), choice)

    def spelled(self, tokens) -> str:
        return "".join(self.text.tokenizer.token_bytes(token).decode() for token in tokens if token != END_ID)


def request_of(request_id: str, text: TextModel, prompt: str, *, n: int = 1, seed: int = 7, **rules) -> EngineRequest:
    stop = StopRules(**{"max_tokens": 8, "ignore_eos": True, **rules})
    ids = text.tokenizer.encode(prompt)
    return EngineRequest(request_id, TokenPrompt(ids), n=n, sampling=SamplingSpec((("seed", seed),)), stop=stop)


class Unhurried:
    """A runner that takes its time, as real ones do: tests that act in the middle of a run need a middle."""

    def __init__(self, runner: FakeRunner, pause: float) -> None:
        self._runner = runner
        self._pause = pause

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(self._pause)
        return self._runner.run(plan)

    def reset(self) -> bool:
        return self._runner.reset()


class Scoring:
    """A fake runner, with scores for every prompt token that a row predicts: minus its index."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._prompts: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        self._prompts |= {a.slot: a.prompt_tokens * a.sampling.has("prompt_logprobs") for a in plan.admits}
        prompts = {}
        for row in plan.rows:
            places = range(row.start + 1, min(row.start + row.count + 1, self._prompts.get(row.slot, 0)))
            if places:
                scores = tuple(-float(place) for place in places)
                prompts[row.slot] = PromptScores(places[0], scores, (((2, -0.5),),) * len(scores), tuple(places))
        result = self._runner.run(plan)
        said = {row.slot: row for row in result.rows}
        rows = (said.get(row.slot, RowResult(row.slot)) for row in plan.rows)
        return replace(result, rows=tuple(row._replace(prompt=prompts.get(row.slot)) for row in rows))


def build(
    *,
    pause: float = 0.0,
    around: Callable[[FakeRunner], Runner] | None = None,
    record: Path | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    cache_events: CacheEvents | None = None,
    contract: AnswerContract | None = None,
    **scheduler,
) -> Harness:
    """The parts, joined; `around` may put another runner around the fake one, and a `contract` certifies answers."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        **{"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128, "weigh_drafts": False, **scheduler},
    )
    text, clock = text_model(), SimClock()
    runner = FakeRunner(config, vocab_size=len(VOCABULARY), clock=clock)
    recorder = Recorder(record, config) if record else NoRecorder()
    driven = around(runner) if around else Unhurried(runner, pause) if pause else runner
    made = Scheduler(config) if cache_events is None else Scheduler(config, CacheLog())
    certifying = None if contract is None else Certifying(contract, text)
    engine = Engine(made, driven, text, recorder, cache_events=cache_events, certifying=certifying)
    card = ModelCard("harness", 0, config.max_model_len, len(VOCABULARY), True)
    intake = Intake(text, card, DEFAULT_LIMITS, clock, lambda: 7, config.policy, certifying=certifying)
    return Harness(engine, intake, runner, text, clock, config, card)


def text_of(outputs: list[Output], choice: int = 0) -> str:
    return "".join(o.text for o in outputs if isinstance(o, ChoiceDelta) and o.choice == choice)


def tokens_of(outputs: list[Output], choice: int = 0) -> tuple[int, ...]:
    deltas = [o for o in outputs if isinstance(o, ChoiceDelta) and o.choice == choice]
    return tuple(piece.id for delta in deltas for piece in delta.tokens)


def finishes_of(outputs: list[Output]) -> list[ChoiceFinished]:
    return [o for o in outputs if isinstance(o, ChoiceFinished)]


def terminal_of(outputs: list[Output]) -> RequestFinished | RequestFailed:
    """The one terminal output, which must be the last."""
    ends = [o for o in outputs if isinstance(o, RequestFinished | RequestFailed)]
    assert len(ends) == 1
    assert outputs[-1] is ends[0]
    return ends[0]
