"""ModernBERT: `model_type` "modernbert" (Warner et al. 2024), an encoder, for embeddings only.

Attention is bidirectional, over the whole text in every third layer and over a window around each token in the others,
which have their own RoPE base. The embedding is normed, so the first layer has no norm before its attention.
"""

from __future__ import annotations

from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import (
    MAX_LAYERS,
    MAX_WINDOW,
    DecoderConfig,
    DecoderParts,
    layer_windows,
    read_decoder,
)
from penstock.models.rope_config import read_layer_rope
from penstock.nn.blocks import Attention, GatedMlp, Normalization, Projection, residual
from penstock.nn.operations import Activation, Embed, Heads, NormKind, Operations, Register
from penstock.nn.program import OUT, Head, Program
from penstock.nn.rope import Rope
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]

_SIZES = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}
"""Defaults for keys that a config may omit, from transformers' `ModernBertConfig`."""

_ACTIVATIONS = {
    "gelu": Activation.GELU_AND_MUL,
    "gelu_new": Activation.GELU_NEW_AND_MUL,
    "gelu_pytorch_tanh": Activation.GELU_NEW_AND_MUL,
    "silu": Activation.SILU_AND_MUL,
}

_GLOBAL_THETA, _LOCAL_THETA = 160000.0, 10000.0

_MASKED_LM = (
    *("head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias"),
    *("decoder.weight", "decoder.bias"),
)
"""Tensors of the masked-language-modelling head in published checkpoints, which is not used."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader = reader.with_defaults(_SIZES)
    activation = _ACTIVATIONS[reader.expect("hidden_activation", list(_ACTIVATIONS), "gelu")]
    biases = {key: reader.boolean(f"{key}_bias", default=False) for key in ("norm", "attention", "mlp")}
    one_way = reader.integer("local_attention", 1, MAX_WINDOW, default=128) // 2
    every = reader.integer("global_attn_every_n_layers", 1, MAX_LAYERS, default=3)
    config = read_decoder(
        reader,
        tied=True,
        eps=1e-5,
        eps_key="norm_eps",
        norm=NormKind.LAYER,
        windows=layer_windows(reader, one_way + 1, lambda layer: layer % every != 0),
        rope=lambda shape: _global_rope(reader, shape),
    )
    shape, width = config.shape, config.shape.hidden_size
    if shape.num_heads * shape.head_dim != width or shape.num_kv_heads != shape.num_heads:
        raise reader.error("num_attention_heads", "this family has heads that add up to hidden_size, and keys for each")
    local_rope = _local_rope(reader, config)
    # Checkpoints saved with a head have a prefix.
    root = "model." if weights.has("model.embeddings.tok_embeddings.weight") else ""
    parts = DecoderParts(config, weights)

    def norm(name: str) -> Normalization:
        return Normalization.bind_layer(weights, f"{root}{name}", width, config.eps, has_bias=biases["norm"])

    def layer(index: int) -> Operations:
        name, window = f"layers.{index}", config.windows[index]
        attention = Attention(
            heads=Heads(shape.num_heads, shape.num_heads, shape.head_dim),
            qkv=Projection.bind(weights, f"{root}{name}.attn.Wqkv", 3 * width, width, bias=biases["attention"]),
            output=Projection.bind(weights, f"{root}{name}.attn.Wo", width, width, bias=biases["attention"]),
            cache=index,
            spec=AttentionSpec(shape.head_dim**-0.5, window=window, ahead=None if window is None else one_way),
            rope=parts.rope if window is None else parts.rotary_table(local_rope),
        )
        inner = config.inner_size
        mlp = GatedMlp(
            gate_up=Projection.bind(weights, f"{root}{name}.mlp.Wi", 2 * inner, width, bias=biases["mlp"]),
            down=Projection.bind(weights, f"{root}{name}.mlp.Wo", width, inner, bias=biases["mlp"]),
            inner_size=inner,
            activation=activation,
        )
        before_attention = norm(f"{name}.attn_norm") if index else None
        return (
            *residual(parts.stream, attention, before=before_attention),
            *residual(parts.stream, mlp, before=norm(f"{name}.mlp_norm")),
        )

    for name in _MASKED_LM:
        weights.ignore(name)
    table = weights.take_table(f"{root}embeddings.tok_embeddings.weight", (shape.vocab_size, width))
    return Program(
        shape=shape,
        embedding=(Embed(parts.stream, table), *norm("embeddings.norm")(parts.stream, parts.stream)),
        layers=tuple(layer(index) for index in range(shape.num_layers)),
        final=norm("final_norm")(parts.stream, Register(OUT, width)),
        head=Head(table),
        caches=tuple(KvCacheSpec(shape.num_heads, shape.head_dim, window) for window in config.windows),
    )


def _global_rope(reader: ConfigReader, shape: ModelShape) -> Rope:
    return read_layer_rope(
        reader,
        "full_attention",
        shape.head_dim,
        shape.max_positions,
        theta=_GLOBAL_THETA,
        theta_key="global_rope_theta",
    )


def _local_rope(reader: ConfigReader, config: DecoderConfig) -> Rope:
    return read_layer_rope(
        reader,
        "sliding_attention",
        config.shape.head_dim,
        config.shape.max_positions,
        theta=_LOCAL_THETA,
        theta_key="local_rope_theta",
    )
