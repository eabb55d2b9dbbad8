"""Qwen3-Next: `model_type` "qwen3_next" (Qwen Team 2025).

The layers of `qwen3_5_text` with the experts of `qwen2_moe`, except that a layer keeps a dense MLP if `mlp_only_layers`
lists it or `decoder_sparse_step` skips it. Checkpoints fuse the input projections of delta nets per key head: query,
key, values and gates in one tensor, and the write strengths and decays of its value heads in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WIDTH, DecoderParts
from penstock.models.qwen2_moe import bind_shared_expert
from penstock.models.qwen3_5 import GGUF as DENSE
from penstock.models.qwen3_5 import file_settings
from penstock.models.qwen3_5_moe import MOE_ARRANGEMENTS, MOE_TENSORS, moe_settings
from penstock.models.qwen3_5_text import build
from penstock.models.qwen3_moe import FUSED_EXPERTS, dense_layers, read_router
from penstock.nn.blocks import Block
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader = reader.with_defaults({"norm_topk_prob": True})
    router = read_router(reader, experts=512, top_k=10)
    inner = reader.integer("moe_intermediate_size", 1, MAX_WIDTH, default=512)
    shared = reader.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, default=512)
    dense = dense_layers(reader, reader.integer("num_hidden_layers", 1, MAX_LAYERS))
    inner_size = reader.integer("intermediate_size", 1, MAX_WIDTH, default=5632)

    def mlp(parts: DecoderParts, index: int, name: str) -> Block:
        if index in dense:
            return parts.mlp(name)
        return bind_shared_expert(parts, name, router, inner, shared)

    return build(reader, weights, mlp, inner_size=inner_size)


def _settings(keys: GgufKeys) -> dict[str, Any]:
    return moe_settings(keys, tiled=False) | {"norm_topk_prob": True}


_MIXER = "model.layers.{layer}.linear_attn"


def _conversions(config: Mapping[str, Any]) -> list[Conversion]:
    """Split the fused input projection into queries, keys and values of all heads, and gates."""
    heads, width = config.get("linear_num_key_heads", 16), config.get("linear_key_head_dim", 128)
    values = config.get("linear_num_value_heads", 32) // heads * config.get("linear_value_head_dim", 128)
    widths = (width, width, values, values)
    q, k, v, z = torch.arange(heads * sum(widths)).view(heads, -1).split(widths, dim=1)
    orders = {"qkv": torch.cat([each.flatten() for each in (q, k, v)]), "z": z.flatten()}
    parts = {
        f"{_MIXER}.in_proj_{part}.weight": partial(torch.index_select, dim=0, index=order)
        for part, order in orders.items()
    }
    return [Conversion(f"{_MIXER}.in_proj_qkvz.weight", parts), *FUSED_EXPERTS]


GGUF = GgufDialect(
    architecture="qwen3next",
    model_type="qwen3_next",
    tensors={
        **{name: theirs for name, theirs in MOE_TENSORS.items() if "ssm_alpha" not in name and "ssm_beta" not in name},
        "blk.{layer}.ssm_ba": f"{_MIXER}.in_proj_ba",
        "blk.{layer}.ssm_in": f"{_MIXER}.in_proj_qkvz",  # in older files
    },
    metadata=_settings,
    arrangements=MOE_ARRANGEMENTS,
    whole=DENSE.whole,
    writing=GgufWriting(file_settings, _conversions),
)
"""Newer files store queries, keys and values separately from gates; value heads are in Hugging Face's order."""
