"""BERT: `model_type` "bert" (Devlin et al. 2019), an encoder, for embeddings only.

Attention is bidirectional over the whole text. Positions are learned, and a norm follows each residual addition
(post-norm). All tokens have the first token type, because texts are embedded one by one, not in pairs. RoBERTa, which
has the same layers, is built here too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.dense_weight import DenseWeight
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_VOCAB, MAX_WIDTH, PLAIN_ACTIVATIONS, read_shape
from penstock.nn.blocks import Attention, Normalization, PlainMlp, Projection, residual
from penstock.nn.operations import Activation, Embed, Heads, NormKind, Operations, Register
from penstock.nn.program import OUT, STREAM, Head, Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import heads_and_width
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load", "load_encoder"]

_WORDS = "embeddings.word_embeddings.weight"
_LAYER = "encoder.layer"

_SIZES = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
"""Defaults for keys that a config may omit, from transformers' `BertConfig` and `RobertaConfig`."""

_HEADS = (
    *(f"cls.predictions.{name}" for name in ("bias", "decoder.weight", "decoder.bias")),
    *(f"cls.predictions.transform.dense.{name}" for name in ("weight", "bias")),
    *(f"cls.predictions.transform.LayerNorm.{name}" for name in ("weight", "bias", "gamma", "beta")),
    *(f"cls.seq_relationship.{name}" for name in ("weight", "bias")),
    *(f"lm_head.{name}" for name in ("bias", "decoder.weight", "decoder.bias")),
    *(f"lm_head.{layer}.{name}" for layer in ("dense", "layer_norm") for name in ("weight", "bias")),
)
"""Tensors of the pretraining heads (masked tokens, next sentence) in published checkpoints, which are not used."""

_UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids", "embeddings.token_type_ids")
"""Unused tensors under the prefix: a layer for classifiers, and buffers that follow from the config."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    return load_encoder(reader, weights, prefix="bert.", first_position=0)


def load_encoder(reader: ConfigReader, weights: WeightLoader, *, prefix: str, first_position: int) -> Program:
    """Build a model of BERT's layers.

    Args:
        reader: the config.
        weights: the checkpoint's tensors.
        prefix: prefix of the encoder's tensors in checkpoints that were saved with a head.
        first_position: the row of the position table for a text's first token.

    Raises:
        ModelFileError: see `families.load`.
    """
    config = _EncoderConfig.read(reader.with_defaults(_SIZES), first_position)
    shape, stream = config.shape, Register(STREAM, config.shape.hidden_size)
    parts = _Parts(config, weights, prefix if weights.has(f"{prefix}{_WORDS}") else "")
    for name in (*_HEADS, *(f"{parts.root}{each}" for each in _UNUSED)):
        weights.ignore(name)
    table = weights.take_table(f"{parts.root}{_WORDS}", (shape.vocab_size, shape.hidden_size))
    positions = parts.positions(first_position)
    # Each layer begins with the previous layer's last norm, so that the last layer's becomes the program's final norm.
    names = ["embeddings", *(f"{_LAYER}.{index}.output" for index in range(shape.num_layers))]
    norms = [parts.norm(f"{name}.LayerNorm") for name in names]

    def layer(index: int) -> Operations:
        name = f"{_LAYER}.{index}"
        return (
            *norms[index](stream, stream),
            *residual(stream, parts.attention(f"{name}.attention", index)),
            *parts.norm(f"{name}.attention.output.LayerNorm")(stream, stream),
            *residual(stream, parts.mlp(name)),
        )

    return Program(
        shape=shape,
        embedding=(Embed(stream, table), Embed(stream, positions, of_positions=True, adds=True)),
        layers=tuple(layer(index) for index in range(shape.num_layers)),
        final=norms[-1](stream, Register(OUT, shape.hidden_size)),
        head=Head(table),
        caches=(KvCacheSpec(shape.num_heads, shape.head_dim),) * shape.num_layers,
    )


@dataclass(frozen=True, slots=True)
class _EncoderConfig:
    """The settings of a BERT-like model.

    Attributes:
        shape: its `max_positions` is the longest text; the position table may have more rows.
        inner_size: hidden width of the MLP.
        types: rows of the table of token types.
    """

    shape: ModelShape
    inner_size: int
    activation: Activation
    eps: float
    types: int

    @classmethod
    def read(cls, reader: ConfigReader, first_position: int) -> _EncoderConfig:
        reader.expect("position_embedding_type", ["absolute"], "absolute")
        reader.expect("is_decoder", [False], False)
        reader.expect("add_cross_attention", [False], False)
        shape = read_shape(reader)
        longest = shape.max_positions - first_position
        if shape.num_heads * shape.head_dim != shape.hidden_size or shape.num_kv_heads != shape.num_heads:
            message = "this family has heads that add up to hidden_size, and keys for each"
            raise reader.error("num_attention_heads", message)
        if longest < 1:
            raise reader.error("max_position_embeddings", f"must be above {first_position}, got {shape.max_positions}")
        return cls(
            shape=replace(shape, max_positions=longest),
            inner_size=reader.integer("intermediate_size", 1, MAX_WIDTH),
            activation=PLAIN_ACTIVATIONS[reader.expect("hidden_act", list(PLAIN_ACTIVATIONS), "gelu")],
            eps=reader.number("layer_norm_eps", 0.0, 1.0, default=1e-12),
            types=reader.integer("type_vocab_size", 1, MAX_VOCAB, default=2),
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Makes the parts of such a model from the tensors whose names begin with `root`."""

    config: _EncoderConfig
    weights: WeightLoader
    root: str

    def positions(self, first_position: int) -> DenseWeight:
        """The position embeddings plus the embedding of the first token type: `[P, H]` float32."""
        shape, name = self.config.shape, f"{self.root}embeddings"
        rows, width = shape.max_positions + first_position, shape.hidden_size
        table = self.weights.take(f"{name}.position_embeddings.weight", (rows, width), torch.float32)
        types = self.weights.take(f"{name}.token_type_embeddings.weight", (self.config.types, width), torch.float32)
        return DenseWeight(table[first_position:].add_(types[0]))

    def norm(self, name: str) -> Normalization:
        """A layer norm; old checkpoints use TensorFlow's names for its weights."""
        old = self.weights.has(f"{self.root}{name}.gamma")
        weight, bias = (
            self.weights.take(f"{self.root}{name}.{each}", (self.config.shape.hidden_size,))
            for each in (("gamma", "beta") if old else ("weight", "bias"))
        )
        return Normalization(NormKind.LAYER, weight, bias, self.config.eps)

    def attention(self, name: str, layer: int) -> Attention:
        """Bidirectional self-attention."""
        shape = self.config.shape
        qkv = {f"{self.root}{name}.self.{each}": shape.hidden_size for each in ("query", "key", "value")}
        return Attention(
            heads=Heads(shape.num_heads, shape.num_heads, shape.head_dim),
            qkv=Projection.bind_fused(self.weights, qkv, shape.hidden_size, bias=True),
            output=self._projection(f"{name}.output.dense", shape.hidden_size, shape.hidden_size),
            cache=layer,
            spec=AttentionSpec(shape.head_dim**-0.5, ahead=None),
        )

    def mlp(self, name: str) -> PlainMlp:
        """The MLP of the layer `name`."""
        width, inner = self.config.shape.hidden_size, self.config.inner_size
        return PlainMlp(
            up=self._projection(f"{name}.intermediate.dense", inner, width),
            down=self._projection(f"{name}.output.dense", width, inner),
            inner_size=inner,
            activation=self.config.activation,
        )

    def _projection(self, name: str, outputs: int, inputs: int) -> Projection:
        return Projection.bind(self.weights, f"{self.root}{name}", outputs, inputs, bias=True)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """RoBERTa's files have the same form: their conversion drops the positions before a text's first."""
    if keys.get("attention.causal") is not False:
        raise keys.fail("attention.causal", "must be false in a bert file")
    heads, width = heads_and_width(keys)
    return {
        "num_hidden_layers": keys.size("block_count"),
        "hidden_size": width,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_attention_heads": heads,
        "max_position_embeddings": keys.size("context_length"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "type_vocab_size": keys.rows("token_types.weight"),
        "hidden_act": "gelu",
    }


_GGUF_LAYER = f"{_LAYER}.{{layer}}"

GGUF = GgufDialect(
    architecture="bert",
    model_type="bert",
    tensors={
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "blk.{layer}.attn_q": f"{_GGUF_LAYER}.attention.self.query",
        "blk.{layer}.attn_k": f"{_GGUF_LAYER}.attention.self.key",
        "blk.{layer}.attn_v": f"{_GGUF_LAYER}.attention.self.value",
        "blk.{layer}.attn_output": f"{_GGUF_LAYER}.attention.output.dense",
        "blk.{layer}.attn_output_norm": f"{_GGUF_LAYER}.attention.output.LayerNorm",
        "blk.{layer}.ffn_up": f"{_GGUF_LAYER}.intermediate.dense",
        "blk.{layer}.ffn_down": f"{_GGUF_LAYER}.output.dense",
        "blk.{layer}.layer_output_norm": f"{_GGUF_LAYER}.output.LayerNorm",
    },
    metadata=_gguf_settings,
)
