"""`penstock quantize` of families whose files are not renamed checkpoints: what llama.cpp's conversion would write.

The expected file is from `write_gguf` of the test of reading: names of the `gguf` package, rearranged by hand as
`convert_hf_to_gguf.py` does it.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_gguf import CASES, write_gguf
from tiny_checkpoints import VARIANTS, load_model, write_checkpoint, write_letters

from penstock.contract.errors import ModelFileError
from penstock.models import gguf_dialect
from penstock.nn.dense import DenseAttention
from penstock.quantizing import plan_file, write_file
from penstock.weights.files import open_model

FAMILIES = (
    *("lfm2", "granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "gemma4_text"),
)
NOW = {("granitemoehybrid", "all_to_one_experts")}
WRITTEN = [pytest.param(*case, marks=[] if case in NOW else pytest.mark.deep) for case in CASES if case[0] in FAMILIES]
EXACT = ("lfm2", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Families of which no number is computed on the way, and whose settings float32 holds as nearly as it matters."""


def lettered(directory: Path, family: str, variant: str) -> Path:
    write_checkpoint(directory, family, variant, **CASES.get((family, variant), {}))
    config = json.loads((directory / "config.json").read_text())
    write_letters(directory, config.get("text_config", config)["vocab_size"])
    return directory


def quantised(directory: Path, target: Path, form: str = "F32") -> Path:
    write_file(plan_file(open_model(directory, gguf_dialect), form), target, lambda _: None)
    return target


def logits(path: Path) -> torch.Tensor:
    model = load_model(path)
    token_ids = torch.arange(80) % model.shape.vocab_size
    with torch.no_grad():
        return model.logits(model.forward(token_ids, torch.arange(80), DenseAttention()))


@pytest.mark.parametrize(("family", "variant"), WRITTEN)
def test_a_file_is_what_the_conversion_writes(tmp_path, family, variant):
    directory = lettered(tmp_path / "tiny", family, variant)
    ours = quantised(directory, tmp_path / "ours.gguf")
    theirs = write_gguf(tmp_path / "theirs.gguf", directory)
    read, expected = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    assert tensors.keys() == {tensor.name for tensor in expected.tensors}
    for tensor in expected.tensors:
        assert np.array_equal(tensors[tensor.name].reshape(tensor.data.shape), tensor.data), tensor.name
    for key, field in expected.fields.items():
        if key.startswith(read.get_field("general.architecture").contents()):
            assert key in read.fields, key
            assert read.get_field(key).contents() == pytest.approx(field.contents()), key
    if family in EXACT:
        assert torch.equal(logits(ours), logits(directory))
    else:
        torch.testing.assert_close(logits(ours), logits(directory), atol=5e-5, rtol=0)


SEES = ("gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
WITH_MORE = [(family, next(iter(VARIANTS[family]))) for family in SEES]


@pytest.mark.deep
@pytest.mark.parametrize(("family", "variant"), WITH_MORE)
def test_of_a_model_that_sees_the_text_part_is_written(tmp_path, family, variant):
    directory = lettered(tmp_path / "tiny", family, variant)
    config = json.loads((directory / "config.json").read_text())
    if family == "gemma3":  # its files leave the scale of scores out
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
        (directory / "config.json").write_text(json.dumps(config))
    plan = plan_file(open_model(directory, gguf_dialect), "F32")
    assert any(remark.startswith("left out: ") for remark in plan.remarks)
    write_file(plan, tmp_path / "ours.gguf", lambda _: None)
    torch.testing.assert_close(logits(tmp_path / "ours.gguf"), logits(directory), atol=5e-5, rtol=0)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "qwen2_moe"])
def test_experts_that_share_a_tensor_are_taken_apart(tmp_path, family):
    changes = {"norm_topk_prob": False} if family == "qwen2_moe" else {}
    directory = write_checkpoint(tmp_path / "tiny", family, next(iter(VARIANTS[family])), **changes)
    write_letters(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
    apart = quantised(directory, tmp_path / "apart.gguf")
    tensors = load_file(directory / "model.safetensors")
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        parts = {part: [] for part in ("gate_proj", "up_proj", "down_proj")}
        for part, found in parts.items():
            while (name := f"{layer}.experts.{len(found)}.{part}.weight") in tensors:
                found.append(tensors.pop(name))
        halves = [torch.stack(parts[part]) for part in ("gate_proj", "up_proj")]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat(halves, dim=1)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    joined = quantised(directory, tmp_path / "joined.gguf")
    assert joined.read_bytes() == apart.read_bytes()


def test_a_family_that_is_not_known_is_refused_by_name(tmp_path):
    directory = lettered(tmp_path / "tiny", "lfm2", "wide_heads_tied_four_taps")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "reformer"}))
    with pytest.raises(ModelFileError, match="'reformer' cannot be written as GGUF"):
        quantised(directory, tmp_path / "ours.gguf")
