"""Qwen 3.5's and 3.6's text models with experts: `model_type` "qwen3_5_moe_text" (Qwen Team 2026).

The layers of `qwen3_5_text`, each with a mixture of experts in place of its MLP: a softmax over all, top-k with
normalised weights, and a gated shared expert (`qwen2_moe`).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WIDTH, DecoderParts
from penstock.models.qwen2_moe import bind_shared_expert
from penstock.models.qwen3_5_text import build
from penstock.models.qwen3_moe import read_router
from penstock.nn.blocks import Block
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    router = replace(read_router(reader, experts=256, top_k=8), normalise=True)
    inner = reader.integer("moe_intermediate_size", 1, MAX_WIDTH, default=512)
    shared = reader.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, default=512)

    def mlp(parts: DecoderParts, _: int, name: str) -> Block:
        return bind_shared_expert(parts, name, router, inner, shared)

    return build(reader, weights, mlp, inner_size=inner)
