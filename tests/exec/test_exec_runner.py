"""The runner on a small transformer: however a sequence is run, its tokens are those it has when run alone.

A driver in place of the scheduler makes plans: it scatters blocks, chunks prompts, lets sequences join late, preempts
them and gives their slots and blocks to others. The golden is the same model with dense attention, one token at a time.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field

import pytest
import torch

from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.contract.plan import Admit, Row, StepPlan
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import TorchRunner
from penstock.exec.sampler import RowSampling, sample
from penstock.kernels import native
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.torch_backend import TorchBackend
from penstock.nn.dense import DenseAttention
from penstock.sampling import SamplingParams

SHAPE = ModelShape(
    num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, head_dim=5, vocab_size=97, max_positions=64
)
CPU = torch.device("cpu")
BACKEND = CpuBackend() if native.available() else TorchBackend()
CACHES = (KvCacheSpec(SHAPE.num_kv_heads, SHAPE.head_dim),) * SHAPE.num_layers
ATTENTION = AttentionSpec(SHAPE.head_dim**-0.5)


class ToyLM:
    """Two layers of grouped attention and a nonlinearity, with weights large enough that every token matters."""

    shape = SHAPE

    def __init__(self, poison=None):
        generator = torch.Generator().manual_seed(1)
        wide = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
        make = lambda *size: torch.randn(*size, generator=generator) / size[-1] ** 0.5  # noqa: E731
        self.embedding = make(SHAPE.vocab_size, SHAPE.hidden_size) * 4
        self.positions = make(SHAPE.max_positions, SHAPE.hidden_size) * 4
        self.qkv = [make(wide, SHAPE.hidden_size) * 2 for _ in range(SHAPE.num_layers)]
        self.out = [make(SHAPE.hidden_size, SHAPE.num_heads * SHAPE.head_dim) * 2 for _ in range(SHAPE.num_layers)]
        self.head = make(SHAPE.vocab_size, SHAPE.hidden_size) * 3
        self.poison = poison
        self.logit_rows = []

    def forward(self, token_ids, positions, attend, adapted=()):
        x = self.embedding[token_ids] + self.positions[positions]
        if self.poison is not None:
            x = x.masked_fill((token_ids == self.poison)[:, None], float("nan"))
        for layer in range(SHAPE.num_layers):
            heads = (x @ self.qkv[layer].T).view(len(x), -1, SHAPE.head_dim)
            q, k, v = heads.split((SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads), dim=1)
            x = x + torch.tanh(attend(layer, q, k, v, ATTENTION).flatten(1) @ self.out[layer].T)
        return x

    def logits(self, hidden):
        self.logit_rows.append(len(hidden))
        return hidden @ self.head.T


class Ticks:
    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 0.25
        return self.time


@dataclass
class Job:
    prompt: list[int]
    new: int
    params: SamplingParams
    choice: int = 0
    arrives: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    failure: str = ""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def known(self):
        return [*self.prompt, *self.tokens]

    @property
    def done(self):
        return bool(self.failure) or len(self.tokens) == self.new


def make_runner(model=None, block_size=4, num_blocks=64, slots=4, fill=float("nan")):
    kv = KVStore(CACHES, num_blocks, block_size, torch.float32, CPU)
    for cache in (*kv.keys, *kv.values):
        cache.fill_(fill)  # what memory holds before it is written must not matter
    return TorchRunner(model or ToyLM(), kv, slots, SHAPE.max_positions, Ticks(), BACKEND), kv


def drive(jobs, *, block_size=4, chunk=64, slots=4, preempt=(), model=None, seed=0):
    """Run all `jobs` to their end; at the steps in `preempt` the youngest running one loses its slot and blocks."""
    num_blocks = 16 + 160 // block_size  # few enough that blocks are used again
    runner, _ = make_runner(model, block_size, num_blocks, slots)
    order = random.Random(seed)
    free_blocks, free_slots, releases = list(range(num_blocks)), list(range(slots)), []
    order.shuffle(free_blocks)
    waiting, running = list(jobs), []

    def give_back(job):
        releases.append(job.slot)
        free_slots.append(job.slot)
        free_blocks.extend(job.blocks)
        order.shuffle(free_blocks)
        running.remove(job)

    def take_blocks(job, end):
        new = [free_blocks.pop() for _ in range(-(-end // block_size) - len(job.blocks))]
        job.blocks.extend(new)
        return tuple(new)

    step = 0
    while waiting or running:
        if step in preempt and running:
            victim = running[-1]
            give_back(victim)
            waiting.append(victim)
        admits = []
        for job in [job for job in waiting if job.arrives <= step]:
            if free_slots:
                waiting.remove(job)
                running.append(job)
                job.slot, job.computed, job.blocks = free_slots.pop(), 0, []
                first = take_blocks(job, min(chunk, len(job.known)))
                spec = job.params.spec()
                admits.append(Admit(job.slot, "job", tuple(job.known), first, 0, spec, job.choice))
        rows = []
        for job in running:
            count = min(chunk, len(job.known) - job.computed)
            end = job.computed + count
            rows.append(Row(job.slot, job.computed, count, take_blocks(job, end), end == len(job.known)))
            job.computed = end
        result = runner.run(StepPlan(step, tuple(releases), tuple(admits), tuple(rows)))
        releases.clear()
        assert result.step == step
        by_slot = {job.slot: job for job in running}
        assert [each.slot for each in result.rows] == [row.slot for row in rows if row.sample]
        for each in result.rows:
            by_slot[each.slot].failure = each.failure
            by_slot[each.slot].tokens += [token.id for token in each.tokens]
            by_slot[each.slot].logprobs += [token.logprob for token in each.tokens]
        for job in [job for job in running if job.done]:
            give_back(job)
        step += 1
        assert step < 1000
    return [job.tokens for job in jobs]


def golden(job):
    """Dense attention, one sequence, one token at a time."""
    model, attend, tokens = ToyLM(), DenseAttention(), list(job.prompt)
    draw = RowSampling.of(job.params.spec(), job.choice)
    hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    for _ in range(job.new):
        token = sample(model.logits(hidden[-1:]), [draw], [len(tokens)], choose=BACKEND.choose).tokens[0]
        hidden = model.forward(torch.tensor([token]), torch.tensor([len(tokens)]), attend)
        tokens.append(token)
    return tokens[len(job.prompt) :]


def drawn(result):
    """The tokens of all rows."""
    return [token.id for row in result.rows for token in row.tokens]


def make_jobs():
    words = random.Random(5)
    prompt = lambda length: [words.randrange(SHAPE.vocab_size) for _ in range(length)]  # noqa: E731
    return [
        Job(prompt(1), 9, SamplingParams(temperature=0)),
        Job(prompt(17), 12, SamplingParams(temperature=0, logprobs=0)),
        Job(prompt(8), 10, SamplingParams(seed=11, logprobs=0), arrives=1),
        Job(prompt(30), 15, SamplingParams(seed=-3, temperature=1.4, top_k=20, top_p=0.95), choice=2, arrives=3),
        Job(prompt(5), 7, SamplingParams(seed=11, temperature=0.8, min_p=0.05), arrives=4),
        Job(prompt(20), 8, SamplingParams(temperature=0), arrives=4),
    ]


GOLDEN = [golden(job) for job in make_jobs()]


def test_the_golden_depends_on_every_part_of_the_past():
    job = make_jobs()[1]
    assert len(set(GOLDEN[1])) > 4
    job.prompt[0] += 1
    assert golden(job) != GOLDEN[1]


def test_sequences_run_alone_give_the_golden_tokens():
    assert [drive([job])[0] for job in make_jobs()] == GOLDEN


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_sequences_run_together_give_the_golden_tokens_for_any_block_and_chunk_size(block_size, chunk):
    assert drive(make_jobs(), block_size=block_size, chunk=chunk) == GOLDEN


@pytest.mark.parametrize("seed", range(5))
def test_preempted_sequences_give_the_golden_tokens(seed):
    steps = random.Random(seed).sample(range(2, 40), 10)
    assert drive(make_jobs(), chunk=6, preempt=steps, seed=seed) == GOLDEN


def test_logprobs_come_to_those_who_asked_and_do_not_depend_on_the_batch():
    together, alone = make_jobs(), make_jobs()
    drive(together, chunk=5)
    for job in alone:
        drive([job])
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        asked = one.params.logprobs is not None
        assert all((logprob < 0) == asked for logprob in one.logprobs)


def test_a_prefix_computed_by_another_sequence_serves_a_later_one():
    prompt = make_jobs()[3].prompt
    runner, _ = make_runner(block_size=4)
    spec = SamplingParams(temperature=0).spec()
    blocks = (9, 2, 30, 7, 11, 40, 1, 5)
    runner.run(StepPlan(0, (), (Admit(0, "a", tuple(prompt), blocks, 0, spec, 0),), (Row(0, 0, 30, (), True),)))
    # The second sequence shares 7 full blocks, and has one of its own; the first goes on in the same step.
    shared = Admit(1, "b", tuple(prompt), (*blocks[:7], 33), 28, spec, 0)
    rows = (Row(0, 30, 1, (), True), Row(1, 28, 2, (), True))
    result = runner.run(StepPlan(1, (), (shared,), rows))
    job = Job(prompt, 2, SamplingParams(temperature=0))
    assert drawn(result) == [golden(job)[1], golden(job)[0]]


def test_a_row_that_is_not_finite_fails_alone_and_its_slot_and_blocks_serve_others():
    poison = 96
    jobs = [job for job in make_jobs() if poison not in job.prompt]
    expected = [tokens for tokens, job in zip(GOLDEN, make_jobs(), strict=True) if poison not in job.prompt]
    assert all(poison not in tokens for tokens in expected)
    bad = [Job([1, poison, 3], 5, SamplingParams(temperature=0), arrives=step) for step in (0, 2)]
    late = Job(jobs[1].prompt, 12, SamplingParams(temperature=0), arrives=5)
    together = [jobs[0], bad[0], *jobs[1:], bad[1], late]
    drive(together, model=ToyLM(poison), slots=3, chunk=9)
    assert [job.tokens for job in jobs] == expected
    assert all(job.tokens == [] and "not finite" in job.failure for job in bad)
    assert late.tokens == jobs[1].tokens


def test_a_plan_without_rows_is_a_step_with_nothing_in_it():
    runner, _ = make_runner()
    result = runner.run(StepPlan(7, (), (), ()))
    assert (result.step, result.rows) == (7, ())
    assert result.seconds == 0.25


def test_logits_are_computed_for_sampling_rows_only():
    model = ToyLM()
    runner, _ = make_runner(model)
    spec = SamplingParams(temperature=0).spec()
    admits = tuple(Admit(slot, "x", (1, 2, 3, 4), (slot,), 0, spec, 0) for slot in range(3))
    rows = (Row(0, 0, 4, (), True), Row(1, 0, 2, (), False), Row(2, 0, 4, (), True))
    assert len(drawn(runner.run(StepPlan(0, (), admits, rows)))) == 2
    assert runner.run(StepPlan(1, (), (), (Row(1, 2, 1, (), False),))).rows == ()
    assert model.logit_rows == [2]


def test_warming_up_leaves_no_trace():
    prompt = tuple(make_jobs()[1].prompt)
    runner, kv = make_runner(fill=0.5)
    spec = SamplingParams(temperature=0).spec()
    runner.run(StepPlan(0, (), (Admit(0, "a", prompt, (3, 0, 1, 2, 4), 0, spec, 0),), (Row(0, 0, 17, (), True),)))
    before = [cache.clone() for cache in (*kv.keys, *kv.values)]
    runner.warm_up()
    assert all(torch.equal(a, b) for a, b in zip(before, (*kv.keys, *kv.values), strict=True))
    assert drawn(runner.run(StepPlan(1, (), (), (Row(0, 17, 1, (), True),)))) == [GOLDEN[1][1]]


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_warming_up_works_for_any_block_size_and_before_the_first_step(block_size):
    runner, kv = make_runner(block_size=block_size, fill=0.5)
    runner.warm_up()
    assert all(bool((cache == 0.5).all()) for cache in (*kv.keys, *kv.values))
    job = make_jobs()[0]
    admit = Admit(0, "a", tuple(job.prompt), (5,), 0, job.params.spec(), 0)
    assert drawn(runner.run(StepPlan(0, (), (admit,), (Row(0, 0, 1, (), True),)))) == [GOLDEN[0][0]]


def test_the_last_token_of_a_full_context_is_sampled_and_never_computed():
    runner, _ = make_runner(block_size=16)
    prompt = tuple(range(SHAPE.max_positions))
    spec = SamplingParams(temperature=0).spec()
    admit = Admit(0, "a", prompt, (0, 1, 2, 3), 0, spec, 0)
    row = Row(0, 0, SHAPE.max_positions, (), True)
    assert len(drawn(runner.run(StepPlan(0, (), (admit,), (row,))))) == 1
    runner.run(StepPlan(1, (0,), (), ()))


SPEC = SamplingParams(temperature=0).spec()
GOOD = Admit(0, "a", (1, 2, 3), (0,), 0, SPEC, 0)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(0, (0,), (), ()),  # releases nothing
        StepPlan(0, (), (GOOD, GOOD), ()),  # slot taken
        StepPlan(0, (), (Admit(0, "a", (1,), (0,), 1, SPEC, 0),), ()),  # nothing left to compute
        StepPlan(0, (), (), (Row(0, 0, 1, (), True),)),  # row of an empty slot
        StepPlan(0, (), (GOOD,), (Row(0, 1, 2, (), True),)),  # skips a position
        StepPlan(0, (), (GOOD,), (Row(0, 0, 4, (), True),)),  # beyond the known tokens
        StepPlan(0, (), (GOOD,), (Row(0, 0, 0, (), False),)),  # computes nothing
        StepPlan(0, (), (GOOD,), (Row(0, 0, 2, (), True),)),  # samples too early
        StepPlan(0, (), (GOOD,), (Row(0, 0, 3, (), False),)),  # does not sample
        StepPlan(0, (), (Admit(0, "a", (1,) * 5, (0,), 0, SPEC, 0),), (Row(0, 0, 5, (), True),)),  # lacks a block
    ],
    ids=lambda plan: json.dumps(asdict(plan)["rows"], default=bytes.hex)[:40],
)
def test_an_impossible_plan_is_our_bug_and_stops_the_step(plan):
    runner, _ = make_runner(block_size=4)
    with pytest.raises(AssertionError):
        runner.run(plan)
