"""What an engine says of itself at start, for every type that a checkpoint may be stored in, and what it then does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from served import runners_of
from tiny_checkpoints import write_checkpoint, write_letters
from transformers import LlamaConfig, LlamaForCausalLM

from needs import COMPILED
from penstock import LLM, SamplingParams
from penstock.app import assemble, engine_config
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.model import StepRow
from penstock.contract.options import Front
from penstock.kernels import native
from penstock.verify import Budget, profile

compiled = pytest.mark.skipif(not native.available(), reason=COMPILED)
KINDS = {
    "float32": ("gpt2", "tied"),
    "float16": ("llama", "wide_heads_untied"),
    "bfloat16": ("qwen3", "wide_heads_tied"),
}
OPTIONS = {"kv_cache_memory": 10_000_000, "threads": 1}


def write_tiny(directory: Path, dtype: str) -> Path:
    write_checkpoint(directory, *KINDS[dtype], getattr(torch, dtype))
    write_letters(directory, 101)
    return directory


@pytest.fixture(scope="module", params=KINDS)
def stored(request, tmp_path_factory):
    """The name of a type, and a tiny model in it."""
    return request.param, write_tiny(tmp_path_factory.mktemp(request.param) / "tiny", request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("one") / "tiny", "float16"))


@compiled
def test_by_default_a_checkpoint_of_any_type_runs_on_the_compiled_kernels(stored):
    name, model = stored
    with LLM(str(model), **OPTIONS) as llm:
        lines = {line[:17].rstrip(): line[17:] for line in llm.report}
    assert lines["runs on"] == f"cpu, bfloat16, 1 threads, compiled {native.isas()[0]} kernels, exact bit for bit"
    rounded = "" if name == "bfloat16" else f", rounded from the file's {name} (--dtype float32 keeps its numbers)"
    assert lines["weights"].partition(": ")[2] == f"bfloat16{rounded}"
    assert list(lines) == ["model", "runs on", "conversations", "weights", "KV cache", "longest request"]


@compiled
def test_by_default_a_checkpoint_of_any_type_is_exact(stored):
    report = profile(EngineConfig(model=str(stored[1])), Budget(requests=6, schedules=3, prompt_tokens=60))
    assert report.exact, report.verdict_line()


@compiled
def test_float32_runs_on_the_compiled_kernels_too_and_rounds_nothing(tiny):
    with LLM(tiny, dtype="float32", **OPTIONS) as llm:
        lines = {line[:17].rstrip(): line[17:] for line in llm.report}
    assert lines["runs on"] == f"cpu, float32, 1 threads, compiled {native.isas()[0]} kernels, exact bit for bit"
    assert lines["weights"].endswith(": float32")
    assert lines["KV cache"].endswith(", float32")
    assert list(lines) == ["model", "runs on", "conversations", "weights", "KV cache", "longest request"]


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_wider_than_the_compiled_attention_takes_run_on_torchs_which_is_said(tmp_path, dtype):
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 640, "vocab_size": 101}
    config = LlamaConfig(**sizes, num_hidden_layers=2, intermediate_size=88, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_letters(tmp_path, 101)
    with LLM(str(tmp_path), dtype=dtype, **OPTIONS) as llm:
        [line] = [line for line in llm.report if line.startswith("attention")]
        assert "torch: heads of 640 are wider than 512" in line
        [reply] = llm.generate("ab", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert len(reply.outputs[0].token_ids) == 5
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM(str(tmp_path), dtype=dtype, kv_cache_dtype="int8", **OPTIONS)


def test_without_a_compiler_one_line_says_why_and_what_it_costs(tiny, monkeypatch):
    monkeypatch.setattr(native, "module", None)
    with LLM(tiny, **OPTIONS) as llm:
        [line] = [line for line in llm.report if line.startswith("runs on")]
    assert line.endswith("installed without compiled kernels: torch kernels, slower, exact up to rounding")


def test_each_line_is_announced_as_it_is_known_and_kept(tiny):
    said: list[str] = []
    assembly = assemble(engine_config(model=tiny, **OPTIONS), announce=said.append)
    assembly.close()
    assert assembly.report == tuple(said)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc")
def test_a_runner_in_a_process_reports_the_same_and_a_start_that_fails_late_leaves_none(tiny, tmp_path):
    reports = []
    for runner in ("in-process", "process"):
        assembly = assemble(engine_config(Front.QUEUE, model=tiny, runner=runner, **OPTIONS))
        reports.append(assembly.report)
        assert assembly.cost([StepRow(0, 3)]).weight_bytes > 0
        assembly.close()
    assert reports[0] == reports[1]
    before, lost = runners_of(os.getpid()), str(tmp_path / "no folder" / "trace")  # other tests' servers may have some
    with pytest.raises(ConfigError, match="record"):
        assemble(engine_config(Front.QUEUE, model=tiny, runner="process", record=lost, **OPTIONS))
    assert runners_of(os.getpid()) == before


@pytest.mark.model
@compiled
def test_a_quantised_file_says_in_which_blocks_it_runs(default_model):
    with LLM(str(default_model), kv_cache_memory=50_000_000) as llm:
        [weights] = [line for line in llm.report if line.startswith("weights")]
    assert weights.endswith(": Q4_1, Q8_0 as in the file")


@pytest.mark.parametrize("isa", native.isas())
def test_the_environment_chooses_the_instruction_set(tiny, isa, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ISA", isa)
    with LLM(tiny, **OPTIONS) as llm:
        assert any(f"compiled {isa} kernels" in line for line in llm.report)


def test_an_instruction_set_that_cannot_run_is_refused_by_the_variables_name(tiny, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"PENSTOCK_ISA.*'mmx' cannot run here"):
        LLM(tiny, **OPTIONS)
