"""Qwen3-VL with experts: `model_type` "qwen3_vl_moe" (Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B).

The text part only, as in `qwen3_vl`: a `qwen3_moe` whose expert weights are always normalised, and whose files mostly
store experts inputs first. GGUF files of the architecture "qwen3vlmoe" hold only the text model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.models import qwen3_moe
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen3_vl import VISION, accept_image_keys, axes_of_images, read_text
from penstock.models.text_part import text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_decoder import refuse_window
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]

_INNER = 1408


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = read_text(reader, "qwen3_vl_moe_text")
    text.expect("norm_topk_prob", [True], True)  # transformers does not read it here
    router = replace(qwen3_moe.read_router(text, experts=60, top_k=4), normalise=True)
    return qwen3_moe.build(text, text_weights(weights, VISION), router, inner=_INNER)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    accept_image_keys(keys)
    refuse_window(keys)
    return qwen3_moe.gguf_settings(keys) | {"use_sliding_window": False}


def _conversions(config: Mapping[str, Any]) -> Sequence[Conversion]:
    """Split fused experts as for `qwen3_moe`, after transposing those that are stored inputs first."""
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", _INNER)
    if hidden in (inner, 2 * inner):
        raise ModelFileError("", "moe_intermediate_size", f"{inner} beside a hidden size of {hidden} is not written")
    rows = {"gate_up_proj": 2 * inner, "down_proj": hidden}
    return [
        replace(each, parts={name: _of_outputs(rows[each.name.rpartition(".")[2]], make) for name, make in parts})
        for each, parts in ((each, each.parts.items()) for each in qwen3_moe.FUSED_EXPERTS)
    ]


def _of_outputs(outputs: int, make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`make` for an expert's matrix, transposed first if its first dimension is not `outputs`."""
    return lambda each: make(each if len(each) == outputs else each.T)


GGUF = GgufDialect(
    architecture="qwen3vlmoe",
    model_type="qwen3_vl_moe",
    tensors=qwen3_moe.GGUF.tensors,
    metadata=_gguf_settings,
    writing=GgufWriting(lambda config, _: axes_of_images(config, (24, 20, 20)), _conversions),
)
