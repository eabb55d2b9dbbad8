"""The random checkpoint: transformers and Penstock load it, and both compute the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.contract.model import StepRow
from penstock.llm.offline import LLM
from penstock.sampling import SamplingParams

SCRIPT = Path(__file__).parents[2] / "bench" / "make_random_checkpoint.py"
SMALL_SIZES = ["--hidden", "64", "--layers", "2", "--heads", "4", "--inner", "96", "--vocabulary", "300"]
SMALL = [*SMALL_SIZES, "--kv-heads", "2"]
SMALL_GPT2 = [*SMALL_SIZES, "--family", "gpt2"]
SMALL_GEMMA2 = [*SMALL, "--family", "gemma2", "--head-dim", "16", "--set", "query_pre_attn_scalar=16"]
SMALL_MOE = [*SMALL, "--family", "qwen3_moe", "--head-dim", "16", "--experts", "5", "--experts-per-token", "2"]
SMALL_MOE += ["--expert-inner", "24"]
OPS_A_TOKEN = 2 * 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)
OPS_A_TOKEN_OF_GPT2 = 2 * 2 * (64 * 64 * 4 + 64 * 96 * 2)
OPS_A_TOKEN_OF_MOE = 2 * 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 5 + 2 * 64 * 24 * 3)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_random_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def make(script, monkeypatch):
    def run(directory: Path, *options: str) -> None:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(directory), *options])
        script.main()

    return run


@pytest.mark.parametrize(
    ("small", "ops"),
    [
        (SMALL, OPS_A_TOKEN),
        (SMALL_GPT2, OPS_A_TOKEN_OF_GPT2),
        (SMALL_GEMMA2, OPS_A_TOKEN),
        (SMALL_MOE, OPS_A_TOKEN_OF_MOE),
    ],
)
def test_a_small_checkpoint_is_loaded_whole_and_greedy_tokens_are_those_of_transformers(make, tmp_path, small, ops):
    make(tmp_path / "random", *small)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "random", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = AutoTokenizer.from_pretrained(tmp_path / "random").encode("Hello, world")
    assert len(prompt) == len("Hello, world")
    with LLM(str(tmp_path / "random"), dtype="float32", kv_cache_memory=1 << 20) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (ours,) = llm.generate([prompt], params, use_tqdm=False)
        sampled, silent = (llm.cost([StepRow(0, 1, samples)]).fp32_ops for samples in (1, 0))
        assert sampled - silent == 2 * 300 * 64
        assert silent == ops + 2 * 4 * 64  # attention to one position in two layers
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert ours.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_the_defaults_have_as_many_weights_as_the_models_named(script):
    def count(family):
        return sum(torch.Size(shape).numel() for shape in script.shapes_of(script.configure(family, {})).values())

    assert count("llama") == 1_100_048_384  # as published for TinyLlama-1.1B
    assert count("gpt2") == 124_439_808  # of GPT-2 small in Hugging Face's release


def test_a_config_of_a_file_is_where_options_begin(make, tmp_path):
    make(tmp_path / "first", *SMALL_MOE)
    make(tmp_path / "again", "--config", str(tmp_path / "first" / "config.json"), "--experts", "6", "--layers", "1")
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "again"))
    assert first | {"num_local_experts": 6, "num_hidden_layers": 1} == again
    places = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(".experts." in name for name in places) == 6 * 3


def test_files_hold_so_much_at_most_and_every_tensor_once(script, make, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "FILE_BYTES", 50_000)
    make(tmp_path, *SMALL)
    files = sorted(tmp_path.glob("*.safetensors"))
    held = [load_file(file) for file in files]
    assert all(len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= 50_000 for tensors in held)
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert places == {name: file.name for file, tensors in zip(files, held, strict=True) for name in tensors}
    assert len(files) > 2


def test_the_same_seed_writes_the_same_files(make, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        make(tmp_path / name, *SMALL, "--seed", seed)
    places = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    file = places["model.layers.1.mlp.down_proj.weight"]
    a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    "wrong",
    [
        ["--heads", "3"],
        ["--vocabulary", "100"],
        ["--family", "no such"],
        [*SMALL_GPT2, "--kv-heads", "2"],
        ["--set", "hidden_sise=3"],
    ],
)
def test_sizes_that_make_no_model_are_refused(make, tmp_path, wrong):
    with pytest.raises(SystemExit, match="must"):
        make(tmp_path / "random", *wrong)
    assert not (tmp_path / "random").exists()
