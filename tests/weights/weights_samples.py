"""Tiny checkpoints for the tests of weights, written by the official `safetensors` and `gguf` packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

VOCAB, WIDTH, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 48, 64, 4, 2, 96, 2, 128
EXPERTS, EXPERT_INNER = 5, 32
ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3", "qwen3moe")
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


@dataclass(frozen=True)
class Tiny:
    """What varies between the tiny models."""

    architecture: str = "llama"
    tied: bool = False
    attention_bias: bool = False
    head_dim: int = WIDTH // HEADS


def shapes(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a tiny model, from the model classes of transformers."""
    if tiny.architecture == "gpt2":
        found = {
            "transformer.wte.weight": (VOCAB, WIDTH),
            "transformer.wpe.weight": (CONTEXT, WIDTH),
            "transformer.ln_f.weight": (WIDTH,),
            "transformer.ln_f.bias": (WIDTH,),
        }
        for layer in range(LAYERS):
            block = f"transformer.h.{layer}."
            for norm in ("ln_1", "ln_2"):
                found |= {f"{block}{norm}.weight": (WIDTH,), f"{block}{norm}.bias": (WIDTH,)}
            for name, rows, columns in (
                ("attn.c_attn", WIDTH, 3 * WIDTH),
                ("attn.c_proj", WIDTH, WIDTH),
                ("mlp.c_fc", WIDTH, INNER),
                ("mlp.c_proj", INNER, WIDTH),
            ):
                found |= {f"{block}{name}.weight": (rows, columns), f"{block}{name}.bias": (columns,)}
    else:
        found = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
        query, key = HEADS * tiny.head_dim, KV_HEADS * tiny.head_dim
        for layer in range(LAYERS):
            block = f"model.layers.{layer}."
            found |= {f"{block}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
            for name, rows in (("q", query), ("k", key), ("v", key)):
                found[f"{block}self_attn.{name}_proj.weight"] = (rows, WIDTH)
                if tiny.architecture == "qwen2" or tiny.attention_bias:
                    found[f"{block}self_attn.{name}_proj.bias"] = (rows,)
            found[f"{block}self_attn.o_proj.weight"] = (WIDTH, query)
            if tiny.attention_bias:
                found[f"{block}self_attn.o_proj.bias"] = (WIDTH,)
            if tiny.architecture in ("qwen3", "qwen3moe"):
                found |= {f"{block}self_attn.{name}_norm.weight": (tiny.head_dim,) for name in "qk"}
            found |= _mlp_shapes(tiny, f"{block}mlp.")
    if not tiny.tied:
        found["lm_head.weight"] = (VOCAB, WIDTH)
    return found


def _mlp_shapes(tiny: Tiny, name: str) -> dict[str, tuple[int, ...]]:
    if tiny.architecture != "qwen3moe":
        up = {f"{name}{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")}
        return up | {f"{name}down_proj.weight": (WIDTH, INNER)}
    up = {f"{name}experts.{part}_proj.weight": (EXPERTS, EXPERT_INNER, WIDTH) for part in ("gate", "up")}
    down = {f"{name}experts.down_proj.weight": (EXPERTS, WIDTH, EXPERT_INNER)}
    return up | down | {f"{name}gate.weight": (EXPERTS, WIDTH)}


def weights(tiny: Tiny, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a tiny model, float32, in Hugging Face orientation."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(tiny).items()}


def config(tiny: Tiny) -> dict[str, Any]:
    """The Hugging Face config of a tiny model."""
    if tiny.architecture == "gpt2":
        return {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCAB}
    return {"model_type": tiny.architecture, "hidden_size": WIDTH, "vocab_size": VOCAB}


def write_directory(directory: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    """A model directory with one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]], settings: dict[str, Any]) -> Path:
    """A model directory with several safetensors files and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def gguf_metadata(tiny: Tiny) -> dict[str, Any]:
    """The keys that llama.cpp's conversion writes for such a model, below the architecture's prefix."""
    keys: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
    }
    if tiny.architecture == "gpt2":
        return keys | {"attention.layer_norm_epsilon": 1e-5}
    keys |= {"attention.head_count_kv": KV_HEADS, "rope.freq_base": 5000.0, "attention.layer_norm_rms_epsilon": 1e-6}
    if tiny.architecture == "llama":
        keys |= {"rope.dimension_count": tiny.head_dim, "vocab_size": VOCAB}
    if tiny.architecture == "qwen3moe":
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_INNER}
    if tiny.head_dim != WIDTH // HEADS:
        keys |= {"attention.key_length": tiny.head_dim, "attention.value_length": tiny.head_dim}
    return keys


def to_gguf(tiny: Tiny, name: str, tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """A tensor as a GGUF file has it: name by the official map, rows as llama.cpp's conversion arranges them."""
    arch = getattr(gguf.MODEL_ARCH, tiny.architecture.upper())
    stored = gguf.get_tensor_name_map(arch, LAYERS).get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    array = tensor.numpy()
    if tiny.architecture == "gpt2" and name.endswith(CONV1D):
        array = array.T
    if tiny.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = HEADS if ".q_proj." in name else KV_HEADS
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        array = halves.swapaxes(1, 2).reshape(array.shape)
    return stored, np.ascontiguousarray(array)


def write_gguf(
    path: Path,
    tiny: Tiny,
    tensors: dict[str, torch.Tensor],
    quantisation: str | Mapping[str, str] = "F32",
    keys: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    vocabulary: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file whose matrices have one type; `keys` override the metadata (None removes a key).

    `quantisation` may also map parts of names to types; "" is for all others.
    """
    writer = gguf.GGUFWriter(path, tiny.architecture)
    for key, value in (gguf_metadata(tiny) | (keys or {})).items():
        if value is not None:
            _add(writer, f"{tiny.architecture}.{key}", value)
    for key, value in (default_vocabulary() | (vocabulary or {})).items():
        if value is not None:
            _add(writer, f"tokenizer.{key}", value)
    kinds = {"": quantisation} if isinstance(quantisation, str) else quantisation
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[next((kinds[part] for part in kinds if part and part in name), kinds[""])]
        stored, array = to_gguf(tiny, name, tensor)
        if array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds |= {list: writer.add_array}
    kinds[type(value)](key, value)


def default_vocabulary() -> dict[str, Any]:
    """A byte-level BPE vocabulary of VOCAB tokens."""
    tokens = ["<unk>", "<s>", "</s>"] + [chr(97 + index) for index in range(26)]
    tokens += [f"x{index}" for index in range(VOCAB - len(tokens))]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
        "ggml.merges": ["a b", "b c"],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_bos_token": False,
        "chat_template": "{{ messages }}",
    }


def with_gguf_layout(tiny: Tiny) -> Tiny:
    """The same model as its family really is: Qwen 3 has heads whose width is not hidden_size / heads."""
    return replace(tiny, head_dim=32) if tiny.architecture == "qwen3" else tiny
