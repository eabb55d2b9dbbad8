"""Writes a Hugging Face directory as a GGUF file in bfloat16, for llama.cpp's quantiser.

Names come from the map of the official `gguf` package, metadata and the order of rows from llama.cpp's conversion. It
uses nothing of Penstock, so that Penstock has no part in reading what the other engines compute on. It takes what
`bench/make_random_checkpoint.py` writes for the families below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["ARCHITECTURES", "write_gguf"]

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""GGUF's name of each `model_type`."""

_ENDINGS = (".weight", ".bias")
_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<number>\d+)\.(?P<after>.*)")
_ROUTER = "ffn_gate_inp"
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys below the architecture's name, and what `config.json` calls them, if it has them."""

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
_NEVER_MERGED = "\u00ff"
"""How byte-level vocabularies write the byte 0xFF, which no UTF-8 text holds."""


def write_gguf(directory: Path, target: Path) -> None:
    """Write the model of a directory: matrices in bfloat16, vectors and routers in float32.

    Raises:
        ValueError: the family, tokenizer or rope is not supported here, or GGUF has no name for a tensor.
    """
    config = _read_json(directory / "config.json")
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise ValueError(f"{directory}: {family} is not written as GGUF; families are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in (_metadata(directory, config, architecture) | _vocabulary(directory, config)).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(_architecture(architecture), config["num_hidden_layers"])
    tensors = _Tensors(directory)
    stored = {name: names.get_name(name, try_suffixes=_ENDINGS) for name in tensors.shapes}
    for name, new_name in stored.items():
        if new_name is None:
            raise ValueError(f"{directory}: GGUF has no name for {name} in a {architecture}")
        kind, size = _kind(new_name, tensors.shapes[name])
        shape = (*tensors.shapes[name][:-1], tensors.shapes[name][-1] * size)
        writer.add_tensor_info(new_name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, new_name in stored.items():
        rows = _arranged(name, tensors.read(name), config)
        dtype = torch.float32 if _kind(new_name, tuple(rows.shape))[1] == 4 else torch.bfloat16
        writer.write_tensor_data(rows.to(dtype).contiguous().view(torch.uint8).numpy())
    writer.close()


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def _kind(name: str, shape: tuple[int, ...]) -> tuple[gguf.GGMLQuantizationType, int]:
    """Return the type of a stored tensor, and its bytes per element."""
    if len(shape) == 1 or _ROUTER in name:
        return gguf.GGMLQuantizationType.F32, 4
    return gguf.GGMLQuantizationType.BF16, 2


class _Tensors:
    """Reads the tensors of a directory, file by file; the experts of one matrix of one layer are stacked.

    Attributes:
        shapes: by name; a stack has shape `[E, out, in]` and the experts' name without their number.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Path] = {}
        self._parts: dict[str, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 (it is no mapping)
                    self._files[name] = file
                    expert = _EXPERT.fullmatch(name)
                    whole = expert["before"] + expert["after"] if expert else name
                    self._parts.setdefault(whole, []).append(name)
                    shape = tuple(held.get_slice(name).get_shape())
                    self.shapes[whole] = (len(self._parts[whole]), *shape) if expert else shape
        for parts in self._parts.values():
            parts.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def read(self, name: str) -> Tensor:
        parts = list(self._read_each(self._parts[name]))
        return torch.stack(parts) if len(self.shapes[name]) == 3 else parts[0]

    def _read_each(self, names: list[str]) -> Iterator[Tensor]:
        for name in names:
            with safe_open(self._files[name], framework="pt") as held:
                yield held.get_tensor(name)


def _arranged(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Order rows as llama.cpp does: in a Llama's queries and keys, the two rows that rope rotates lie side by side."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = next((config[size] for part, size in heads.items() if f".{part}." in name), None)
    if config["model_type"] != "llama" or found is None:
        return tensor
    halves = tensor.reshape(found, 2, tensor.shape[0] // found // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _metadata(directory: Path, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{directory}: a rope of type {rope['rope_type']} is not written as GGUF")
    keys = {key: config[name] for key, name in _SIZES.items() if config.get(name) is not None}
    keys |= {"rope.freq_base": float(rope["rope_theta"]), "attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
    if architecture == "llama":
        keys |= {"rope.dimension_count": config["head_dim"], "vocab_size": config["vocab_size"]}
    return {"general.name": directory.name} | {f"{architecture}.{key}": value for key, value in keys.items()}


def _vocabulary(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a byte-level BPE vocabulary, filled up to the number of rows of the embedding.

    A GGUF file cannot hold an empty list of merges, and llama.cpp needs the list: a vocabulary without merges gets one
    that no text can ever use; its result takes the first unused row.
    """
    tokenizer = _read_json(directory / "tokenizer.json")
    if tokenizer["model"]["type"] != "BPE" or tokenizer["pre_tokenizer"]["type"] != "ByteLevel":
        raise ValueError(f"{directory}: only a byte-level BPE as of GPT-2 is written as GGUF")
    ids = dict(tokenizer["model"]["vocab"])
    marks = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    left = [number for number in range(config["vocab_size"]) if number not in {*ids.values(), *marks.values()}]
    unused = {f"[unused {number}]": number for number in left}
    if not merges:
        if not left:
            raise ValueError(f"{directory}: the vocabulary must have a row for a merge, of which GGUF needs one")
        merges, ids[2 * _NEVER_MERGED] = [f"{_NEVER_MERGED} {_NEVER_MERGED}"], left[0]
        del unused[f"[unused {left[0]}]"]
    kinds = dict.fromkeys(ids, _NORMAL) | dict.fromkeys(marks, _CONTROL) | dict.fromkeys(unused, _UNUSED)
    every = ids | marks | unused
    tokens = sorted(every, key=lambda token: every[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds[token] for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)
