"""Qwen2-MoE and Qwen1.5-MoE: `model_type` "qwen2_moe" (Yang et al. 2024, section 2.2.2).

Qwen2's attention, and in place of most MLPs a mixture of experts with a gated shared expert, which computes every
token. With `use_sliding_window`, every other layer below `max_window_layers` has the window, starting with the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernels.experts import RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WIDTH, MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.models.qwen2 import gguf_settings
from penstock.models.qwen3_moe import EXPERT_TENSORS, FUSED_EXPERTS, bind_mixture, dense_layers, read_router
from penstock.nn.blocks import Block, GatedMlp, MixtureOfExperts, Projection
from penstock.nn.operations import GateRows, Operations
from penstock.nn.program import Program
from penstock.nn.register import Register
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "SHARED_EXPERT_GATE", "SHARED_EXPERT_TENSORS", "SharedExpert", "bind_shared_expert", "load"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """`routed(x) + sigmoid(gate(x)) * shared(x)`.

    Attributes:
        gate: `[1, H]`.
    """

    routed: MixtureOfExperts
    shared: GatedMlp
    gate: Projection

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        branch, logit = Register("branch", out.width), Register("shared_gate", 1)
        return (
            *self.routed(x, out, adds=adds),
            *self.shared(x, branch, adds=False),
            self.gate.linear(logit, x),
            GateRows(out, branch, logit),
        )


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    bias = reader.boolean("qkv_bias", default=True)
    router = read_router(reader, experts=60, top_k=4)
    inner = reader.integer("moe_intermediate_size", 1, MAX_WIDTH, default=1408)
    shared = reader.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, default=5632)
    config = read_decoder(reader, windows=_read_windows(reader))
    dense = dense_layers(reader, config.shape.num_layers)
    parts = DecoderParts(config, weights)

    def layer(index: int, name: str) -> Operations:
        experts = index not in dense
        mlp: Block = (
            bind_shared_expert(parts, f"{name}.mlp", router, inner, shared) if experts else parts.mlp(f"{name}.mlp")
        )
        return parts.pre_norm_layer(name, parts.attention(f"{name}.self_attn", index, qkv_bias=bias), mlp)

    return parts.program(layer)


def bind_shared_expert(parts: DecoderParts, name: str, router: RouterSpec, inner: int, shared: int) -> SharedExpert:
    """Take the router, the experts and the shared expert under `name`.

    Args:
        parts: the model's parts.
        name: prefix of the tensors.
        router: how experts are chosen.
        inner: hidden width of one expert.
        shared: hidden width of the shared expert.
    """
    weights, hidden = parts.weights, parts.config.shape.hidden_size
    return SharedExpert(
        routed=bind_mixture(weights, name, router, hidden, inner),
        shared=parts.mlp(f"{name}.shared_expert", inner_size=shared),
        gate=Projection(weights.take_router(f"{name}.shared_expert_gate.weight", (1, hidden))),
    )


def _read_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    window, end = None, 0
    if reader.boolean("use_sliding_window", default=False):
        window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
        end = reader.integer("max_window_layers", 0, MAX_WINDOW, default=28)
    return layer_windows(reader, window, lambda layer: layer < end and layer % 2 == 0)


def _settings(keys: GgufKeys) -> dict[str, Any]:
    """Files have experts in every layer, without normalised weights; missing sizes get llama.cpp's defaults."""
    settings, used = gguf_settings(keys), keys.size("expert_used_count")
    inner = settings["intermediate_size"]
    return settings | {
        "qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.size("expert_feed_forward_length", max(inner // used, 1)),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", inner),
        "norm_topk_prob": False,
    }


_MLP = "model.layers.{layer}.mlp"

SHARED_EXPERT_TENSORS: Mapping[str, str] = {
    "blk.{layer}.ffn_gate_inp_shexp": f"{_MLP}.shared_expert_gate",
    "blk.{layer}.ffn_gate_shexp": f"{_MLP}.shared_expert.gate_proj",
    "blk.{layer}.ffn_up_shexp": f"{_MLP}.shared_expert.up_proj",
    "blk.{layer}.ffn_down_shexp": f"{_MLP}.shared_expert.down_proj",
}
"""The tensors of a gated shared expert; see `GgufDialect.tensors`."""

SHARED_EXPERT_GATE: Mapping[str, Arrangement] = {"blk.{layer}.ffn_gate_inp_shexp.weight": Arrangement.ROW}
"""The arrangement of its gate; see `GgufDialect.arrangements`."""

GGUF = GgufDialect(
    architecture="qwen2moe",
    model_type="qwen2_moe",
    tensors={
        **EXPERT_TENSORS,
        **SHARED_EXPERT_TENSORS,
    },
    metadata=_settings,
    arrangements=SHARED_EXPERT_GATE,
    writing=GgufWriting(conversions=lambda _: FUSED_EXPERTS),
)
