"""The files of adapters: what is read of them, and what is refused, by the name of the file and of the key."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from penstock.contract.errors import ModelFileError
from penstock.contract.model import ModelShape
from penstock.models import gguf_dialect
from penstock.weights.gguf_adapter import open_gguf_adapter
from penstock.weights.peft_adapter import open_peft

SHAPE = ModelShape(2, 8, 2, 1, 4, 32, 64)
Q, K, V, DOWN = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"
SIZES = {Q: (8, 8), V: (4, 8), DOWN: (8, 12)}
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}


def write(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **settings) -> Path:
    config = CONFIG | settings
    patterns = settings.get("rank_pattern")
    ranks = {Q: 2, V: 2, DOWN: 2} | (patterns if isinstance(patterns, dict) else {})
    made = {}
    for module, (outputs, inputs) in SIZES.items():
        name = f"base_model.model.model.layers.0.{module}"
        made[f"{name}.lora_A.weight"] = torch.randn(ranks[module], inputs)
        made[f"{name}.lora_B.weight"] = torch.randn(outputs, ranks[module])
    save_file(made | (tensors or {}), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "leave out"}))
    return directory


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as error:
        open_peft(directory)
    for word in (str(directory), *words):
        assert word in str(error.value)


# ---- PEFT


def test_factors_and_scales_are_read(tmp_path):
    files = open_peft(write(tmp_path))
    assert sorted(files.factors) == sorted(f"model.layers.0.{module}" for module in SIZES)
    factors = files.factors[f"model.layers.0.{V}"]
    assert (factors.rank, factors.scale, factors.shapes) == (2, 3.0, ((2, 8), (4, 2)))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    down, up = files.read(factors)
    assert torch.equal(down, stored[factors.down])
    assert torch.equal(up, stored[factors.up])


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"use_rslora": True}, {Q: 6 / 2**0.5, V: 6 / 2**0.5}),
        ({"alpha_pattern": {"q_proj": 10}}, {Q: 5.0, V: 3.0}),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 10, "v_proj": 1}}, {Q: 5.0, V: 0.5}),
        ({"alpha_pattern": {"(q|v)_proj": 8}}, {Q: 4.0, V: 4.0, DOWN: 3.0}),
        ({"alpha_pattern": {"proj": 8}}, {Q: 3.0}),
        ({"rank_pattern": {Q: 4}}, {Q: 1.5, V: 3.0}),
        ({"rank_pattern": {Q: 4}, "alpha_pattern": {"q_proj": 2}, "use_rslora": True}, {Q: 1.0}),
    ],
)
def test_patterns_stand_for_the_ends_of_names(tmp_path, settings, scales):
    files = open_peft(write(tmp_path, **settings))
    for module, scale in scales.items():
        assert files.factors[f"model.layers.0.{module}"].scale == pytest.approx(scale)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ".*(q|v|down)_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "model.layers.0.mlp.down_proj"]},
        {"init_lora_weights": "gaussian"},
        {
            "init_lora_weights": True,
            "fan_in_fan_out": True,
            "layers_to_transform": [0],
            "megatron_core": "megatron.core",
        },
        {"modules_to_save": None, "layer_replication": None, "a_setting_of_the_future": None, "another": False},
        {"peft_version": "9.9", "eva_config": {"rho": 2}, "lora_dropout": 0.1, "qalora_group_size": 16},
    ],
)
def test_settings_of_no_effect_here_are_accepted(tmp_path, settings):
    assert len(open_peft(write(tmp_path, **settings)).factors) == 3


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": "leave out"}, "peft_type"),
        ({"r": 0}, "r"),
        ({"r": "8"}, "r"),
        ({"r": True}, "r"),
        ({"r": "leave out"}, "r"),
        ({"r": 3}, "rank 2"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"a_setting_of_the_future": 3}, "a_setting_of_the_future"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"rank_pattern": {Q: 5, "x": 0}}, "rank_pattern.x"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern.q_proj"),
        ({"alpha_pattern": {"(a+)+": 8}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern"),
        ({"alpha_pattern": {"x" * 300: 8}}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "v_proj"]}, "down_proj"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": [1]}, "target_modules"),
    ],
)
def test_settings_that_change_more_are_refused_by_name(tmp_path, settings, key):
    write(tmp_path, **settings)
    refused(tmp_path, key)


NAME = f"base_model.model.model.layers.0.{K}"


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({f"{NAME}.lora_A.weight": torch.ones(2, 8)}, "lora_B"),
        ({f"{NAME}.lora_B.weight": torch.ones(4, 2)}, "lora_A"),
        ({f"{NAME}.lora_A.weight": torch.ones(2, 8), f"{NAME}.lora_B.weight": torch.ones(4, 3)}, "factors of shapes"),
        ({f"{NAME}.lora_A.weight": torch.ones(2), f"{NAME}.lora_B.weight": torch.ones(4, 2)}, "factors of shapes"),
        ({f"{NAME}.lora_magnitude_vector": torch.ones(8)}, "DoRA"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 8)}, "embedding"),
        ({"base_model.model.lm_head.weight": torch.ones(2, 8)}, "lm_head"),
        ({"model.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(2, 8)}, "no factor"),
        ({f"{NAME}.lora_A.bias": torch.ones(2)}, "no factor"),
    ],
)
def test_tensors_that_are_no_factors_are_refused_by_name(tmp_path, tensors, word):
    write(tmp_path, tensors, target_modules="all-linear")
    refused(tmp_path, word)


def test_numbers_that_are_none_are_refused(tmp_path):
    name = f"base_model.model.model.layers.0.{Q}.lora_A.weight"
    files = open_peft(write(tmp_path, {name: torch.full((2, 8), torch.nan)}))
    with pytest.raises(ModelFileError, match="infinite or NaN"):
        files.read(files.factors[f"model.layers.0.{Q}"])


def test_missing_files_and_pickles_are_refused(tmp_path):
    refused(tmp_path, "adapter_config.json")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "adapter_model.safetensors")
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps({}))
    refused(tmp_path, "adapter_model.bin", "pickle")
    (tmp_path / "adapter_config.json").write_text("[]")
    refused(tmp_path, "adapter_config.json")
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no low-rank factors")


def test_every_byte_counts_for_the_digest(tmp_path):
    first = open_peft(write(tmp_path)).digest
    assert open_peft(tmp_path).digest == first
    path = tmp_path / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    second = open_peft(tmp_path).digest
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    assert len({first, second, open_peft(tmp_path).digest}) == 3


# ---- GGUF


def write_gguf(path: Path, tensors: dict[str, np.ndarray] | None = None, **metadata) -> Path:
    writer = GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_string("general.type", metadata.get("type", "adapter"))
    writer.add_string("adapter.type", metadata.get("adapter_type", "lora"))
    if "alpha" not in metadata or metadata["alpha"] is not None:
        writer.add_float32("adapter.lora.alpha", metadata.get("alpha", 6.0))
    for key, value in metadata.get("more", {}).items():
        writer.add_string(key, value)
    rng = np.random.default_rng(1)
    made = {
        "blk.0.attn_q.weight.lora_a": rng.standard_normal((2, 8), dtype=np.float32),
        "blk.0.attn_q.weight.lora_b": rng.standard_normal((8, 2), dtype=np.float32),
        "blk.1.ffn_down.weight.lora_a": rng.standard_normal((4, 12), dtype=np.float32),
        "blk.1.ffn_down.weight.lora_b": rng.standard_normal((8, 4), dtype=np.float32).astype(np.float16),
    }
    for name, numbers in (made if tensors is None else made | tensors).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path):
    return open_gguf_adapter(path, gguf_dialect, SHAPE)


def test_a_gguf_adapter_is_read_in_hugging_face_order(tmp_path):
    files = opened(write_gguf(tmp_path / "a.gguf"))
    assert sorted(files.factors) == ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(size, dtype=np.float32) for size in ((2, 8), (8, 2)))
    query = files.factors["model.layers.0.self_attn.q_proj"]
    down, up = files.read(query)
    assert torch.equal(down, torch.from_numpy(a))
    heads = torch.from_numpy(b).view(2, 2, 2, 2)  # [heads, pairs, of a pair, r]: as llama.cpp's conversion leaves them
    assert torch.equal(up, heads.transpose(1, 2).reshape(8, 2))
    assert query.scale == 3.0
    assert files.factors["model.layers.1.mlp.down_proj"].scale == 1.5
    assert opened(write_gguf(tmp_path / "b.gguf", alpha=0.0)).factors["model.layers.1.mlp.down_proj"].scale == 1.0


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"type": "model"}, "general.type"),
        ({"adapter_type": "control_vector"}, "adapter.type"),
        ({"alpha": None}, "adapter.lora.alpha"),
        ({"alpha": float("nan")}, "adapter.lora.alpha"),
        ({"architecture": "nothing"}, "general.architecture"),
        ({"more": {"adapter.alora.invocation_tokens": "1"}}, "adapter.alora"),
        ({"tensors": {"blk.0.attn_k.weight.lora_a": np.ones((2, 8), np.float32)}}, "lora_b"),
        ({"tensors": {"blk.0.attn_k.weight": np.ones((4, 8), np.float32)}}, "no factor"),
        (
            {"tensors": {f"blk.0.stranger.weight.lora_{x}": np.ones((2, 2), np.float32) for x in "ab"}},
            "blk.0.stranger.weight",
        ),
    ],
)
def test_what_a_gguf_adapter_may_not_be(tmp_path, given, word):
    with pytest.raises(ModelFileError) as error:
        opened(write_gguf(tmp_path / "a.gguf", **given))
    assert word in str(error.value)
