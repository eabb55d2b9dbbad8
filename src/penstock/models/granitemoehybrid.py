"""Granite 4: `model_type` "granitemoehybrid" (IBM Granite team 2025).

Most layers mix tokens by Mamba-2 (Dao and Gu 2024): a short convolution over values, keys and queries (x, B and C), a
selective scan, and a norm of the gated result. A few attend, mostly without rotation. Every layer has a shared MLP for
all tokens and, in models with experts, a mixture of experts beside it. The factors are the same as in
Granite 3 (`granite.py`), and are applied in the same way: the stream is kept divided by the residual factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import ExpertStack, RouterSpec
from penstock.kernels.recurrence import RecurrenceKind
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WIDTH, DecoderParts, read_decoder
from penstock.models.recurrent_mixer import MixerInputs, MixerSizes, RecurrentMixer, bind_mixer
from penstock.nn.blocks import Block, GatedMlp, MixtureOfExperts, Projection, residual
from penstock.nn.operations import Operations, Register
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_decoder import (
    DECODER_TENSORS,
    INTERLEAVED,
    attending_layers,
    decoder_settings,
    head_counts,
)
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.source import TensorSource

__all__ = ["GGUF", "load"]

_ATTENTION, _MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
_INFINITE: tuple[Any, ...] = (math.inf, {"__float__": "Infinity"})
"""Infinity as Python's JSON parser returns it, and as transformers writes it."""

_SMALLEST, _LARGEST = 1e-4, 1e4
_MAX_HEADS, _MAX_STATE, _MAX_TAPS, _MAX_EXPERTS = 4096, 1024, 16, 1024


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2:
    """A projection to `[gate | x | B | C | dt]`, a convolution over `[x | B | C]`, a scan, and a gated norm."""

    inputs: Projection
    mixer: RecurrentMixer

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        sizes = self.mixer.sizes
        values, convolved = sizes.values, sizes.convolved
        projected = Register("projected", values + convolved + sizes.value_heads)
        inputs = MixerInputs(
            convolved=projected.columns(values, convolved),
            q=values + sizes.keys,
            k=values,
            v=0,
            gate=projected.columns(0, values),
            a=projected.columns(values + convolved, sizes.value_heads),
            b=None,
        )
        project = self.inputs.linear(projected, x)
        return project, *self.mixer.operations(inputs, out, adds=adds)


@dataclass(frozen=True, slots=True, eq=False)
class Both:
    """The sum of two blocks with the same input."""

    first: Block
    second: Block

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        return (*self.first(x, out, adds=adds), *self.second(x, out, adds=True))


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    attending, sizes = _read_attending(reader, layers), _read_sizes(reader)
    attention_bias = reader.boolean("attention_bias", default=False)
    rotated = reader.is_set("position_embedding_type") and (
        reader.expect("position_embedding_type", ["rope", "nope"], "nope") == "rope"
    )
    shared = reader.integer("shared_intermediate_size", 1, MAX_WIDTH, default=1024)
    router, inner = _read_router(reader), reader.integer("intermediate_size", 1, MAX_WIDTH)
    bias, conv_bias = (
        reader.boolean(key, default=default) for key, default in (("mamba_proj_bias", False), ("mamba_conv_bias", True))
    )
    embedding, scores, added, logits = (
        reader.number(key, _SMALLEST, _LARGEST, default=1.0)
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    config = read_decoder(reader, windows=(None,) * layers, inner_size=shared)
    parts, hidden = DecoderParts(replace(config, eps=config.eps / added**2), weights), config.shape.hidden_size

    def mlp(layer: str) -> GatedMlp:
        name = f"{layer}.shared_mlp"
        for of_gguf in (f"{layer}.mlp", name):  # in models without and with experts
            if weights.has(f"{of_gguf}.down_proj.weight"):
                return parts.mlp(of_gguf)
        return GatedMlp(
            gate_up=Projection.bind(weights, f"{name}.input_linear", 2 * shared, hidden),
            down=Projection.bind(weights, f"{name}.output_linear", hidden, shared),
            inner_size=shared,
        )

    def feed_forward(name: str) -> Block:
        if router is None:
            return mlp(name)
        return Both(_bind_experts(weights, f"{name}.block_sparse_moe", router, hidden, inner), mlp(name))

    def mixer(index: int, name: str) -> Block:
        if index not in attending:
            number = sum(other not in attending for other in range(index))
            return _bind_mamba(weights, f"{name}.mamba", sizes, hidden, config.eps, (bias, conv_bias), number)
        attention = parts.attention(
            f"{name}.self_attn",
            index,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            spec=AttentionSpec(scores),
        )
        return replace(attention, cache=attending.index(index), rope=attention.rope if rotated else None)

    def layer(index: int, name: str) -> Operations:
        before, between = parts.norm(f"{name}.input_layernorm"), parts.norm(f"{name}.post_attention_layernorm")
        return (
            *residual(parts.stream, mixer(index, name), before=before),
            *residual(parts.stream, feed_forward(name), before=between),
        )

    states = sizes.states * (layers - len(attending))
    return parts.program(
        layer, embedding_scale=embedding / added, logit_scale=1.0 / logits, cached=attending, states=states
    )


def _bind_mamba(
    weights: WeightLoader, name: str, sizes: MixerSizes, hidden: int, eps: float, biases: tuple[bool, bool], number: int
) -> Mamba2:
    """Take the tensors of Mamba-2's layer number `number`."""
    bias, conv_bias = biases
    width = sizes.values + sizes.convolved + sizes.value_heads
    inputs = Projection.bind(weights, f"{name}.in_proj", width, hidden, bias=bias)
    options = {"conv_bias": conv_bias, "output_bias": bias}
    return Mamba2(inputs, bind_mixer(weights, name, sizes, RecurrenceKind.SCAN, hidden, eps, number, **options))


def _bind_experts(weights: WeightLoader, name: str, router: RouterSpec, hidden: int, inner: int) -> MixtureOfExperts:
    """Take the router and experts; each tensor stacks one projection of all experts."""
    apart = weights.has(f"{name}.gate_proj.weight")  # in GGUF files
    halves = [(f"{name}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")]
    whole = [(f"{name}.input_linear.weight", (2 * inner, hidden))]
    gate_up = weights.take_stack(router.experts, halves if apart else whole)
    down = weights.take_stack(router.experts, [(f"{name}.output_linear.weight", (hidden, inner))])
    logits = weights.take_router(f"{name}.router.layer.weight", (router.experts, hidden))
    return MixtureOfExperts(Projection(logits), ExpertStack(gate_up, down), router)


def _read_attending(reader: ConfigReader, layers: int) -> list[int]:
    """Indices of the attention layers, by `layer_types` or its other name `layers_block_type`; at least one."""
    key = "layers_block_type" if reader.is_set("layers_block_type") else "layer_types"
    types = reader.choices(key, [*_ATTENTION, *_MAMBA], layers)
    found = [layer for layer, each in enumerate(types) if each in _ATTENTION]
    if not found:
        raise reader.error(key, "a model in which no layer attends is not implemented")
    return found


def _read_sizes(reader: ConfigReader) -> MixerSizes:
    hidden, heads = (
        reader.integer("hidden_size", 1, MAX_WIDTH),
        reader.integer("mamba_n_heads", 1, _MAX_HEADS, default=128),
    )
    groups = reader.integer("mamba_n_groups", 1, _MAX_HEADS, default=1)
    inner = reader.integer("mamba_expand", 1, 64, default=2) * hidden
    if inner % heads or heads % groups:
        raise reader.error("mamba_n_heads", f"must divide {inner} and be a multiple of {groups} groups, got {heads}")
    if reader.is_set("mamba_d_head"):
        reader.expect("mamba_d_head", ["auto", inner // heads], "auto")
    reader.expect("time_step_limit", [[0.0, infinite] for infinite in _INFINITE], [0.0, math.inf])
    return MixerSizes(
        key_heads=groups,
        value_heads=heads,
        key_dim=reader.integer("mamba_d_state", 1, _MAX_STATE, default=256),
        value_dim=inner // heads,
        taps=reader.integer("mamba_d_conv", 2, _MAX_TAPS, default=4),
    )


def _read_router(reader: ConfigReader) -> RouterSpec | None:
    """The router; None for a model without experts."""
    experts = reader.integer("num_local_experts", 0, _MAX_EXPERTS, default=8)
    if not experts:
        return None
    top_k = reader.integer("num_experts_per_tok", 1, experts, default=2)
    return RouterSpec(experts=experts, top_k=top_k, scoring="softmax", normalise=True)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """A missing factor is 1, except for scores (`1 / sqrt(head_dim)`), as in llama.cpp (`granite-hybrid.cpp`)."""
    kv_heads, attending = attending_layers(keys)
    settings = decoder_settings(keys, kv_heads=kv_heads)
    hidden, inner = settings["hidden_size"], keys.size("ssm.inner_size")
    if inner % hidden:
        raise keys.fail("ssm.inner_size", f"{inner} is no multiple of the hidden size {hidden}")
    if all(attending):
        raise keys.fail("attention.head_count_kv", "a hybrid model in which all layers attend is not supported")
    first, recurrent = attending.index(True), attending.index(False)
    experts, chosen = (keys.sizes(key, 1)[0] if keys.has(key) else 0 for key in ("expert_count", "expert_used_count"))
    rotated = not keys.has("rope.scaling.finetuned") or keys.get("rope.scaling.finetuned") is True
    return settings | {
        "layer_types": ["attention" if attends else "mamba" for attends in attending],
        "position_embedding_type": "rope" if rotated else "nope",
        "attention_bias": keys.has_tensor(f"blk.{first}.attn_q.bias"),
        "shared_intermediate_size": keys.size("expert_shared_feed_forward_length", settings["intermediate_size"]),
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "mamba_n_heads": keys.size("ssm.time_step_rank"),
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": keys.has_tensor(f"blk.{recurrent}.ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor(f"blk.{recurrent}.ssm_in.bias"),
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "attention_multiplier": keys.real("attention.scale", settings["head_dim"] ** -0.5),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "logits_scaling": keys.real("logit_scale", 1.0),
    }


def _file_settings(config: Mapping[str, Any], _: TensorSource) -> dict[str, Any]:
    types = config.get("layers_block_type") or config["layer_types"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return {
        "attention.head_count_kv": head_counts(config, [each in _ATTENTION for each in types]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "expert_count": config.get("num_local_experts", 8),
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
        "expert_used_count": config.get("num_experts_per_tok", 2),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        "ssm.conv_kernel": config.get("mamba_d_conv", 4),
        "ssm.group_count": config.get("mamba_n_groups", 1),
        "ssm.inner_size": config.get("mamba_expand", 2) * config["hidden_size"],
        "ssm.state_size": config.get("mamba_d_state", 256),
        "ssm.time_step_rank": config.get("mamba_n_heads", 128),
    }


def _conversions(config: Mapping[str, Any]) -> list[Conversion]:
    """Split gates from ups, and reshape vectors; in a model without experts the shared MLP is the file's plain MLP."""
    halves = {"gate": lambda each: each.chunk(2)[0], "up": lambda each: each.chunk(2)[1]}
    mlp = f"{_LAYER}.shared_mlp" if config.get("num_local_experts", 8) else f"{_LAYER}.mlp"
    mamba, groups = f"{_LAYER}.mamba", config.get("mamba_n_groups", 1)
    return [
        Conversion(
            f"{_LAYER}.shared_mlp.input_linear.weight",
            {f"{mlp}.{part}_proj.weight": half for part, half in halves.items()},
        ),
        Conversion(f"{_LAYER}.shared_mlp.output_linear.weight", {f"{mlp}.down_proj.weight": lambda each: each}),
        Conversion(
            f"{_EXPERTS}.input_linear.weight",
            {f"{_EXPERTS}.{part}_proj.weight": half for part, half in halves.items()},
            sliced=True,
        ),
        Conversion(f"{mamba}.norm.weight", {f"{mamba}.norm.weight": lambda each: each.view(groups, -1)}),
        Conversion(f"{mamba}.A_log", {f"{mamba}.A_log": lambda each: each[:, None]}),
        Conversion(f"{mamba}.D", {f"{mamba}.D": lambda each: each[:, None]}),
    ]


_LAYER, _EXPERTS = "model.layers.{layer}", "model.layers.{layer}.block_sparse_moe"

GGUF = GgufDialect(
    architecture="granitehybrid",
    model_type="granitemoehybrid",
    tensors={
        **DECODER_TENSORS,
        **{f"blk.{{layer}}.ffn_{part}_shexp": f"{_LAYER}.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        "blk.{layer}.ffn_gate_inp": f"{_EXPERTS}.router.layer",
        "blk.{layer}.ffn_gate_exps": f"{_EXPERTS}.gate_proj",
        "blk.{layer}.ffn_up_exps": f"{_EXPERTS}.up_proj",
        "blk.{layer}.ffn_down_exps": f"{_EXPERTS}.output_linear",
        "blk.{layer}.ssm_in": f"{_LAYER}.mamba.in_proj",
        "blk.{layer}.ssm_conv1d": f"{_LAYER}.mamba.conv1d",
        "blk.{layer}.ssm_norm": f"{_LAYER}.mamba.norm",
        "blk.{layer}.ssm_out": f"{_LAYER}.mamba.out_proj",
    },
    metadata=_gguf_settings,
    arrangements={
        **INTERLEAVED,
        "blk.{layer}.ssm_conv1d.weight": Arrangement.FILTERS,
        "blk.{layer}.ssm_norm.weight": Arrangement.FLAT,
        "blk.{layer}.ssm_a": Arrangement.DECAY,
        "blk.{layer}.ssm_d": Arrangement.FLAT,
    },
    whole={
        "blk.{layer}.ssm_a": f"{_LAYER}.mamba.A_log",
        "blk.{layer}.ssm_d": f"{_LAYER}.mamba.D",
        "blk.{layer}.ssm_dt.bias": f"{_LAYER}.mamba.dt_bias",
    },
    writing=GgufWriting(_file_settings, _conversions),
)
"""Query and key rows are interleaved, as in a Llama's files; gate and up projections are stored separately."""
