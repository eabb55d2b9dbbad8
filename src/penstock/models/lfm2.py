"""LFM2: `model_type` "lfm2" (Liquid AI 2025).

Most layers mix tokens by a short convolution between two gates, `out(C * conv(B * x))` with `[B | C | x]` from one
projection; a few use attention with normed query and key heads. Norms and gated MLPs have names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.contract.model import StateSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WIDTH, DecoderParts, read_decoder
from penstock.nn.blocks import Projection, residual
from penstock.nn.operations import Operations, Register, ShortConvolution
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_decoder import attending_layers, decoder_settings, head_counts
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.source import TensorSource

__all__ = ["GGUF", "load"]

_ATTENTION, _CONVOLUTION = "full_attention", "conv"
_MAX_TAPS = 64


@dataclass(frozen=True, slots=True, eq=False)
class GatedConvolution:
    """`output(C * conv(B * x))`, where `inputs` projects to the columns `[B | C | x]`.

    Attributes:
        weight: `[L, H]` float32.
        bias: `[H]` float32, or None.
        state: index into `Program.states`.
    """

    inputs: Projection
    weight: Tensor
    bias: Tensor | None
    output: Projection
    state: int

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        width = self.weight.shape[1]
        bcx, mixed = Register("bcx", 3 * width), Register("mixed", width)
        b, c, values = (bcx.columns(index * width, width) for index in range(3))
        return (
            self.inputs.linear(bcx, x),
            ShortConvolution(mixed, values, self.weight, self.bias, self.state, gate_in=b, gate_out=c),
            self.output.linear(out, mixed, adds=adds),
        )


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    attending = _read_attending(reader, layers)
    taps, bias = reader.integer("conv_L_cache", 2, _MAX_TAPS, default=3), reader.boolean("conv_bias", default=False)
    config = read_decoder(
        reader,
        windows=(None,) * layers,
        eps=1e-5,
        eps_key="norm_eps",
        rope_theta=1000000.0,
        inner_size=_read_inner_size(reader),
    )
    tied = reader.boolean("tie_embedding", default=reader.boolean("tie_word_embeddings", default=True))
    parts, hidden = DecoderParts(replace(config, tied=tied), weights), config.shape.hidden_size
    head_dim = config.shape.head_dim
    convolving = [layer for layer in range(layers) if layer not in attending]

    def convolution(name: str, layer: int) -> GatedConvolution:
        def biased(part: str, outputs: int) -> Projection:
            return Projection.bind(weights, f"{name}.{part}", outputs, hidden, bias=bias)

        return GatedConvolution(
            inputs=biased("in_proj", 3 * hidden),
            weight=weights.take(f"{name}.conv.weight", (hidden, 1, taps), torch.float32)[:, 0].T.contiguous(),
            bias=weights.take(f"{name}.conv.bias", (hidden,), torch.float32) if bias else None,
            output=biased("out_proj", hidden),
            state=convolving.index(layer),
        )

    def layer(index: int, name: str) -> Operations:
        before, between = parts.norm(f"{name}.operator_norm"), parts.norm(f"{name}.ffn_norm")
        mlp = parts.mlp(f"{name}.feed_forward", names=("w1", "w3", "w2"))
        if index in attending:
            attn = f"{name}.self_attn"
            norms = parts.norm(f"{attn}.q_layernorm", head_dim), parts.norm(f"{attn}.k_layernorm", head_dim)
            attention = parts.attention(attn, index, norms=norms, output_name="out_proj")
            mixer = residual(parts.stream, replace(attention, cache=attending.index(index)), before=before)
        else:
            mixer = residual(parts.stream, convolution(f"{name}.conv", index), before=before)
        return (*mixer, *residual(parts.stream, mlp, before=between))

    states = [StateSpec((taps - 1, hidden))] * len(convolving)
    return parts.program(layer, final_norm="model.embedding_norm", cached=attending, states=states)


def _read_attending(reader: ConfigReader, layers: int) -> list[int]:
    """Indices of the attention layers, by `layer_types` or the older `full_attn_idxs`; at least one."""
    types = reader.choices("layer_types", [_ATTENTION, _CONVOLUTION], layers)
    if types:
        found, key = [index for index, each in enumerate(types) if each == _ATTENTION], "layer_types"
    else:
        key = "full_attn_idxs"
        listed = reader.integers(key, 0, layers - 1)
        found = sorted(set(listed)) if reader.is_set(key) else list(range(layers))
    if not found:
        raise reader.error(key, "a model in which no layer attends is not implemented")
    return found


def _read_inner_size(reader: ConfigReader) -> int:
    """The hidden width of MLPs, by the rule of transformers' `Lfm2MLP`; the older key `block_ff_dim` has precedence."""
    key = "block_ff_dim" if reader.is_set("block_ff_dim") else "intermediate_size"
    inner = reader.integer(key, 1, MAX_WIDTH)
    if not reader.boolean("block_auto_adjust_ff_dim", default=True):
        return inner
    factor = reader.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0)
    multiple = reader.integer("block_multiple_of", 1, MAX_WIDTH, default=256)
    return multiple * -(-int(factor * int(2 * inner / 3)) // multiple)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    kv_heads, attending = attending_layers(keys)
    settings = decoder_settings(keys, kv_heads=kv_heads)
    return settings | {
        "norm_eps": settings["rms_norm_eps"],
        "layer_types": [_ATTENTION if attends else _CONVOLUTION for attends in attending],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _file_settings(config: Mapping[str, Any], source: TensorSource) -> dict[str, Any]:
    types = config.get("layer_types")
    attends = [each == _ATTENTION for each in types] if types else None
    return {
        "attention.head_count_kv": head_counts(config, attends, config.get("full_attn_idxs")),
        "attention.layer_norm_rms_epsilon": float(config.get("norm_eps", 1e-5)),
        "feed_forward_length": source.shape("model.layers.0.feed_forward.w1.weight")[0],
        "shortconv.l_cache": config.get("conv_L_cache", 3),
    }


_LAYER = "model.layers.{layer}"

GGUF = GgufDialect(
    architecture="lfm2",
    model_type="lfm2",
    tensors={
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output": "lm_head",
        "blk.{layer}.attn_norm": f"{_LAYER}.operator_norm",
        "blk.{layer}.attn_q": f"{_LAYER}.self_attn.q_proj",
        "blk.{layer}.attn_k": f"{_LAYER}.self_attn.k_proj",
        "blk.{layer}.attn_v": f"{_LAYER}.self_attn.v_proj",
        "blk.{layer}.attn_output": f"{_LAYER}.self_attn.out_proj",
        "blk.{layer}.attn_q_norm": f"{_LAYER}.self_attn.q_layernorm",
        "blk.{layer}.attn_k_norm": f"{_LAYER}.self_attn.k_layernorm",
        "blk.{layer}.shortconv.in_proj": f"{_LAYER}.conv.in_proj",
        "blk.{layer}.shortconv.conv": f"{_LAYER}.conv.conv",
        "blk.{layer}.shortconv.out_proj": f"{_LAYER}.conv.out_proj",
        "blk.{layer}.ffn_norm": f"{_LAYER}.ffn_norm",
        "blk.{layer}.ffn_gate": f"{_LAYER}.feed_forward.w1",
        "blk.{layer}.ffn_up": f"{_LAYER}.feed_forward.w3",
        "blk.{layer}.ffn_down": f"{_LAYER}.feed_forward.w2",
    },
    metadata=_gguf_settings,
    arrangements={"blk.{layer}.shortconv.conv.weight": Arrangement.FILTERS},
    writing=GgufWriting(_file_settings),
)
"""The last norm is named after the embedding, as in Hugging Face's checkpoints; convolutions have no bias."""
