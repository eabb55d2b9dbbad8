"""A draft model within the runner: every event is as without one; a model that guesses for itself is right.

Whatever it has not computed is NaN in its memory, and a draw from NaN is no guess: so guesses that are all right prove
that it caught up with prompts that were cached, with blocks that were handed out again, and behind its own mistakes.
"""

from __future__ import annotations

import pytest
import torch
from test_exec_drafts import CONFIG, Budgets, Grammars, requests, same
from test_exec_runner import BACKEND, CACHES, CPU, SHAPE, Ticks, ToyLM

from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.events import DraftsJudged, Generated
from penstock.contract.plan import Admit, Row, StepPlan
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.core.draft_chances import MODEL
from penstock.exec.draft_model import DraftModel
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import TorchRunner
from penstock.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0).spec()
DRAWN = SamplingParams(temperature=1.2, seed=4, top_p=0.95).spec()


class OtherLM(ToyLM):
    """Agrees with the toy now and then, and has another vocabulary's width."""

    def __init__(self, width: int = SHAPE.vocab_size) -> None:
        super().__init__()
        self.qkv = [weight.roll(1, 0) for weight in self.qkv]
        self.width = width

    def logits(self, hidden):
        logits = super().logits(hidden)
        if self.width <= logits.shape[1]:
            return logits[:, : self.width].contiguous()
        return torch.cat((logits, torch.full((len(logits), self.width - logits.shape[1]), 100.0)), 1)


def store(config: SchedulerConfig) -> KVStore:
    kv = KVStore(CACHES, config.num_blocks, config.block_size, torch.float32, CPU)
    kv.fill_with_nan()
    return kv


def runner_of(config: SchedulerConfig, draft=None) -> TorchRunner:
    sizes = config.max_num_seqs, SHAPE.max_positions
    drafter, clock = None, Ticks()
    if draft is not None:
        drafter = DraftModel(draft, store(config), *sizes, SHAPE.vocab_size, BACKEND, clock)
    return TorchRunner(ToyLM(), store(config), *sizes, clock, BACKEND, Grammars(), Budgets(), drafter=drafter)


class Bench:
    """A scheduler over a runner, and the events of its requests."""

    def __init__(self, config: SchedulerConfig, draft=None) -> None:
        self.scheduler, self.runner = Scheduler(config), runner_of(config, draft)
        self.events = {}
        self.judged: list[DraftsJudged] = []
        self.plans: list[StepPlan] = []
        self.results = []

    def step(self) -> None:
        self.plans.append(self.scheduler.plan())
        self.results.append(self.runner.run(self.plans[-1]))
        for event in self.scheduler.commit(self.plans[-1], self.results[-1]):
            if isinstance(event, DraftsJudged):
                self.judged.append(event)
            else:
                self.events.setdefault(event.seq_id, []).append(event)
        self.scheduler.check()

    def serve(self, *asked: SequenceRequest) -> None:
        for request in asked:
            self.scheduler.submit(request)
        while self.scheduler.has_work:
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [event.token for event in self.events[name] if isinstance(event, Generated)]

    @property
    def right(self) -> tuple[int, int]:
        return sum(each.right for each in self.judged), sum(each.drafts for each in self.judged)


def with_model(**options) -> SchedulerConfig:
    values = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    return SchedulerConfig(**{**values, "draft_context": SHAPE.max_positions, **options})


def request(name: str, prompt, spec=GREEDY, count=20) -> SequenceRequest:
    return SequenceRequest(name, tuple(prompt), sampling=spec, stop=StopRules(max_tokens=count))


@pytest.fixture(scope="module")
def plain() -> Bench:
    bench = Bench(CONFIG)
    bench.serve(*requests())
    return bench


@pytest.mark.parametrize("draft", [ToyLM, OtherLM, lambda: OtherLM(90), lambda: OtherLM(120)])
@pytest.mark.parametrize("blocks", [140, 24])
def test_every_kind_of_row_says_what_it_says_without_a_draft_model(plain, draft, blocks):
    """With few blocks sequences are preempted, and their blocks handed out again."""
    bench = Bench(with_model(num_blocks=blocks), draft())
    bench.serve(*requests())
    same(bench.events, plain.events)
    assert 0 < bench.right[0] <= bench.right[1]
    assert {each.drafter for each in bench.judged} == {MODEL}
    assert (bench.scheduler.stats.preemptions > 0) == (blocks == 24)


@pytest.mark.parametrize("spec", [GREEDY, DRAWN])
@pytest.mark.parametrize("blocks", [140, 30])
def test_a_model_that_guesses_for_itself_is_always_right(spec, blocks):
    """Drawn tokens too: the guess is drawn with the random number of its place."""
    bench = Bench(with_model(num_blocks=blocks), ToyLM())
    bench.serve(*(request(f"r{n}", range(n, n + 9), spec) for n in range(6)))
    assert bench.right[0] == bench.right[1] > 40
    assert (bench.scheduler.stats.preemptions > 0) == (blocks == 30)


def test_it_catches_up_with_a_prompt_in_parts_and_knows_blocks_that_were_followed():
    bench = Bench(with_model(max_num_batched_tokens=12), ToyLM())
    prompt = range(10, 40)
    bench.serve(request("first", prompt))
    orders = [row.follow for plan in bench.plans for row in plan.rows if row.follow]
    assert orders[:3] == [12, 12, 10], "the prompt, what was drawn before and meanwhile, and one token more"
    before = len(bench.results)
    bench.serve(request("again", (*prompt, 3, 4)))
    lags = [row.lag for result in bench.results[before:] for row in result.rows if row.lag >= 0]
    assert lags[0] <= CONFIG.block_size + 4, "whole blocks of the prompt are its own already"
    assert bench.right[0] == bench.right[1] > 20


def test_a_block_that_is_computed_anew_is_not_taken_for_what_it_was():
    """Its owner is gone, and another prompt is written into the same blocks: the draft model starts from nothing."""
    bench = Bench(with_model(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=24), ToyLM())
    bench.serve(request("first", range(20), count=8))
    before = len(bench.results)
    bench.serve(request("second", range(50, 70), count=8))
    lags = [row.lag for result in bench.results[before:] for row in result.rows if row.lag >= 0]
    assert lags[0] == 21
    assert bench.right[0] == bench.right[1]


def test_guesses_end_with_the_draft_models_context():
    bench = Bench(with_model(draft_context=24), ToyLM())
    bench.serve(request("a", range(10), count=40))
    ends = [row.start + row.count + row.guesses for plan in bench.plans for row in plan.rows if row.guesses]
    assert max(ends) == 24
    assert len(bench.tokens("a")) == 40


def test_a_reset_forgets_sequences_and_keeps_what_was_followed():
    bench = Bench(with_model(), ToyLM())
    bench.scheduler.submit(request("a", range(12), count=20))
    for _ in range(5):
        bench.step()
    bench.runner.reset()
    bench.scheduler.drop_in_flight()
    bench.serve()
    assert bench.right[0] == bench.right[1] > 8
    assert len(bench.tokens("a")) == 20


def test_embeddings_beside_it_are_none_of_its():
    config = with_model()
    runner = runner_of(config, ToyLM())
    admit = Admit(0, "e", (1, 2, 3), (0,), 0, SamplingParams().spec(), 0, embedding=EmbeddingSpec())
    result = runner.run(StepPlan(0, (), (admit,), (Row(0, 0, 3, (), False),)))
    assert result.rows[0].embedding is not None
    runner.run(StepPlan(1, (0,), (), ()))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_warming_up_leaves_its_memory_as_it_was(block_size):
    config = with_model(block_size=block_size, num_blocks=40)
    runner = runner_of(config, ToyLM())
    runner.warm_up()
    assert all(cache.isnan().all() for cache in (*runner._drafter.kv.keys, *runner._drafter.kv.values))
    assert not runner._drafter._whole.any()


def test_time_of_guesses_is_told_apart():
    bench = Bench(with_model(), ToyLM())
    bench.serve(request("a", range(6), count=12))
    work = [result.guessing for result in bench.results]
    assert work[0].passes == 0, "how far it is behind is said first"
    assert work[1].passes >= 1
    assert all(0 < each.seconds < result.seconds for each, result in zip(work, bench.results, strict=True))
