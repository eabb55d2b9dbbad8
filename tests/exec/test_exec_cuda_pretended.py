"""Whole models on a pretended CUDA device: no tensor of the host is mixed with the device's, whatever runs.

The numbers are the CPU's, except for rounding, and so are the answers.
"""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import MixedDevices, Pretended, pretend_cuda
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import VARIANTS, write_lettered

from penstock import LLM, SamplingParams
from penstock.exec import device as room

PROMPTS = [[5, 9, 7, 11, 4, 8, 6], [5, 9, 7, 11, 4, 8, 6, 12, 10, 5, 7, 9, 4, 4], [8], [9, 9, 5] * 9]
OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory": 1 << 22,
    "max_model_len": 128,
    "max_num_batched_tokens": 24,
    "block_size": 8,
    "max_num_seqs": 3,
    "threads": 1,
    "kv_store": "off",
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "likely ones": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "drawn": {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 1},
    "by what came before": {
        "temperature": 0.8,
        "seed": 4,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.1,
        "logit_bias": {"7": 2.0},
        "dry_multiplier": 0.5,
        "typical_p": 0.9,
        "top_n_sigma": 3.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
        "logprobs": 2,
    },
}
LATER = (
    "gpt_oss",
    "lfm2",
    "qwen3",
    "qwen3_next",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "qwen3_moe",
    "deepseek_v2",
    "granitemoehybrid",
)


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 32, 1 << 33))
    with pretend_cuda() as device:
        yield device


def _answers(llm, sampling, adapter=""):
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    outputs = llm.generate(PROMPTS, params, adapter=adapter, use_tqdm=False)
    return [each.outputs[0].token_ids for each in outputs]


def test_a_mix_of_devices_is_seen(pretended):
    there, here = torch.ones(3, device=pretended), torch.ones(3)
    assert isinstance(there, Pretended)
    assert there.is_cuda
    with pytest.raises(MixedDevices):
        there + here
    with pytest.raises(MixedDevices):
        here[torch.tensor([1], device=pretended)]
    assert (there + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]
    assert there[torch.tensor([1])].tolist() == [1.0]
    with pytest.raises(TypeError):
        there.numpy()


@pytest.mark.parametrize("family", ["llama", *(pytest.param(each, marks=pytest.mark.deep) for each in LATER)])
def test_the_answers_are_those_of_the_cpu(family, tmp_path, monkeypatch, request):
    model = str(write_lettered(tmp_path, family, "wide_heads_untied" if family == "llama" else VARIANTS[family][0]))
    samplings = SAMPLINGS if family == "llama" else {"likely ones": SAMPLINGS["likely ones"]}
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    with LLM(model, device="cpu", **OPTIONS) as llm:
        expected = {name: _answers(llm, sampling) for name, sampling in samplings.items()}
    device = request.getfixturevalue("pretended")
    assert room.resolve_device("auto") == device
    with LLM(model, device="cuda", **OPTIONS) as llm:
        for name, sampling in samplings.items():
            assert _answers(llm, sampling) == expected[name], name


def test_adapters_answer_there_as_on_the_cpu(tmp_path, monkeypatch, request):
    (tmp_path / "model").mkdir()
    model = str(write_lettered(tmp_path / "model", "llama", "wide_heads_untied"))
    modules = linear_modules(load_with_adapters(model).program)
    lora = {name: str(write_adapter(tmp_path / name, modules, 3 + seed, seed=seed)) for seed, name in enumerate("ab")}
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    with LLM(model, device="cpu", lora=lora, **OPTIONS) as llm:
        expected = _answers(llm, SAMPLINGS["greedy"], ["a", "", "b", "a"])
    request.getfixturevalue("pretended")
    with LLM(model, device="cuda", lora=lora, **OPTIONS) as llm:
        assert _answers(llm, SAMPLINGS["greedy"], ["a", "", "b", "a"]) == expected
        assert _answers(llm, SAMPLINGS["greedy"]) != expected
