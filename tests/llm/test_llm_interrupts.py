"""Ctrl-C at any line of a batch: the batch is aborted, other requests go on, and the next batch's answers are right."""

from __future__ import annotations

import signal
import sys

import pytest
from tiny_checkpoints import write_checkpoint, write_letters

from penstock import LLM, SamplingParams

MINE = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=1)
OTHERS = SamplingParams(seed=5, max_tokens=4, ignore_eos=True)
PROMPTS = [[8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [30, 31, 32]]


@pytest.fixture(scope="module", params=["auto", "torch"])
def llm(request, tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("interrupts"), "llama", "wide_heads_untied")
    write_letters(directory, 101)
    options = {"dtype": "float32", "threads": 1, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("penstock.exec.device.native.available", lambda: False)
        with LLM(str(directory), kv_cache_memory=200_000, **options) as llm:
            yield llm


class InterruptAt:
    """Presses Ctrl-C at the `number`th line of Penstock that runs."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if "/penstock/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace


def finish(llm, request_id):
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.request_id == request_id and output.finished:
                return output.outputs[0]
    raise AssertionError("the request never finished")


def facts(answer):
    """What must be the same; a log probability only nearly, as torch's kernels round by what else is in the batch."""
    return answer.token_ids, answer.text, answer.finish_reason, round(answer.cumulative_logprob or 0.0, 3)


@pytest.mark.one_in(2)
def test_ctrl_c_at_any_line_breaks_nothing(llm):
    alone = facts(finish(llm, llm.add_request([5, 6, 7], MINE)))
    answers = [facts(answer.outputs[0]) for answer in llm.generate(PROMPTS, OTHERS, use_tqdm=False)]
    interrupted, line, stride = 0, 1, 211  # a prime, so that every part of a step is hit in some batch
    while True:
        mine = llm.add_request([5, 6, 7], MINE)
        watch = InterruptAt(line)
        try:
            with watch:
                llm.generate(PROMPTS, OTHERS, use_tqdm=False)
        except KeyboardInterrupt:
            interrupted += 1
        assert facts(finish(llm, mine)) == alone, f"line {line}"
        llm.scheduler.check()
        assert not llm.has_unfinished_requests(), f"line {line}: a request was left behind"
        assert llm.scheduler.stats.free_blocks == llm.scheduler.stats.total_blocks
        if watch.left > 0:
            break
        line += stride
    assert interrupted > 20
    again = [facts(answer.outputs[0]) for answer in llm.generate(PROMPTS, OTHERS, use_tqdm=False)]
    assert again == answers
