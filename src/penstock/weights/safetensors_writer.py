"""Writing a model directory: `config.json` and `model.safetensors`, by the format's own rules.

See https://github.com/huggingface/safetensors#format: header length, JSON header, then the tensors without holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.contract.errors import ConfigError

__all__ = ["write_model_directory"]

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_ALIGNMENT = 8


def write_model_directory(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a model into a directory, which is made if need be and must not hold one.

    Raises:
        ConfigError: there is a model already, a tensor holds no weights, or the files cannot be written.
    """
    for name in ("config.json", "model.safetensors"):
        if (directory / name).exists():
            raise ConfigError("OUT_DIR", f"{directory / name} exists already")
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError("IN.pt", f"{name} is of type {tensor.dtype}, which holds no weights")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_tensors(directory / "model.safetensors", tensors)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("OUT_DIR", f"{directory} cannot be written: {error.strerror}") from error


def _write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in sorted(tensors.items()):
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in sorted(tensors.items()):
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
