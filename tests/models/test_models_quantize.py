"""`penstock quantize`: a model becomes a GGUF file that computes the same, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_quantize_families import FAMILIES
from tiny_checkpoints import VARIANTS, load_model, write_lettered, write_letters

from penstock.contract.errors import ModelFileError
from penstock.models import gguf_dialect
from penstock.nn.dense import DenseAttention
from penstock.quantizing import plan_file, write_file
from penstock.text import open_text
from penstock.weights.files import open_model
from penstock.weights.gguf_from_huggingface import ARCHITECTURES
from penstock.weights.gguf_header import read_gguf_header

LENGTH = 80

# What GGUF has no key for is set to what its readers take.
CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("gemma2", "wide_heads_tied_small_window"): {"query_pre_attn_scalar": 20},
    ("gemma3_text", "wide_heads_tied_small_window"): {"query_pre_attn_scalar": 20},
    ("smollm3", "wide_heads_tied_small_window"): {"use_sliding_window": False},
    ("starcoder2", "wide_heads_tied_small_window"): {"sliding_window": None},
    ("qwen2_moe", "wide_heads_tied_unused_experts"): {"norm_topk_prob": False},
}
CASES = [(family, VARIANTS[family][0]) for family in ARCHITECTURES if family in VARIANTS and family not in FAMILIES]
ALWAYS = ("gemma2", "mixtral")
CASES_NOW = [
    pytest.param(family, variant, marks=[] if family in ALWAYS else pytest.mark.deep) for family, variant in CASES
]


def quantised(directory: Path, target: Path, form: str = "F32") -> Path:
    write_file(plan_file(open_model(directory, gguf_dialect), form), target, lambda _: None)
    return target


def logits(path: Path) -> torch.Tensor:
    model = load_model(path)
    token_ids = torch.randint(model.shape.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.logits(model.forward(token_ids, torch.arange(LENGTH), DenseAttention()))


@pytest.mark.parametrize(("family", "variant"), CASES_NOW)
def test_a_file_of_float32_computes_what_the_directory_does(tmp_path, family, variant):
    directory = write_lettered(tmp_path / "tiny", family, variant, **CHANGES.get((family, variant), {}))
    path = quantised(directory, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(path), logits(directory), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "rope", ["llama3", *(pytest.param(rope, marks=pytest.mark.deep) for rope in ("yarn", "linear"))]
)
def test_a_ropes_scaling_arrives(tmp_path, rope):
    family, variant = {
        "llama3": ("llama", "all_to_one_biases_llama3"),
        "yarn": ("qwen3", "one_to_one_tied_yarn"),
        "linear": ("llama", "one_to_one_tied_linear"),
    }[rope]
    changes = {"attention_bias": False, "mlp_bias": False} if rope == "llama3" else {}
    directory = write_lettered(tmp_path / "tiny", family, variant, **changes)
    path = quantised(directory, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(path), logits(directory), atol=5e-5, rtol=0)


WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def through_the_gguf_package(name: str, numbers: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    if numbers.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
        return numbers
    raw = gguf.quants.quantize(numbers.numpy(), kind)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, kind)))


@pytest.mark.parametrize("form", [pytest.param("Q8_0", marks=pytest.mark.deep), "Q4_0"])
def test_logits_are_those_of_the_dequantised_numbers(tmp_path, form):
    directory = write_lettered(tmp_path / "tiny", "llama", "wide_heads_untied", **WIDE)
    path = quantised(directory, tmp_path / "tiny.gguf", form)
    stored = {name: tensor.kind.name for name, tensor in read_gguf_header(path).tensors.items()}
    assert {kind for name, kind in stored.items() if "norm" not in name and name != "output.weight"} == {form}
    assert stored["output.weight"] == "Q8_0", "rows of 64 cannot be Q6_K, which takes them in 256"
    tensors = load_file(directory / "model.safetensors")
    for name, numbers in tensors.items():
        kind = "Q8_0" if name == "lm_head.weight" else form
        tensors[name] = through_the_gguf_package(name, numbers, gguf.GGMLQuantizationType[kind])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(path), logits(directory), atol=2e-5, rtol=0)


def test_a_mixture_has_more_bits_where_llama_cpp_has_them(tmp_path):
    sizes = WIDE | {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4}
    directory = write_lettered(tmp_path / "tiny", "llama", "wide_heads_untied", **sizes)
    path = quantised(directory, tmp_path / "tiny.gguf", "Q4_K_M")
    kinds = {name: tensor.kind.name for name, tensor in read_gguf_header(path).tensors.items()}
    # of 4 layers none is in the first eighth, the last is in the last, and the third is the third of three
    raised = [f"blk.{layer}.{part}.weight" for layer in (2, 3) for part in ("attn_v", "ffn_down")]
    assert {name for name, kind in kinds.items() if kind == "Q6_K"} == {*raised, "output.weight"}
    assert {kinds[name] for name in kinds if "norm" in name} == {"F32"}
    assert set(kinds.values()) == {"Q4_K", "Q6_K", "F32"}
    again = quantised(path, tmp_path / "again.gguf", "Q4_K_M")
    assert again.read_bytes()[-1000:] == path.read_bytes()[-1000:], "blocks of the same kind are copied"


def test_the_gguf_package_reads_the_file(tmp_path):
    directory = write_lettered(tmp_path / "tiny", "qwen3", "wide_heads_tied")
    read = gguf.GGUFReader(quantised(directory, tmp_path / "tiny.gguf", "Q8_0"))
    config = json.loads((directory / "config.json").read_text())
    assert read.get_field("general.architecture").contents() == "qwen3"
    assert read.get_field("qwen3.block_count").contents() == config["num_hidden_layers"]
    assert read.get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    assert len(read.get_field("tokenizer.ggml.tokens").contents()) == config["vocab_size"]
    types = read.get_field("tokenizer.ggml.token_type")
    assert types.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32], "llama.cpp takes no other"
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    names = {known.get_name(name, (".weight", ".bias")) for name in load_file(directory / "model.safetensors")}
    assert {tensor.name for tensor in read.tensors} == names


def test_the_file_has_the_directorys_tokenizer(tmp_path):
    directory = write_lettered(tmp_path / "tiny", "llama", "wide_heads_untied")
    ours, theirs = (
        open_text(open_model(path, gguf_dialect).text)
        for path in (quantised(directory, tmp_path / "tiny.gguf"), directory)
    )
    for text in ("what is it, then.", "<s>a b</s>", "<5>", ""):
        assert list(ours.tokenizer.encode(text)) == list(theirs.tokenizer.encode(text)), text


def one_setting(key: str, value: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {key: value}))

    return change


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gemma2", one_setting("query_pre_attn_scalar", 33), "spec.scale"),
        ("smollm3", one_setting("no_rope_layers", [1, 1, 1, 1]), "cannot say all"),
    ],
)
def test_what_gguf_cannot_say_is_refused_and_leaves_nothing(tmp_path, family, change, said):
    variant = VARIANTS[family][0]
    directory = write_lettered(tmp_path / "tiny", family, variant, **CHANGES.get((family, variant), {}))
    change(directory)
    with pytest.raises(ModelFileError, match=said):
        quantised(directory, tmp_path / "tiny.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_an_interrupt_in_the_midst_of_writing_leaves_nothing(tmp_path):
    directory = write_lettered(tmp_path / "tiny", "llama", "wide_heads_untied")
    plan = plan_file(open_model(directory, gguf_dialect), "F32")
    written = 0

    def interrupted(count: int) -> None:
        nonlocal written
        written += count
        if written > plan.bytes / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(plan, tmp_path / "tiny.gguf", interrupted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_a_number_that_no_kind_holds_is_refused_by_its_tensor(tmp_path):
    directory = write_lettered(tmp_path / "tiny", "llama", "wide_heads_untied")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_letters(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight: holds a number that is not finite"):
        quantised(directory, tmp_path / "tiny.gguf")
    assert not (tmp_path / "tiny.gguf").exists()
