"""Writes a Llama with wider rows that computes the same, for formats whose blocks its own rows do not fill.

    python bench/widen_checkpoint.py CHECKPOINT TARGET [--multiple 256]

Zeros pad the hidden size, the heads (with their groups) and the width of MLPs to the next multiple. A head of zeros
adds nothing, and a norm over more numbers of which the new ones are 0 is the old norm with its weights and its epsilon
scaled: `x / sqrt(sum / n + eps)` is `sqrt(m / n) * x / sqrt(sum / m + eps * m / n)` for m old and n new numbers. So
SmolLM2-135M, whose rows of 576 are no multiple of a super-block of 256, can be quantised to every kind of GGUF block.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

__all__ = ["main", "widen", "widened_config"]

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def widened_config(config: dict[str, Any], multiple: int) -> dict[str, Any]:
    """The settings of the wider model.

    Raises:
        ValueError: the model is not a Llama, or has biases.
    """
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"only a Llama without biases can be widened, got {config['model_type']}")
    heads, kv_heads, head_dim = _heads(config)
    group = heads // kv_heads
    wider = next(n for n in range(kv_heads, kv_heads + multiple + 1) if n * group * head_dim % multiple == 0)
    hidden = _rounded_up(config["hidden_size"], multiple)
    return config | {
        "hidden_size": hidden,
        "intermediate_size": _rounded_up(config["intermediate_size"], multiple),
        "num_attention_heads": wider * group,
        "num_key_value_heads": wider,
        "head_dim": head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / hidden,
    }


def widen(checkpoint: Path, target: Path, multiple: int) -> None:
    """Write the wider model: matrices in their own dtype, norms in float32.

    Raises:
        ValueError: as `widened_config`.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    wider = widened_config(config, multiple)
    shrunk = math.sqrt(config["hidden_size"] / wider["hidden_size"])
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    filled = {name: _filled(name, tensor, wider, shrunk) for file in files for name, tensor in file.items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(filled, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(wider, indent=2), encoding="utf-8")
    for name in _COPIED:
        if (checkpoint / name).is_file():
            shutil.copy2(checkpoint / name, target)


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return heads, config.get("num_key_value_heads") or heads, head_dim


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _filled(name: str, tensor: Tensor, config: dict[str, Any], shrunk: float) -> Tensor:
    """A tensor with zeros after its rows and columns."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    if tensor.ndim == 1:
        return functional.pad(tensor.float() * shrunk, (0, hidden - len(tensor)))
    rows, columns = tensor.shape
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    outputs = {"q_proj": query, "k_proj": key, "v_proj": key, "gate_proj": inner, "up_proj": inner}
    outputs |= {"o_proj": hidden, "down_proj": hidden}
    inputs = {"o_proj": query, "down_proj": inner}
    module = name.split(".")[-2]
    wide_rows, wide_columns = outputs.get(module, rows), inputs.get(module, hidden)
    return functional.pad(tensor, (0, wide_columns - columns, 0, wide_rows - rows))


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face directory")
    parser.add_argument("target", type=Path, help="the directory to write")
    parser.add_argument("--multiple", type=int, default=256, help="what every row is to be a multiple of")
    options = parser.parse_args()
    try:
        widen(options.checkpoint, options.target, options.multiple)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
