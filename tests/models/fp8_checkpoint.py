"""A checkpoint's projections in FP8, as DeepSeek's and compressed-tensors' checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0
"""Of E4M3."""

BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [16, 128], "activation_scheme": "dynamic"}


def in_e4m3(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, K]` as codes, and a scale for each block of rows and inputs: its largest number becomes `LARGEST`."""
    rows, inputs = matrix.shape
    down, across = torch.arange(rows) // block[0], torch.arange(inputs) // block[1]
    height, width = -(-rows // block[0]), -(-inputs // block[1])
    places = (down[:, None] * width + across).flatten()
    largest = torch.zeros(height * width).scatter_reduce(0, places, matrix.abs().flatten().float(), "amax")
    scales = (largest / LARGEST).clamp(min=1e-12).view(height, width)
    return (matrix.float() / scales[down][:, across]).to(torch.float8_e4m3fn), scales


def numbers_of(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What codes and scales stand for, in float32."""
    down, across = torch.arange(codes.shape[0]) // block[0], torch.arange(codes.shape[1]) // block[1]
    return codes.float() * scales[down][:, across]


def write_in_fp8(plain: Path, quantised: Path, *, channels: bool = False) -> None:
    """Write the projections of `plain` in FP8 to `quantised`, and in `plain` the numbers that they stand for.

    Args:
        plain: a directory as transformers writes it; embeddings, routers, norms and heads stay in both.
        quantised: a directory to be made.
        channels: a scale for each row, as compressed-tensors has them, not for each block of 16 x 128.
    """
    numbers, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in numbers.items():
        if "_proj" not in name or name.endswith("bias"):
            stored[name] = tensor
            continue
        block = (1, tensor.shape[-1]) if channels else (16, 128)
        each = [in_e4m3(matrix, block) for matrix in tensor.view(-1, *tensor.shape[-2:])]
        codes, scales = (
            torch.stack(parts).view(*tensor.shape[:-2], *parts[0].shape) for parts in zip(*each, strict=True)
        )
        stored[name], stored[f"{name}_scale{'' if channels else '_inv'}"] = codes, scales
        made = [numbers_of(*parts, block) for parts in each]
        numbers[name] = torch.stack(made).view(tensor.shape).to(tensor.dtype)
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    quantised.mkdir()
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    config["quantization_config"] = section if channels else BLOCKS
    (quantised / "config.json").write_text(json.dumps(config))
