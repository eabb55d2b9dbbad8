"""Qwen3-MoE: `model_type` "qwen3_moe" (Qwen3-30B-A3B, Qwen3-235B-A22B).

Qwen3's attention, and in place of most MLPs a mixture of experts: a softmax over all of them, then top-k. A layer keeps
a dense MLP if `mlp_only_layers` lists it or `decoder_sparse_step` skips it. With `use_sliding_window` every layer has
the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.kernels.experts import RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    MAX_WINDOW,
    DecoderParts,
    layer_windows,
    read_decoder,
)
from penstock.nn.blocks import MixtureOfExperts, Projection
from penstock.nn.experts import bind_experts
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = [
    "EXPERT_TENSORS",
    "FUSED_EXPERTS",
    "GGUF",
    "bind_mixture",
    "build",
    "dense_layers",
    "gguf_settings",
    "load",
    "read_router",
]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    router = read_router(reader, experts=128, top_k=8)
    return build(reader, weights, router, inner=768, windows=_read_windows(reader))


def build(
    reader: ConfigReader,
    weights: WeightLoader,
    router: RouterSpec,
    *,
    inner: int,
    windows: tuple[int | None, ...] | None = None,
) -> Program:
    """Build a Qwen3 with experts.

    Args:
        reader: the config.
        weights: the checkpoint.
        router: how experts are chosen.
        inner: the family's default for `moe_intermediate_size`.
        windows: see `read_decoder`.
    """
    reader.expect("hidden_act", ["silu"], "silu")
    bias = reader.boolean("attention_bias", default=False)
    inner = reader.integer("moe_intermediate_size", 1, MAX_WIDTH, default=inner)
    config = read_decoder(reader, windows=windows)
    dense = dense_layers(reader, config.shape.num_layers)
    parts = DecoderParts(config, weights)
    head_dim, hidden = config.shape.head_dim, config.shape.hidden_size

    def layer(index: int, name: str) -> Operations:
        attn = f"{name}.self_attn"
        norms = parts.norm(f"{attn}.q_norm", head_dim), parts.norm(f"{attn}.k_norm", head_dim)
        attention = parts.attention(attn, index, qkv_bias=bias, output_bias=bias, norms=norms)
        experts = index not in dense
        mlp = bind_mixture(weights, f"{name}.mlp", router, hidden, inner) if experts else parts.mlp(f"{name}.mlp")
        return parts.pre_norm_layer(name, attention, mlp)

    return parts.program(layer)


def bind_mixture(weights: WeightLoader, name: str, router: RouterSpec, hidden: int, inner: int) -> MixtureOfExperts:
    """Take the router `name.gate` and the experts under `name.experts`.

    Args:
        weights: the checkpoint.
        name: prefix of the tensors.
        router: how experts are chosen.
        hidden: width of the stream.
        inner: hidden width of one expert.
    """
    gate = Projection(weights.take_router(f"{name}.gate.weight", (router.experts, hidden)))
    stack = bind_experts(weights, f"{name}.experts", experts=router.experts, hidden=hidden, intermediate=inner)
    return MixtureOfExperts(gate, stack, router)


def read_router(reader: ConfigReader, *, experts: int, top_k: int) -> RouterSpec:
    """How a Qwen chooses experts; `experts` and `top_k` are the family's defaults."""
    names = [name for name in ("num_experts", "num_local_experts") if reader.is_set(name)] or ["num_experts"]
    counts = [reader.integer(name, 1, MAX_EXPERTS, default=experts) for name in names]
    if len(set(counts)) > 1:
        raise reader.error("num_local_experts", f"{counts[1]} contradicts num_experts ({counts[0]})")
    return RouterSpec(
        experts=counts[0],
        top_k=reader.integer("num_experts_per_tok", 1, counts[0], default=top_k),
        scoring="softmax",
        normalise=reader.boolean("norm_topk_prob", default=False),
    )


def _read_windows(reader: ConfigReader) -> tuple[int | None, ...] | None:
    if not reader.boolean("use_sliding_window", default=False):
        return None
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
    return layer_windows(reader, window, lambda _: True)


def dense_layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """Indices of the layers that have an MLP and no experts."""
    step = reader.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    skipped = {layer for layer in range(layers) if (layer + 1) % step}
    return frozenset(skipped | set(reader.integers("mlp_only_layers", 0, MAX_LAYERS)))


def gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """GGUF files have experts in every layer and do not store `norm_topk_prob`: llama.cpp always normalises."""
    window = keys.window()
    return decoder_settings(keys) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


_MLP = "model.layers.{layer}.mlp"

EXPERT_TENSORS: Mapping[str, str] = {
    **{name: theirs for name, theirs in DECODER_TENSORS.items() if not theirs.startswith(_MLP)},
    "blk.{layer}.ffn_gate_inp": f"{_MLP}.gate",
    "blk.{layer}.ffn_gate_exps": f"{_MLP}.experts.gate_proj",
    "blk.{layer}.ffn_up_exps": f"{_MLP}.experts.up_proj",
    "blk.{layer}.ffn_down_exps": f"{_MLP}.experts.down_proj",
}
"""The tensors of a Llama with experts in place of every MLP; see `GgufDialect.tensors`."""

FUSED_EXPERTS = (
    Conversion(
        f"{_MLP}.experts.gate_up_proj",
        {
            f"{_MLP}.experts.gate_proj.weight": lambda each: each.chunk(2)[0],
            f"{_MLP}.experts.up_proj.weight": lambda each: each.chunk(2)[1],
        },
        sliced=True,
    ),
    Conversion(f"{_MLP}.experts.down_proj", {f"{_MLP}.experts.down_proj.weight": lambda each: each}, sliced=True),
)
"""Conversions for newer checkpoints, which stack all experts in one tensor, with gate rows before up rows."""

GGUF = GgufDialect(
    architecture="qwen3moe",
    model_type="qwen3_moe",
    tensors={
        **EXPERT_TENSORS,
        "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
        "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    },
    metadata=gguf_settings,
    writing=GgufWriting(conversions=lambda _: FUSED_EXPERTS),
)
