"""Qwen 3.5's and 3.6's dense text models: `model_type` "qwen3_5_text" (Qwen Team 2026).

Three of four layers mix tokens by a gated delta rule over a short convolution (Gated DeltaNet: Yang et al. 2024), every
fourth by attention with a gated output. Norm weights are stored minus 1, except for the norm after the delta rule. A
quarter of each head is rotated; `mrope_section`, for images, has no effect for text. If guesses are wanted,
a further layer (`mtp`) predicts a second token. Models with experts (`qwen3_5_moe_text`, `qwen3_next`) have the same
layers except for the MLP, and use `build`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.linear import Weight
from penstock.kernels.recurrence import RecurrenceKind
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WIDTH, DecoderParts, read_decoder
from penstock.models.predictor import PredictorNames, bind_predictor
from penstock.models.recurrent_mixer import MixerInputs, MixerSizes, RecurrentMixer, bind_mixer
from penstock.models.rope_config import without_image_axes
from penstock.nn.blocks import Attention, Block, Projection, residual
from penstock.nn.operations import (
    Attend,
    Gate,
    Linear,
    NormHeads,
    Operations,
    Register,
    Regroup,
    Rotate,
)
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["BindMlp", "build", "load"]

_ATTENTION, _DELTA = "full_attention", "linear_attention"
_EVERY = "full_attention_interval"
_INTERVAL = 4
_MAX_TAPS, _MAX_HEADS, _MAX_HEAD_DIM = 16, 4096, 1024


@dataclass(frozen=True, slots=True, eq=False)
class GatedAttention:
    """Attention whose output is multiplied by `sigmoid(gate)`; the query projection has `[query | gate]` of each head.

    Attributes:
        attention: its `qkv` projects to `[2 Hq D | Hkv D | Hkv D]`.
    """

    attention: Attention

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        of, heads = self.attention, self.attention.heads
        assert of.q_norm is not None, "queries and keys are normed"
        assert of.k_norm is not None, "queries and keys are normed"
        assert of.rope is not None, "queries and keys are rotated"
        wide, narrow = heads.queries * heads.dim, heads.keys * heads.dim
        qkv, parted, mixed, gated = (
            Register(name, width)
            for name, width in (("qkv", 2 * (wide + narrow)), ("q_gate", 2 * wide), ("mixed", wide), ("gated", wide))
        )
        k, v = (qkv.columns(2 * wide + at * narrow, narrow) for at in (0, 1))
        q, gate = parted.columns(0, wide), parted.columns(wide, wide)
        return (
            of.qkv.linear(qkv, x),
            Regroup(parted, qkv.columns(0, 2 * wide), heads.queries),
            NormHeads(q, of.q_norm.weight, of.q_norm.eps),
            NormHeads(k, of.k_norm.weight, of.k_norm.eps),
            Rotate(q, heads.dim, of.rope),
            Rotate(k, heads.dim, of.rope),
            Attend(mixed, q, k, v, of.cache, heads, of.spec),
            Gate(gated, mixed, gate),
            of.output.linear(out, gated, adds=adds),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaNet:
    """A convolution over queries, keys and values, the gated delta rule, and a norm with a gate.

    Attributes:
        inputs: `[q | k | v | z]` of a token.
        a: projects to the input of the decay, one number per value head.
        b: projects to how much of the delta is written, one number per value head.
    """

    inputs: Projection
    a: Weight
    b: Weight
    mixer: RecurrentMixer

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        sizes = self.mixer.sizes
        qkvz = Register("qkvz", sizes.convolved + sizes.values)
        a, b = Register("a", sizes.value_heads), Register("b", sizes.value_heads)
        inputs = MixerInputs(
            convolved=qkvz.columns(0, sizes.convolved),
            q=0,
            k=sizes.keys,
            v=2 * sizes.keys,
            gate=qkvz.columns(sizes.convolved, sizes.values),
            a=a,
            b=b,
        )
        project = self.inputs.linear(qkvz, x), Linear(a, x, self.a), Linear(b, x, self.b)
        return *project, *self.mixer.operations(inputs, out, adds=adds)


BindMlp = Callable[[DecoderParts, int, str], Block]
"""Binds the MLP of a layer, from the model's parts, the layer's index, and the name prefix."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    return build(reader, weights, lambda parts, _, name: parts.mlp(name))


def build(reader: ConfigReader, weights: WeightLoader, bind_mlp: BindMlp, *, inner_size: int | None = None) -> Program:
    """Build a model of gated delta nets and gated attention.

    Args:
        reader: the config; the keys that `bind_mlp` needs have already been read.
        weights: the checkpoint.
        bind_mlp: see `BindMlp`.
        inner_size: see `read_decoder`.
    """
    reader.expect("hidden_act", ["silu"], "silu")
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    attending, sizes = _read_attending(reader, layers), _read_sizes(reader)
    bias = reader.boolean("attention_bias", default=False)
    reader = without_image_axes(reader.with_defaults({"partial_rotary_factor": 0.25}))
    config = read_decoder(reader, head_dim=256, windows=(None,) * layers, partial_rotary=True, inner_size=inner_size)
    parts, shape = DecoderParts(config, weights), config.shape
    predictor = _find_predictor(reader, weights, layers)

    def attention(name: str, layer: int) -> GatedAttention:
        norms = [parts.norm(f"{name}.{part}_norm", shape.head_dim, plus_one=True) for part in ("q", "k")]
        plain = parts.attention(name, layer, qkv_bias=bias, output_bias=bias, norms=(norms[0], norms[1]), query_parts=2)
        return GatedAttention(replace(plain, cache=attending.index(layer)))

    def delta_net(name: str, number: int) -> GatedDeltaNet:
        return _bind_delta_net(weights, name, sizes, shape.hidden_size, config.eps, number)

    def mixer(index: int, name: str) -> Block:
        if index in attending:
            return attention(f"{name}.self_attn", index)
        return delta_net(f"{name}.linear_attn", sum(other not in attending for other in range(index)))

    def layer(index: int, name: str) -> Operations:
        return residual_layer(name, mixer(index, name), index)

    def residual_layer(name: str, mixer: Block, index: int) -> Operations:
        before, between = (
            parts.norm(f"{name}.{part}", plus_one=True) for part in ("input_layernorm", "post_attention_layernorm")
        )
        mixed = residual(parts.stream, mixer, before=before)
        return (*mixed, *residual(parts.stream, bind_mlp(parts, index, f"{name}.mlp"), before=between))

    states = sizes.states * (layers - len(attending))
    program = parts.program(layer, plus_one=True, cached=attending, states=states)
    if predictor is None:
        return program
    name = predictor.layer
    own = residual_layer(name, attention(f"{name}.self_attn", attending[0]), layers)
    return replace(program, predictor=bind_predictor(parts, predictor, program, own, plus_one=True))


_PUBLISHED = PredictorNames("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


def _find_predictor(reader: ConfigReader, weights: WeightLoader, layers: int) -> PredictorNames | None:
    """The part that predicts a second token; None if it is missing or not wanted. Tensors of unused parts are left out.

    It has one layer and the model's own embedding and head. In a GGUF file it is the block after the last layer.
    """
    block = f"model.layers.{layers}"
    own = [f"{block}.nextn.{each}.weight" for each in ("embed_tokens", "shared_head_head")]
    in_file = [f"{block}.nextn.{each}" for each in ("eh_proj", "enorm", "hnorm", "shared_head_norm")]
    blocks = reader.integer("num_nextn_predict_layers", 0, MAX_LAYERS, default=0)  # set for GGUF files only
    published = reader.integer("mtp_num_hidden_layers", 0, MAX_LAYERS, default=1)
    own_table = reader.boolean("mtp_use_dedicated_embeddings", default=False)
    found: PredictorNames | None = None
    if published == 1 and not own_table and weights.has(f"{_PUBLISHED.joined}.weight"):
        found = _PUBLISHED
    elif blocks == 1 and not any(weights.has(each) for each in own):
        of_file = PredictorNames(block, *in_file)
        found = of_file if all(weights.has(each) for each in of_file.needed) else None
    found = found if weights.predicts else None
    if found is not _PUBLISHED:
        weights.leave_out("mtp.")
    if found in {None, _PUBLISHED}:
        for extra in range(blocks):
            weights.leave_out(f"model.layers.{layers + extra}.")
    return found


def _bind_delta_net(
    weights: WeightLoader, name: str, sizes: MixerSizes, hidden: int, eps: float, number: int
) -> GatedDeltaNet:
    """Take the tensors of the delta rule's layer number `number`."""
    if weights.has(f"{name}.in_proj_qkvz.weight"):
        _split_inputs(weights, f"{name}.in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), _joined_rows(sizes), hidden)
    if weights.has(f"{name}.in_proj_ba.weight"):
        rows = torch.arange(2 * sizes.value_heads).view(sizes.key_heads, 2, -1)  # [key heads, b | a, value heads each]
        parted = rows[:, 0].flatten(), rows[:, 1].flatten()
        _split_inputs(weights, f"{name}.in_proj_ba", ("in_proj_b", "in_proj_a"), parted, hidden)
    parts = {f"{name}.in_proj_qkv": sizes.convolved, f"{name}.in_proj_z": sizes.values}
    return GatedDeltaNet(
        inputs=Projection.bind_fused(weights, parts, hidden),
        a=weights.take_router(f"{name}.in_proj_a.weight", (sizes.value_heads, hidden)),
        b=weights.take_router(f"{name}.in_proj_b.weight", (sizes.value_heads, hidden)),
        mixer=bind_mixer(weights, name, sizes, RecurrenceKind.DELTA, hidden, eps, number),
    )


def _joined_rows(sizes: MixerSizes) -> tuple[Tensor, Tensor]:
    """Rows of `[q | k | v]` and of z, for all heads, in a projection with `[q | k | v | z]` per key head."""
    values = sizes.values // sizes.key_heads
    widths = (sizes.key_dim, sizes.key_dim, values, values)
    q, k, v, z = torch.arange(sum(widths) * sizes.key_heads).view(sizes.key_heads, -1).split(widths, dim=1)
    return torch.cat([each.flatten() for each in (q, k, v)]), z.flatten()


def _split_inputs(
    weights: WeightLoader, joined: str, parts: tuple[str, str], rows: tuple[Tensor, Tensor], hidden: int
) -> None:
    """Split the projection `joined` into two parts with their own names."""
    beside = joined.rpartition(".")[0]
    split = {f"{beside}.{part}.weight": (its, (len(its), hidden)) for part, its in zip(parts, rows, strict=True)}
    weights.split_rows(f"{joined}.weight", (sum(len(its) for its in rows), hidden), split)


def _read_sizes(reader: ConfigReader) -> MixerSizes:
    key_heads = reader.integer("linear_num_key_heads", 1, _MAX_HEADS, default=16)
    value_heads = reader.integer("linear_num_value_heads", 1, _MAX_HEADS, default=32)
    if value_heads % key_heads:
        raise reader.error("linear_num_value_heads", f"must be a multiple of {key_heads} key heads, got {value_heads}")
    return MixerSizes(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=reader.integer("linear_key_head_dim", 1, _MAX_HEAD_DIM, default=128),
        value_dim=reader.integer("linear_value_head_dim", 1, _MAX_HEAD_DIM, default=128),
        taps=reader.integer("linear_conv_kernel_dim", 2, _MAX_TAPS, default=4),
        tiled=reader.boolean("linear_value_heads_tiled", default=False),  # set for GGUF files only
    )


def _read_attending(reader: ConfigReader, layers: int) -> list[int]:
    """Indices of the attention layers: by `layer_types`, or every fourth by default; at least one."""
    types = reader.choices("layer_types", [_ATTENTION, _DELTA], layers)
    interval = _INTERVAL if types else reader.integer(_EVERY, 1, MAX_WIDTH, default=_INTERVAL)
    attends = [each == _ATTENTION for each in types] or [(layer + 1) % interval == 0 for layer in range(layers)]
    found = [layer for layer, each in enumerate(attends) if each]
    if not found:
        key = _EVERY if not types and reader.is_set(_EVERY) else "layer_types"
        raise reader.error(key, "a model in which no layer attends is not implemented")
    return found
