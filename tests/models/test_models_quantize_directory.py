"""`penstock quantize` into a directory: integers of compressed-tensors, or plain numbers, that compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VARIANTS, load_model, write_checkpoint, write_lettered
from transformers import AutoModelForCausalLM

from needs import COMPILED
from penstock.contract.errors import ModelFileError
from penstock.kernels import native
from penstock.kernels.packed_weight import PackedKind
from penstock.models import gguf_dialect
from penstock.nn.dense import DenseAttention
from penstock.quantizing import plan_directory, write_directory
from penstock.weights.bind import Binder
from penstock.weights.compressed_encode import INTEGER_FORMS
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "mlp_bias": False,
}
CODE_BITS = {"INT8": 8, "INT4_G32": 4, "INT4_G128": 4}
FORMS = ["INT4_G128", *(pytest.param(form, marks=pytest.mark.deep) for form in ("INT4_G32", "INT8"))]


def quantised(directory: Path, target: Path, form: str) -> Path:
    write_directory(plan_directory(open_model(directory, gguf_dialect), form), target, lambda _: None)
    return target


def wide_llama(folder: Path, **changes: Any) -> Path:
    return write_lettered(folder / "tiny", "llama", "wide_heads_untied", **WIDE, **changes)


def decoded(parts: dict[str, torch.Tensor], module: str, bits: int) -> torch.Tensor:
    """As the format says: eight codes about 8 in an int32, the first in the lowest bits, or bytes; times scales."""
    if bits == 8:
        codes = parts[f"{module}.weight"].double()
    else:
        rows, inputs = parts[f"{module}.weight_shape"].tolist()
        words = parts[f"{module}.weight_packed"].long() & 0xFFFFFFFF
        codes = torch.stack([(words >> (4 * place) & 15) - 8 for place in range(8)], dim=2)
        codes = codes.view(rows, -1)[:, :inputs].double()
    scales = parts[f"{module}.weight_scale"].double()
    return (codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)).float()


def logits(path: Path) -> torch.Tensor:
    model = load_model(path)
    with torch.no_grad():
        return model.logits(model.forward(torch.arange(40), torch.arange(40), DenseAttention()))


@pytest.mark.parametrize("form", FORMS)
def test_integers_are_those_of_the_format_and_near_the_numbers(tmp_path, form):
    directory = wide_llama(tmp_path)
    target = quantised(directory, tmp_path / "small", form)
    numbers, parts = load_file(directory / "model.safetensors"), load_file(target / "model.safetensors")
    source = open_model(target, gguf_dialect).source
    projections = {name for name in numbers if name.endswith("_proj.weight")}
    assert len(projections) == 21
    for name, stored in numbers.items():
        if name not in projections:
            assert torch.equal(parts[name], stored), name
            continue
        module = name.removesuffix(".weight")
        ours = decoded(parts, module, CODE_BITS[form])
        assert torch.equal(source.read(name, torch.float32, "cpu"), ours), name
        group = INTEGER_FORMS[form].group or stored.shape[1]
        largest = stored.unflatten(1, (-1, group)).abs().amax(2, keepdim=True)
        steps = largest / (1 << CODE_BITS[form] - 1) - 1
        rounded = (stored.unflatten(1, (-1, group)) / steps).round() * steps
        plainest = (rounded.flatten(1) - stored).square().mean()
        assert (ours - stored).square().mean() <= 1.01 * plainest, f"{name} is worse than rounding to the largest"
        assert torch.equal(parts[f"{module}.weight_scale"], parts[f"{module}.weight_scale"].bfloat16().float())
    section = json.loads((target / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head", "model.embed_tokens"]
    for name in projections:
        numbers[name] = decoded(parts, name.removesuffix(".weight"), CODE_BITS[form])
    save_file(numbers, directory / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(target), logits(directory))


@pytest.mark.parametrize("form", FORMS)
def test_transformers_computes_the_same(tmp_path, form):
    pytest.importorskip("compressed_tensors")
    target = quantised(wide_llama(tmp_path), tmp_path / "small", form)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.arange(40)[None]).logits[0]
    torch.testing.assert_close(logits(target), expected, atol=2e-5, rtol=0)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_the_forms_are_multiplied_as_they_are(tmp_path):
    directory = wide_llama(tmp_path, num_hidden_layers=2)
    for form, kind in (("INT4_G128", "Z4W"), ("INT4_G32", "Z4"), ("INT8", "Q8")):
        files = open_model(quantised(directory, tmp_path / form, form), gguf_dialect)
        binder = Binder(files.source, torch.bfloat16, "cpu", str(files.path), weight_format=WeightFormat.STORED)
        weight = binder.take_linear([("model.layers.1.mlp.down_proj.weight", (128, 256))])
        assert weight.kind is PackedKind[kind]
        assert not files.source.rounded()


@pytest.mark.parametrize("form", ["BF16", *(pytest.param(form, marks=pytest.mark.deep) for form in ("F16", "F32"))])
def test_plain_numbers_are_in_the_type_that_was_asked_for(tmp_path, form):
    directory = wide_llama(tmp_path)
    target = quantised(directory, tmp_path / "plain", form)
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[form]
    numbers, parts = load_file(directory / "model.safetensors"), load_file(target / "model.safetensors")
    assert numbers.keys() == parts.keys()
    for name, stored in numbers.items():
        assert parts[name].dtype == dtype
        assert torch.equal(parts[name], stored.to(dtype)), name
    assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = quantised(quantised(directory, tmp_path / "small", "INT8"), tmp_path / "wide", form)
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    assert open_model(again, gguf_dialect).stored.keys() == {form}


def test_what_is_beside_the_weights_comes_along(tmp_path):
    directory = wide_llama(tmp_path)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text("{}")
    (directory / "LICENSE").write_text("as you like")
    (directory / "modeling_tiny.py").write_text("raise SystemExit")
    (directory / "pytorch_model.bin").write_bytes(b"")
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    target = quantised(directory, tmp_path / "small", "INT8")
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == found - {"modeling_tiny.py", "pytorch_model.bin"}


@pytest.mark.parametrize(
    ("change", "form", "said"),
    [
        ({}, "INT8", r"model\.layers\.1\.mlp\.up_proj\.weight: holds a number that is not finite"),
        ({"hidden_size": 96, "intermediate_size": 96}, "INT4_G128", "no projection whose rows are whole groups"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_leaves_nothing(tmp_path, change, form, said):
    directory = wide_llama(tmp_path)
    if change:
        directory = write_lettered(
            tmp_path / "tiny", "llama", "wide_heads_untied", **{**WIDE, "head_dim": 24, **change}
        )
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=said):
        quantised(directory, tmp_path / "small", form)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "changes", "quantised_modules", "ignored"),
    [
        (
            "mixtral",
            {"hidden_size": 128, "intermediate_size": 128},
            "experts.1.w2",
            "model.layers.0.block_sparse_moe.gate",
        ),
        ("qwen3_next", {}, "linear_attn.in_proj_qkvz", "model.layers.0.mlp.gate"),
        ("qwen3_moe", {}, "self_attn.q_proj", "model.layers.0.mlp.gate"),
        ("gemma3", {}, "self_attn.q_proj", "re:.*vision_tower.*"),
    ],
)
def test_other_families_keep_what_engines_never_quantise(tmp_path, family, changes, quantised_modules, ignored):
    directory = write_checkpoint(tmp_path / "tiny", family, next(iter(VARIANTS[family])), **changes)
    target = quantised(directory, tmp_path / "small", "INT8")
    numbers, parts = load_file(directory / "model.safetensors"), load_file(target / "model.safetensors")
    modules = [name.removesuffix(".weight_scale") for name in parts if name.endswith(".weight_scale")]
    assert any(quantised_modules in module for module in modules)
    ignore = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored in ignore
    assert not set(ignore) & set(modules)
    for module in modules:
        numbers[f"{module}.weight"] = decoded(parts, module, 8)
    save_file(numbers, directory / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(target), logits(directory))
