"""Gemma 4's text model: `model_type` "gemma4_text".

Gemma 3's layer, with these differences. Norms multiply by their weight, scores are not scaled, and values are normed
per head too. Layers with full attention have a different head width, rotate only part of the pairs, and may use keys as
values. The last layers may read the keys and values of earlier ones. Small models give each layer an input vector per
token besides the stream; others have experts beside the MLP. A layer ends by scaling the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.contract.model import KvCacheSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import ExpertStack, RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts
from penstock.models.gemma4_config import Gemma4Config, MixtureConfig, read_config
from penstock.nn.blocks import Block, Normalization, Projection, residual
from penstock.nn.experts import bind_experts
from penstock.nn.operations import (
    Activation,
    Attend,
    Embed,
    Experts,
    Gate,
    GateKind,
    Heads,
    Linear,
    NormHeads,
    NormKind,
    Operations,
    Register,
    Rotate,
    Scale,
)
from penstock.nn.program import Program
from penstock.nn.rope import RotaryTable
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]

_HALF = 2.0**-0.5
"""Factor on each of the two terms of a layer's own input."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    config = read_config(reader)
    parts = DecoderParts(config.decoder, weights)
    turning = {config.full: DecoderParts(config.full, weights), config.decoder: parts}

    def layer(index: int, name: str) -> Operations:
        attention = _bind_attention(config, weights, f"{name}.self_attn", index, turning[config.of_layer(index)].rope)
        mlp = parts.mlp(f"{name}.mlp", activation=Activation.GELU_NEW_AND_MUL, inner_size=config.inner_size(index))
        before, after = (parts.norm(f"{name}.{part}") for part in ("input_layernorm", "post_attention_layernorm"))
        return (
            *residual(parts.stream, attention, before=before, after=after),
            *_feed_forward(parts, name, mlp, config.mixture),
            *(_add_own_input(parts, config, name, index) if config.per_layer else ()),
            *_scale(parts, f"{name}.layer_scalar"),
        )

    hidden = config.decoder.shape.hidden_size
    program = parts.program(layer, embedding_scale=hidden**0.5, softcap=config.softcap)
    shapes = [config.of_layer(index).shape for index in config.owners]
    caches = [
        KvCacheSpec(shape.num_kv_heads, shape.head_dim, config.decoder.windows[index])
        for shape, index in zip(shapes, config.owners, strict=True)
    ]
    own_inputs = _own_inputs(parts, config) if config.per_layer else ()
    return replace(program, embedding=(*program.embedding, *own_inputs), caches=tuple(caches))


@dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    """Self-attention with normed values, or over another layer's keys and values.

    Attributes:
        projection: projects to queries, then to the layer's own keys and values, if any.
        projected: output width of `projection`.
        cache: index into `Program.caches`.
        k_norm: None if another layer's keys are read.
        v_norm: `[D]` of ones.
    """

    heads: Heads
    projection: Projection
    projected: int
    output: Projection
    cache: int
    spec: AttentionSpec
    rope: RotaryTable
    q_norm: Normalization
    k_norm: Normalization | None
    v_norm: Tensor

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        q_width, dim = self.heads.queries * self.heads.dim, self.heads.dim
        projected, mixed = Register("qkv", self.projected), Register("mixed", q_width)
        q = projected.columns(0, q_width)
        k, v, norm_values = self._keys_and_values(projected)
        norms = ((q, self.q_norm), (k, self.k_norm))
        return (
            self.projection.linear(projected, x),
            *norm_values,
            *(NormHeads(each, norm.weight, norm.eps) for each, norm in norms if each is not None and norm is not None),
            *(Rotate(each, dim, self.rope) for each in (q, k) if each is not None),
            Attend(mixed, q, k, v, self.cache, self.heads, self.spec),
            self.output.linear(out, mixed, adds=adds),
        )

    def _keys_and_values(self, projected: Register) -> tuple[Register | None, Register | None, Operations]:
        """The registers of keys (before their norm) and values, and the operations that norm values."""
        if self.k_norm is None:
            return None, None, ()
        q_width, width = self.heads.queries * self.heads.dim, self.heads.keys * self.heads.dim
        k, eps = projected.columns(q_width, width), self.q_norm.eps
        if projected.width == q_width + width:
            values = Register("values", width)
            return k, values, (NormHeads(k, self.v_norm, eps, out=values),)
        v = projected.columns(q_width + width, width)
        return k, v, (NormHeads(v, self.v_norm, eps),)


def _bind_attention(
    config: Gemma4Config, weights: WeightLoader, name: str, index: int, rope: RotaryTable
) -> _Attention:
    """Bind a layer's attention; ignores key and value tensors of layers that read another layer's keys."""
    decoder, heads, owner = config.of_layer(index), config.heads(index), config.caches[index]
    shape, owns, window = decoder.shape, owner == index, config.decoder.windows[index]
    widths = {"q_proj": heads.queries * heads.dim}
    if owns:
        takes_keys = config.keys_are_values and window is None
        widths |= dict.fromkeys(("k_proj",) if takes_keys else ("k_proj", "v_proj"), heads.keys * heads.dim)
    else:
        for part in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight"):
            weights.ignore(f"{name}.{part}")

    def norm(part: str) -> Normalization:
        return Normalization(NormKind.RMS, weights.take(f"{name}.{part}.weight", (heads.dim,)), None, decoder.eps)

    parts = {f"{name}.{part}": width for part, width in widths.items()}
    return _Attention(
        heads=heads,
        projection=Projection.bind_fused(weights, parts, shape.hidden_size, bias=config.bias),
        projected=sum(widths.values()),
        output=Projection.bind(weights, f"{name}.o_proj", shape.hidden_size, widths["q_proj"], bias=config.bias),
        cache=config.owners.index(owner),
        spec=AttentionSpec(1.0, window=window),
        rope=rope,
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm") if owns else None,
        v_norm=torch.ones(heads.dim, dtype=weights.dtype, device=weights.device),
    )


def _feed_forward(parts: DecoderParts, name: str, mlp: Block, mixture: MixtureConfig | None) -> Operations:
    """An MLP, with experts beside it if there are any."""
    before, after = (parts.norm(f"{name}.{part}_feedforward_layernorm") for part in ("pre", "post"))
    if mixture is None:
        return residual(parts.stream, mlp, before=before, after=after)
    stream, hidden = parts.stream, parts.stream.width
    normed, branch, both = (Register(each, hidden) for each in ("normed", "branch", "both"))
    after_mlp, after_experts = (parts.norm(f"{name}.post_feedforward_layernorm_{which}") for which in (1, 2))
    return (
        *before(stream, normed),
        *mlp(normed, branch, adds=False),
        *after_mlp(branch, both),
        *_experts(parts, name, mixture, branch),
        *after_experts(branch, both, adds=True),
        *after(both, stream, adds=True),
    )


def _experts(parts: DecoderParts, name: str, mixture: MixtureConfig, out: Register) -> Operations:
    """Experts on the stream; the router uses a different norm of the stream than the experts."""
    weights, spec, hidden = parts.weights, mixture.router, parts.stream.width
    normed, logits = Register("normed", hidden), Register("logits", spec.experts)
    choosing = weights.take(f"{name}.router.scale", (hidden,), torch.float32).mul_(hidden**-0.5)
    router = weights.take_router(f"{name}.router.proj.weight", (spec.experts, hidden))
    return (
        *Normalization(NormKind.RMS, choosing, None, parts.config.eps)(parts.stream, normed),
        Linear(logits, normed, router),
        *parts.norm(f"{name}.pre_feedforward_layernorm_2")(parts.stream, normed),
        Experts(
            out,
            normed,
            logits,
            _bind_stack(weights, name, spec, hidden, mixture.inner_size),
            spec,
            Activation.GELU_NEW_AND_MUL,
            adds=False,
        ),
    )


def _bind_stack(weights: WeightLoader, name: str, spec: RouterSpec, hidden: int, inner: int) -> ExpertStack:
    stack = bind_experts(weights, f"{name}.experts", experts=spec.experts, hidden=hidden, intermediate=inner)
    return replace(stack, scale=weights.take(f"{name}.router.per_expert_scale", (spec.experts,), torch.float32))


def _own_inputs(parts: DecoderParts, config: Gemma4Config) -> Operations:
    """The layers' own inputs for each token: a row of a table, plus a normed projection of its embedding.

    The original divides the projection by the root of the hidden size before the norm; here the norm's epsilon is
    multiplied by the hidden size instead, which is equivalent.
    """
    shape, width = config.decoder.shape, config.per_layer
    hidden, total = shape.hidden_size, shape.num_layers * width
    own, context = _own_input(config), Register("context", total)
    name = "model.per_layer_projection_norm.weight"
    table = parts.weights.take_table("model.embed_tokens_per_layer.weight", (config.per_layer_vocab, total))
    projection = Projection.bind(parts.weights, "model.per_layer_model_projection", total, hidden)
    return (
        Embed(own, table, scale=width**0.5 * _HALF),
        projection.linear(context, parts.stream),
        NormHeads(
            context,
            parts.weights.take(name, (width,), torch.float32).mul_(_HALF),
            parts.config.eps * hidden,
            out=own,
            adds=True,
        ),
    )


def _own_input(config: Gemma4Config) -> Register:
    """The register of all layers' own inputs, one after the other."""
    return Register("own_inputs", config.decoder.shape.num_layers * config.per_layer)


def _add_own_input(parts: DecoderParts, config: Gemma4Config, name: str, index: int) -> Operations:
    """Add a layer's own input, gated by the stream."""
    stream, width = parts.stream, config.per_layer
    gate, gated = Register("own_gate", width), Register("own_gated", width)
    branch = Register("branch", stream.width)
    own = _own_input(config).columns(index * width, width)
    down = Projection.bind(parts.weights, f"{name}.per_layer_input_gate", width, stream.width)
    up = Projection.bind(parts.weights, f"{name}.per_layer_projection", stream.width, width)
    return (
        down.linear(gate, stream),
        Gate(gated, own, gate, GateKind.GELU_NEW),
        up.linear(branch, gated),
        *parts.norm(f"{name}.post_per_layer_input_norm")(branch, stream, adds=True),
    )


def _scale(parts: DecoderParts, name: str) -> Operations:
    """Scale the stream at a layer's end, if the checkpoint has a factor."""
    if not parts.weights.has(name):
        return ()
    return (Scale(parts.stream, parts.weights.take(name, (1,), torch.float32)),)
