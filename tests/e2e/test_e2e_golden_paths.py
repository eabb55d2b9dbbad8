"""Every family through the real scheduler and runner: whatever way a request takes, it gets transformers' tokens.

One prompt alone, ragged prompts together, long prompts in chunks, prompts found in the prefix cache, and sequences that
are preempted and recomputed: the same greedy tokens, in float32.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from tiny_checkpoints import VARIANTS, load_model, reference_greedy, write_checkpoint, write_letters

from penstock import LLM, SamplingParams
from penstock.contract.clock import SystemClock
from penstock.contract.events import Admitted, Generated
from penstock.contract.plan import Admit
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import TorchRunner
from penstock.exec.state_store import StateStore
from penstock.nn.reference import ReferenceExecutor

COUNT, SHORT_COUNT = 64, 24
"""Tokens of an answer: in `make test-deep`, and in `make test`."""
GREEDY = SamplingSpec((("temperature", 0.0),))
IN_SHORT = ["gpt2", "llama", "gemma2", "phi3", "qwen3_moe", "gpt_oss", "lfm2", "qwen3_5_text"]
"""Families of every kind of attention, experts and states: what the others have, these have too."""

FAMILIES = [
    *(pytest.param((name, VARIANTS[name][0], SHORT_COUNT), id=f"{name}-in-short") for name in IN_SHORT),
    *(
        pytest.param((name, variant, COUNT), id=f"{name}-{variant}", marks=pytest.mark.deep)
        for name, variants in VARIANTS.items()
        for variant in variants
    ),
]
"""`make test` takes one checkpoint of some families, `make test-deep` every checkpoint of every family."""

WINDOWED = {
    ("mistral", "all_to_one_small_window"),
    ("mistral3", "all_to_one_small_window"),
    ("mixtral", "all_to_one_narrow_heads_small_window"),
    ("phi3", "partial_short_window"),
    ("qwen3_moe", "all_to_one_narrow_heads_window_dense_last"),
    ("starcoder2", "all_to_one_narrow_heads"),
    ("starcoder2", "wide_heads_tied_small_window"),
}
"""Those whose every layer has a window shorter than the longest sequence here."""


class Bench:
    """One scheduler and one runner over a model."""

    def __init__(
        self,
        model,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        tokens: int = 256,
        seqs: int = 8,
        window: int | None = None,
        caching: bool = True,
        checkpoints: int = 64,
        interval: int = 20,
        count: int = COUNT,
    ) -> None:
        longest = model.shape.max_positions if window else min(model.shape.max_positions, num_blocks * block_size)
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            max_model_len=longest,
            prefix_caching=caching,
            window=window,
            checkpoints=checkpoints if model.program.states else None,
            checkpoint_interval=interval - interval % block_size,
        )
        self.scheduler = Scheduler(self.config)
        self.kv = kv = KVStore(model.program.caches, num_blocks, block_size, torch.float32, torch.device("cpu"))
        for cache in (*kv.keys, *kv.values):
            cache.fill_(float("nan"))  # reading what was never written fails loudly
        states = StateStore(model.program.states, seqs, checkpoints, torch.device("cpu"))
        states.fill_with_nan()
        states = states if model.program.states else None
        self.runner = TorchRunner(model, kv, seqs, longest, SystemClock(), model.backend, states=states)
        self.count = count
        self.submitted = 0
        self.cached: dict[str, int] = {}
        self.resumed: list[tuple[int, int]] = []  # for each admission after a preemption: tokens, cached positions
        self.largest_row = 0

    def run(self, prompts: Sequence[Sequence[int]], preempt_before: Sequence[int] = ()) -> list[list[int]]:
        """Run all prompts at once; returns the tokens of each. The youngest is preempted before the given steps."""
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            name = str(self.submitted)
            self.submitted += 1
            answers[name] = []
            self.scheduler.submit(
                SequenceRequest(name, tuple(prompt), sampling=GREEDY, stop=StopRules(max_tokens=self.count))
            )
        while self.scheduler.has_work:
            if self.scheduler.stats.steps in preempt_before:
                self.scheduler._preempt(self.scheduler._running[-1])
            plan = self.scheduler.plan()
            self.resumed += [(len(each.tokens), each.computed) for each in plan.admits if self._has_output(each)]
            self.largest_row = max([self.largest_row, *(row.count for row in plan.rows)])
            for event in self.scheduler.commit(plan, self.runner.run(plan)):
                if isinstance(event, Generated):
                    answers[event.seq_id].append(event.token)
                elif isinstance(event, Admitted):
                    self.cached[event.seq_id] = event.cached
            if self.config.window:
                self._spoil_free_blocks()
        self.scheduler.check()
        return list(answers.values())

    @staticmethod
    def _has_output(admit: Admit) -> bool:
        return len(admit.tokens) > admit.prompt_tokens

    def _spoil_free_blocks(self) -> None:
        """Let reading a block that was given back fail loudly."""
        free = self.scheduler._pool._free
        for cache in (*self.kv.keys, *self.kv.values):
            cache[free] = float("nan")


def draw_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Golden:
    """A model, prompts of four lengths that fit its context beside the answer, and the answers that each gets alone."""

    model: ReferenceExecutor
    prompts: list[list[int]]
    answers: list[list[int]]
    theirs: list[list[int]]
    count: int

    def bench(self, **options) -> Bench:
        return Bench(self.model, count=self.count, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, tmp_path_factory) -> Golden:
    family, variant, count = request.param
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, variant)
    model = load_model(directory)
    room = model.shape.max_positions - count
    prompts = draw_prompts(model.shape.vocab_size, [min(length, room) for length in (1, 7, 16, 90)])
    answers = [Bench(model, count=count).run([prompt])[0] for prompt in prompts]
    theirs = [reference_greedy(directory, *each) for each in zip(prompts, answers, strict=True)]
    return Golden(model, prompts, answers, theirs, count)


def test_alone(golden):
    assert [len(answer) for answer in golden.answers] == [golden.count] * 4
    assert golden.answers == golden.theirs


def test_together_and_ragged(golden):
    assert golden.bench(block_size=5).run(golden.prompts) == golden.answers


def test_in_chunks_mixed_with_decoding(golden):
    bench = golden.bench(tokens=6, seqs=4)
    assert bench.run(golden.prompts) == golden.answers
    assert bench.largest_row <= 6


def test_after_a_prefix_hit(golden):
    bench = golden.bench(block_size=4)
    bench.run(golden.prompts)
    assert bench.run(golden.prompts) == golden.answers
    for name, prompt in enumerate(golden.prompts):
        hit = bench.cached[str(len(golden.prompts) + name)]
        assert hit == (len(prompt) - 1) // 4 * 4


def test_after_forced_preemption(golden):
    longest = max(len(prompt) for prompt in golden.prompts) + golden.count
    bench = golden.bench(num_blocks=longest // 4 + 6, block_size=4)
    assert bench.run(golden.prompts * 2) == golden.answers * 2
    assert bench.scheduler.stats.preemptions > 0


def test_after_a_hit_in_the_middle_of_a_checkpoint_interval(golden):
    """A turn is edited: the state is that of the last checkpoint before it; the next time, of the branch itself."""
    long, tail = golden.prompts[-1], golden.prompts[-1][50:]
    changed = [*long[:45], *tail]
    whole = golden.bench().run([changed])
    bench = golden.bench(block_size=4, interval=16)
    assert bench.run([long]) == golden.answers[-1:]
    assert bench.run([changed]) == whole
    assert bench.cached["1"] == (32 if golden.model.program.states else 44)
    assert bench.run([changed]) == whole
    assert bench.cached["2"] == (len(changed) - 1) // 4 * 4


def test_whether_all_layers_forget_is_known_of_every_model(golden, request):
    window = golden.model.program.window
    forgets = window is not None and window < len(golden.prompts[-1]) + golden.count
    assert forgets == (request.node.callspec.params["golden"][:2] in WINDOWED)


@pytest.mark.parametrize("golden", [each for each in FAMILIES if each.values[0][:2] in WINDOWED], indirect=True)
def test_with_only_the_blocks_that_a_window_sees(golden):
    """Blocks that were left behind are given back, and overwritten with NaN here."""
    options = {"block_size": 4, "tokens": 8, "seqs": 1, "window": golden.model.program.window, "caching": False}
    need = golden.bench(**options).config.most_blocks(golden.model.shape.max_positions)
    assert need < (len(golden.prompts[-1]) + golden.count) // 4
    bench = golden.bench(num_blocks=need, **options)
    assert [bench.run([prompt])[0] for prompt in golden.prompts] == golden.answers
    assert bench.scheduler.stats.preemptions == 0


def test_a_preempted_request_goes_on_from_its_last_window(tmp_path):
    """What its window left is gone and overwritten; yet only the block that it was filling is computed anew."""
    directory = write_checkpoint(tmp_path, "mistral", "all_to_one_small_window", sliding_window=21)
    model = load_model(directory)
    assert model.program.window == 21
    prompt = draw_prompts(model.shape.vocab_size, [90])[0]
    bench = Bench(model, num_blocks=10, block_size=4, tokens=16, seqs=1, window=21)
    steps = range(4, 40, 3)  # in the prompt's chunks, and at every place in a block
    [answer] = bench.run([prompt], steps)
    assert len(answer) == COUNT
    assert answer == reference_greedy(directory, prompt, answer)
    assert bench.scheduler.stats.preemptions == len(steps)
    assert len(bench.resumed) > 8
    assert bench.resumed == [(known, (known - 1) // 4 * 4) for known, _ in bench.resumed]


def test_a_request_may_be_longer_than_the_cache_where_every_layer_has_a_window(tmp_path):
    directory = write_checkpoint(tmp_path, "mistral", "all_to_one_small_window", sliding_window=21)
    write_letters(directory, 101)
    options = {"dtype": "float32", "threads": 1, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=0)
    prompts = [list(range(5, 60)), list(range(60, 3, -1))]
    answers = []
    for memory in (1_000_000, 40_000):
        with LLM(str(directory), kv_cache_memory=memory, **options) as llm:
            assert llm.card.max_model_len == 512
            answers.append([answer.outputs[0] for answer in llm.generate(prompts, params, use_tqdm=False)])
            tokens = llm.scheduler.config.num_blocks * 4
            assert (tokens > 2 * 175) is (memory == 1_000_000)
    assert tokens < 175
    assert answers[0] == answers[1]
