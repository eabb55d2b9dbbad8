"""gpt-oss: `model_type` "gpt_oss" (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2).

A mixture of experts in every layer, with biases on routers, experts and attention, and a gated activation that is
clamped on both sides. Every other layer has a sliding window, starting with the first. Each head has a sink, a logit
that takes part in the softmax over scores but adds no value. RoPE uses YaRN scaling.

Checkpoints store experts in MXFP4 (`weights.mxfp4_safetensors`), or plain and inputs first; both interleave the rows of
gate and up projections. GGUF files store the two separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.experts import ExpertStack, RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_EXPERTS, MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.nn.blocks import MixtureOfExperts, Projection
from penstock.nn.operations import Activation, Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.source import TensorSource

__all__ = ["GGUF", "load"]

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE scaling for a config without rotary parameters."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    reader.expect("swiglu_alpha", [1.702], 1.702)
    reader.expect("swiglu_limit", [7, 7.0], 7.0)
    if not (reader.is_set("rope_scaling") or reader.is_set("rope_parameters")):
        reader = reader.with_defaults({"rope_scaling": _YARN})
    bias = reader.boolean("attention_bias", default=True)
    count = reader.integer("num_local_experts", 1, MAX_EXPERTS, default=128)
    top_k = reader.integer("num_experts_per_tok", 1, count, default=4)
    router = RouterSpec(experts=count, top_k=top_k, scoring="softmax", normalise=True)
    config = read_decoder(reader, head_dim=64, eps=1e-5, rope_theta=150000.0, windows=_read_windows(reader))
    parts, shape = DecoderParts(config, weights), config.shape

    def layer(index: int, name: str) -> Operations:
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        attention = parts.attention(attn, index, qkv_bias=bias, output_bias=bias)
        sinks = f"{attn}.sinks" if weights.has(f"{attn}.sinks") else f"{attn}.sinks.weight"
        gate = Projection(
            weights.take_router(f"{mlp}.router.weight", (count, shape.hidden_size)),
            weights.take(f"{mlp}.router.bias", (count,)),
        )
        experts = MixtureOfExperts(
            router=gate,
            stack=_bind_experts(weights, f"{mlp}.experts", count, shape.hidden_size, config.inner_size),
            spec=router,
            activation=Activation.CLAMPED_SWIGLU_AND_MUL,
        )
        attention = replace(attention, sinks=weights.take(sinks, (shape.num_heads,), torch.float32))
        return parts.pre_norm_layer(name, attention, experts)

    return parts.program(layer)


def _read_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=128)
    if window is None and not reader.is_set("layer_types"):
        raise reader.error("sliding_window", "is null, but every other layer sees one: layer_types says nothing else")
    return layer_windows(reader, window, lambda layer: layer % 2 == 0)


def _bind_experts(weights: WeightLoader, name: str, count: int, hidden: int, inner: int) -> ExpertStack:
    if weights.has(f"{name}.gate_proj.weight"):
        return _bind_apart(weights, name, count, hidden, inner)
    stored = "_blocks" if weights.has(f"{name}.gate_up_proj_blocks") else ""
    gate_up = [(f"{name}.gate_up_proj{stored}", (2 * inner, hidden))]
    down = [(f"{name}.down_proj{stored}", (hidden, inner))]
    biases = weights.take(f"{name}.gate_up_proj_bias", (count, 2 * inner), torch.float32)
    return ExpertStack(
        gate_up=weights.take_stack(count, gate_up, transposed=not stored, alternates=True),
        down=weights.take_stack(count, down, transposed=not stored),
        gate_up_bias=_beside(biases[:, ::2], biases[:, 1::2]),
        down_bias=weights.take(f"{name}.down_proj_bias", (count, hidden), torch.float32),
    )


def _bind_apart(weights: WeightLoader, name: str, count: int, hidden: int, inner: int) -> ExpertStack:
    def bias(part: str, width: int) -> Tensor:
        return weights.take(f"{name}.{part}.bias", (count, width), torch.float32)

    gate_up = [(f"{name}.{part}.weight", (inner, hidden)) for part in ("gate_proj", "up_proj")]
    return ExpertStack(
        gate_up=weights.take_stack(count, gate_up),
        down=weights.take_stack(count, [(f"{name}.down_proj.weight", (hidden, inner))]),
        gate_up_bias=_beside(bias("gate_proj", inner), bias("up_proj", inner)),
        down_bias=bias("down_proj", hidden),
    )


def _beside(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate `[E, F]` and `[E, F]` to `[E, 2 * F]`; on `meta` tensors, `torch.cat` would load torch's compiler."""
    out = torch.empty(len(first), 2 * first.shape[1], dtype=first.dtype, device=first.device)
    out[:, : first.shape[1]], out[:, first.shape[1] :] = first, second
    return out


def _settings(keys: GgufKeys) -> dict[str, Any]:
    """Adds what files omit because it is the same for every gpt-oss: YaRN without truncation, the windowed layers."""
    settings, window = decoder_settings(keys), keys.window()
    if settings.get("rope_scaling", {}).get("rope_type") == "yarn":
        settings["rope_scaling"] |= {"truncate": False}
    layers = settings["num_hidden_layers"]
    return settings | {
        "rope_scaling": settings.get("rope_scaling", {"rope_type": "default"}),
        "intermediate_size": keys.size("expert_feed_forward_length", settings["intermediate_size"]),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": window,
        **({} if window else {"layer_types": ["full_attention"] * layers}),
    }


def _file_settings(config: Mapping[str, Any], _: TensorSource) -> dict[str, Any]:
    used = config.get("num_experts_per_tok") or config.get("experts_per_token")
    return {"expert_feed_forward_length": config["intermediate_size"], "expert_used_count": used}


_LAYER = "model.layers.{layer}"
_EXPERTS = f"{_LAYER}.mlp.experts"


def _apart(of_numbers: Callable[[Tensor, slice], Tensor], ending: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Parts that split interleaved gates and ups."""
    turns = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return {f"{_EXPERTS}.{part}_proj.{ending}": partial(of_numbers, which=which) for part, which in turns.items()}


def _conversions(_: Mapping[str, Any]) -> list[Conversion]:
    down = f"{_EXPERTS}.down_proj"
    return [
        Conversion(f"{_EXPERTS}.gate_up_proj", _apart(lambda each, which: each[:, which].T, "weight"), sliced=True),
        Conversion(f"{_EXPERTS}.gate_up_proj_blocks", _apart(lambda each, which: each[which], "weight"), sliced=True),
        Conversion(f"{_EXPERTS}.gate_up_proj_bias", _apart(lambda each, which: each[:, which], "bias")),
        Conversion(down, {f"{down}.weight": lambda each: each.T}, sliced=True),
        Conversion(f"{down}_blocks", {f"{down}.weight": lambda each: each}, sliced=True),
        Conversion(f"{down}_bias", {f"{down}.bias": lambda each: each}),
        Conversion(f"{_LAYER}.self_attn.sinks", {f"{_LAYER}.self_attn.sinks.weight": lambda each: each}),
    ]


GGUF = GgufDialect(
    architecture="gpt-oss",
    model_type="gpt_oss",
    tensors={
        **{name: theirs for name, theirs in DECODER_TENSORS.items() if ".ffn_" not in name},
        "blk.{layer}.post_attention_norm": f"{_LAYER}.post_attention_layernorm",
        "blk.{layer}.attn_sinks": f"{_LAYER}.self_attn.sinks",
        "blk.{layer}.ffn_gate_inp": f"{_LAYER}.mlp.router",
        "blk.{layer}.ffn_gate_exps": f"{_LAYER}.mlp.experts.gate_proj",
        "blk.{layer}.ffn_up_exps": f"{_LAYER}.mlp.experts.up_proj",
        "blk.{layer}.ffn_down_exps": f"{_LAYER}.mlp.experts.down_proj",
    },
    metadata=_settings,
    writing=GgufWriting(_file_settings, _conversions),
)
