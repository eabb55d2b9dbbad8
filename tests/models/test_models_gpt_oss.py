"""gpt-oss as it is published: experts in MXFP4, in safetensors and in GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import compiled_kernels as here
import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_gguf import add_settings, as_converted, header_only
from tiny_checkpoints import forget_references, reference_logits, write_checkpoint, write_letters
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from needs import COMPILED
from penstock.contract.errors import ModelFileError
from penstock.kernels import native
from penstock.kernels.packed_weight import PackedKind
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.operations import Experts
from penstock.nn.reference import ReferenceExecutor
from penstock.quantizing import plan_file, write_file
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.gguf_file import open_gguf
from penstock.weights.packing import WeightFormat

VARIANT = "wide_heads_unused_experts_small_window"
SIZES = {"hidden_size": 64, "intermediate_size": 96}
TOKENS = list(range(3, 63))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts are plain numbers, all of which MXFP4 can represent."""
    directory = write_checkpoint(tmp_path_factory.mktemp("plain"), "gpt_oss", VARIANT, **SIZES)
    tensors = load_file(directory / "model.safetensors")
    for name, (blocks, scales) in in_mxfp4(tensors).items():
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    forget_references()
    return directory


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers, as published checkpoints store them."""
    directory = tmp_path_factory.mktemp("packed")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    for name, (blocks, scales) in in_mxfp4(tensors).items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors")
    return directory


def in_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Blocks and scales of the experts `[E, K, N]`, by the `gguf` package's rounding, two neighbours in a byte."""
    found = {}
    for name, weight in tensors.items():
        if name.endswith((".gate_up_proj", ".experts.down_proj")):
            rows = weight.mT.contiguous()  # [E, N, K]
            stored = torch.from_numpy(gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4))
            stored = stored.unflatten(2, (-1, 17))
            low, high = stored[..., 1:] & 15, stored[..., 1:] >> 4
            codes = torch.cat((low, high), dim=-1)
            found[name] = (codes[..., ::2] | codes[..., 1::2] << 4).contiguous(), stored[..., 0].contiguous()
    return found


def write_gguf(path: Path, directory: Path) -> Path:
    """The checkpoint as llama.cpp converts it: experts in MXFP4, the rest in float32."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(path, "gpt-oss")
    add_settings(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])
    for name, tensor in as_converted(tensors).items():
        stored, numbers = names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy()
        if name.endswith("_proj.weight") and ".experts." in name:
            kind = gguf.GGMLQuantizationType.MXFP4
            writer.add_tensor(stored, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def program_of(path: Path, fmt: WeightFormat, dtype: torch.dtype = torch.float32):
    files = open_model(path, gguf_dialect) if path.is_dir() else None  # the GGUF files here have no vocabulary
    source = files.source if files else open_gguf(path, gguf_dialect)
    binder = Binder(source, dtype, "cpu", str(path), weight_format=fmt)
    return load(files.config if files else source.config, binder, str(path)), binder


def logits(program) -> torch.Tensor:
    model = ReferenceExecutor(program, torch.float32, TorchBackend())
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(TOKENS), torch.arange(len(TOKENS)), DenseAttention()))


@pytest.mark.parametrize("stored", ["safetensors", "gguf"])
def test_experts_in_mxfp4_compute_what_transformers_makes_of_their_numbers(tmp_path, plain, packed, stored):
    path = packed if stored == "safetensors" else write_gguf(tmp_path / "tiny.gguf", plain)
    program, _ = program_of(path, WeightFormat.DENSE)
    torch.testing.assert_close(logits(program), reference_logits(plain, TOKENS), atol=1e-4, rtol=0)


def test_blocks_stay_as_they_are_and_are_the_same_from_either_file(tmp_path, plain, packed):
    if not native.available():
        pytest.skip(COMPILED)
    dense, _ = program_of(packed, WeightFormat.DENSE)
    files = open_model(packed, gguf_dialect)
    assert files.stored_dtype == "quantised"
    experts = [each.stack for each in dense.operations() if isinstance(each, Experts)]
    numbers = sum(each.gate_up.numel() + each.down.numel() for each in experts)
    assert files.stored["MXFP4"] * 32 == numbers * 17
    stacks = []
    for path in (packed, write_gguf(tmp_path / "tiny.gguf", plain)):
        program, binder = program_of(path, WeightFormat.STORED)
        assert "MXFP4" in binder.formats
        stacks.append([each.stack for each in program.operations() if isinstance(each, Experts)])
        here.reset()
        assert why_not_compiled(program, torch.float32, here.backend()) is None
        CompiledExecutor(program, torch.float32, here.backend())
        wanted = reference_logits(plain, TOKENS)
        assert (logits(program) - wanted).square().mean() < 1e-3 * wanted.square().mean()
    for ours, theirs in zip(*stacks, strict=True):
        assert ours.gate_up.kind is ours.down.kind is PackedKind.MX4
        assert torch.equal(ours.gate_up.data, theirs.gate_up.data)
        assert torch.equal(ours.down.data, theirs.down.data)
        assert torch.equal(ours.gate_up_bias, theirs.gate_up_bias)


def test_what_else_is_quantised_is_refused(packed, tmp_path):
    config = json.loads((packed / "config.json").read_text())
    files = open_model(packed, gguf_dialect)
    for section in ({"quant_method": "quark"}, {}, {"bits": 4}):
        with pytest.raises(ModelFileError, match=r"quantization_config\.quant_method: .* mxfp4 can be read; use"):
            load({**config, "quantization_config": section}, Binder(files.source, torch.float32, "cpu", "m"), "m")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :, :1].contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"down_proj_blocks: has shape .* belong to"):
        open_model(tmp_path, gguf_dialect)


def test_a_gguf_file_without_a_window_has_none_in_any_layer(tmp_path):
    keys = {"expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 0}
    config = open_gguf(header_only(tmp_path / "m.gguf", "gpt-oss", **keys), gguf_dialect).config
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["rope_scaling"] == {"rope_type": "default"}
    assert not config["attention_bias"]


@pytest.mark.deep
def test_a_gguf_file_that_was_quantised_has_the_numbers_of_the_blocks(tmp_path, plain, packed):
    """In bfloat16, which holds them all."""
    written = []
    for directory in (plain, packed):
        copy = shutil.copytree(directory, tmp_path / directory.name)
        write_letters(copy, json.loads((copy / "config.json").read_text())["vocab_size"])
        path = tmp_path / f"{directory.name}.gguf"
        write_file(plan_file(open_model(copy, gguf_dialect), "BF16"), path, lambda _: None)
        source = open_model(path, gguf_dialect).source
        written.append({name: source.read(name, torch.float32, "cpu") for name in source.names()})
    assert written[0].keys() == written[1].keys()
    for name, numbers in written[0].items():
        assert torch.equal(written[1][name], numbers), name
