"""The rooms as a whole: what may be imported without torch, and that nothing is global."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import LLM, SamplingParams
from penstock.contract.errors import RequestError


def test_rooms_without_tensors_load_neither_torch_nor_numpy():
    rooms = ["contract", "sampling", "core", "sim", "text", "engine", "server", "cli", "llm.prompts", "weights"]
    code = "".join(f"import penstock.{room}\n" for room in rooms)
    code += "import sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.model
def test_two_engines_in_one_process_do_not_know_each_other(default_model):
    params = SamplingParams(temperature=0, max_tokens=12)
    options = {"kv_cache_memory": 50_000_000}
    with LLM(str(default_model), **options) as one, LLM(str(default_model), **options, block_size=8) as other:
        ids = [llm.add_request("The capital of France is", params) for llm in (one, other)]
        assert ids == ["0", "0"]
        texts: dict[int, str] = {}
        while one.has_unfinished_requests() or other.has_unfinished_requests():
            for index, llm in enumerate((one, other)):
                for output in llm.step():
                    texts[index] = output.outputs[0].text
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]


@pytest.mark.model
def test_the_library_generates_in_order_with_one_or_many_params(default_model):
    with LLM(str(default_model), kv_cache_memory=50_000_000) as llm:
        prompts = ["One, two, three,", [1, 2, 3], {"prompt": "Monday, Tuesday, Wednesday, Thursday,"}]
        params = [SamplingParams(temperature=0, max_tokens=count) for count in (3, 5, 4)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5, 4]
        assert outputs[1].prompt is None
        assert outputs[1].prompt_token_ids == [1, 2, 3]
        assert "Friday" in outputs[2].outputs[0].text
        again = llm.generate(prompts[0], params[0], use_tqdm=False)
        assert again[0].outputs[0].text == outputs[0].outputs[0].text


@pytest.mark.model
def test_requests_stepped_by_hand_survive_a_batch_and_a_refused_batch_leaves_nothing(default_model):
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(str(default_model), kv_cache_memory=50_000_000) as llm:
        mine = llm.add_request("One, two, three,", params)
        with pytest.raises(RequestError):
            llm.generate(["fine", [999_999]], params, use_tqdm=False)
        assert llm.scheduler.num_waiting == 1
        llm.generate("Monday,", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        [output] = llm.step()  # what happened to it meanwhile
        assert (output.request_id, output.finished, len(output.outputs[0].token_ids)) == (mine, True, 6)
        assert not llm.has_unfinished_requests()
        assert llm.step() == []
