"""Steps of the real runner that raise, before or after they were computed: no other answer changes by a bit.

Only the request that makes steps fail ends.
"""

from __future__ import annotations

import pytest
from tiny_checkpoints import write_checkpoint, write_letters

from penstock import LLM, SamplingParams
from penstock.exec.runner import TorchRunner

POISON = [66, 6, 66]
PROMPTS = [[8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [30, 31, 32], [10, 11, 12, 13, 14, 15, 16, 17, 5], [7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(seed=3, max_tokens=25, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
    SamplingParams(seed=4, n=2, max_tokens=15, ignore_eos=True, logprobs=0, prompt_logprobs=1),
    SamplingParams(seed=5, max_tokens=20, min_tokens=10, frequency_penalty=0.5),
    SamplingParams(seed=6, max_tokens=30, stop=["q", "zz"]),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("failed-steps"), "llama", "wide_heads_untied")
    write_letters(directory, 101)
    # Without guesses, so that the number of steps is the same each time.
    options = {
        "speculate": False,
        "dtype": "float32",
        "threads": 1,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    with LLM(str(directory), kv_cache_memory=200_000, **options) as llm:
        yield llm


class FailingSteps:
    """Stands in for `TorchRunner.run`: raises in step number `at`, and in each step with a row of the poison."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int = 0) -> None:
        self.run, self.at = TorchRunner.run, at
        self.steps = self.failed = 0
        self.poisoned: set[int] = set()
        patch.setattr(TorchRunner, "run", lambda runner, plan: self.step(runner, plan))

    def step(self, runner, plan):
        self.steps += 1
        self.poisoned -= set(plan.releases)
        self.poisoned |= {admit.slot for admit in plan.admits if list(admit.tokens[:3]) == POISON}
        late = self.steps % 2 == 0
        result = self.run(runner, plan) if late else None
        if self.steps == self.at or any(row.slot in self.poisoned for row in plan.rows):
            self.failed += 1
            self.poisoned.clear()
            raise MemoryError("planted")
        return result or self.run(runner, plan)


def facts(output):
    choices = [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.outputs]
    return choices, output.prompt_logprobs, output.error


def answers(llm, prompts, params):
    return [facts(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_step_that_fails_changes_no_answer(llm, monkeypatch):
    undisturbed = answers(llm, PROMPTS, PARAMS)
    for at in (1, 2, 5, 8, 13, 20, 31):
        with monkeypatch.context() as patch:
            broken = FailingSteps(patch, at)
            assert answers(llm, PROMPTS, PARAMS) == undisturbed, at
        assert broken.failed == 1
        llm.scheduler.check()
        assert llm.scheduler.stats.free_blocks == llm.scheduler.stats.total_blocks


def test_who_makes_steps_fail_ends_and_nobody_else(llm, monkeypatch):
    undisturbed = answers(llm, PROMPTS, PARAMS)
    broken = FailingSteps(monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    numbers = [llm.add_request(POISON, greedy)] + [
        llm.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    found = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step() if output.finished}
    poisoned, *others = (found[number] for number in numbers)
    assert "step fail" in poisoned.error
    assert [facts(each) for each in others] == undisturbed
    assert broken.failed == 2
    assert llm.scheduler.stats.free_blocks == llm.scheduler.stats.total_blocks
