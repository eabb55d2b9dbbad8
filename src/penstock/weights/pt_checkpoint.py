"""A GPT-2 in one `.pt` file, as RoseLLM's trainer saves it: `{"config": ..., "model": state dict}`.

Decides how its names map to Hugging Face's. Understands RoseLLM's own names (`token_embedding`,
`blocks.0.attn.qkv_proj`) and those of transformers' GPT-2. Files are loaded with torch's `weights_only`, which admits
only tensors and plain values, so no code in the pickle can run. The trainer's own state is left out; any other key is
refused by name.

Knows no other family and no safetensors.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.contract.errors import ModelFileError
from penstock.weights.source import TensorSource, convert_into

__all__ = ["PtCheckpoint", "PtSource", "read_pt"]

_TRAINING = frozenset({"optimizer", "step", "scaler", "extra"})
"""Keys of training state, which are left out."""

_SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
}
"""RoseLLM's name of a size -> transformers' name."""

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "relu": "relu"}

_WHOLE = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "ln_f.weight": "ln_f.weight",
    "ln_f.bias": "ln_f.bias",
}
_OF_A_BLOCK = {
    "ln1": "ln_1",
    "ln2": "ln_2",
    "attn.qkv_proj": "attn.c_attn",
    "attn.out_proj": "attn.c_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_PREFIXES = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel add to every name."""


@dataclass(frozen=True, slots=True)
class PtCheckpoint:
    """A GPT-2, with Hugging Face's names.

    Attributes:
        config: the contents of a `config.json`.
        tensors: under transformers' names and in its orientation.
        left_out: keys of training state in the file.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    left_out: tuple[str, ...]


class PtSource(TensorSource):
    """The tensors of a `.pt` file, already in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        self._tensors = dict(tensors)
        self._path = path

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._find(name).shape)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        tensor = self._find(name)
        if not tensor.is_floating_point():
            raise ModelFileError(str(self._path), name, f"has type {tensor.dtype}, which holds no weights")
        if out.shape != tensor.shape:
            raise ModelFileError(str(self._path), name, f"has shape {tuple(tensor.shape)}, expected {tuple(out.shape)}")
        convert_into(tensor, out, self._path, name)

    def _find(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ModelFileError(str(self._path), name, "the checkpoint has no such tensor")
        return self._tensors[name]


def read_pt(path: Path) -> PtCheckpoint:
    """Read a checkpoint.

    Raises:
        ModelFileError: it holds anything but tensors and plain values, or is not a GPT-2 checkpoint of this form.
    """
    content = _load(path)
    for key in ("config", "model"):
        if not isinstance(content.get(key), Mapping):
            raise ModelFileError(str(path), key, "is missing, or not a dictionary; the file must hold config and model")
    extra = sorted(content.keys() - {"config", "model"})
    unknown = [key for key in extra if key not in _TRAINING]
    if unknown:
        raise ModelFileError(str(path), ", ".join(unknown), "is not understood: neither model nor state of a training")
    state = dict(_named(path, content["model"]))
    ours = any(name.startswith("blocks.") for name in state)
    config = _own_config(path, content["config"]) if ours else _transformers_config(path, content["config"])
    _check_plain(path, config)
    tensors = dict(_renamed(path, state)) if ours else state
    return PtCheckpoint(config, tensors, tuple(extra))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = "cannot be read as tensors and plain values alone, and a pickle that holds more is never run"
        raise ModelFileError(str(path), "", f"{message}: {first[:200]}") from error
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ModelFileError(str(path), "", f"must hold a dictionary, got {type(content).__name__}")
    return content


def _named(path: Path, state: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelFileError(str(path), f"model.{name}", "must be a tensor under a name")
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        yield name, tensor


def _check_plain(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse values that a `config.json` cannot hold."""
    for name, value in config.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ModelFileError(str(path), f"config.{name}", f"is no plain value: {type(value).__name__}") from error


def _own_config(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True}
    for name, renamed in _SIZES.items():
        value = given.get(name)
        if type(value) is not int:
            raise ModelFileError(str(path), f"config.{name}", f"must be an integer, got {value!r}")
        config[renamed] = value
    activation = given.get("activation", "gelu")
    if activation not in _ACTIVATIONS:
        raise ModelFileError(str(path), "config.activation", f"{activation!r} is none of {', '.join(_ACTIVATIONS)}")
    for name, value in given.items():
        if name not in _SIZES and name not in ("activation", "dropout") and value and not name.startswith("use_"):
            raise ModelFileError(str(path), f"config.{name}", f"is not understood, got {value!r}")
    return config | {"activation_function": _ACTIVATIONS[activation], "layer_norm_epsilon": 1e-5}


def _transformers_config(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("model_type", "gpt2")
    if kind != "gpt2":
        raise ModelFileError(str(path), "config.model_type", f"must be gpt2, got {kind!r}")
    return {str(name): value for name, value in given.items()} | {"model_type": "gpt2"}


def _renamed(path: Path, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename to transformers' names; transpose projections, which transformers stores as `[inputs, outputs]`."""
    for name, tensor in state.items():
        block = _BLOCK.fullmatch(name)
        if name == "lm_head.weight":
            yield name, tensor
        elif name in _WHOLE:
            yield f"transformer.{_WHOLE[name]}", tensor
        elif block is not None and block[2] in _OF_A_BLOCK:
            turned = tensor.t().contiguous() if tensor.ndim == 2 else tensor
            yield f"transformer.h.{block[1]}.{_OF_A_BLOCK[block[2]]}.{block[3]}", turned
        else:
            raise ModelFileError(str(path), f"model.{name}", "is no tensor of a GPT-2")
