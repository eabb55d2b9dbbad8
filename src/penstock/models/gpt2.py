"""GPT-2: `model_type` "gpt2".

LayerNorm with biases before attention and MLP, learned positions, one fused projection for queries, keys and values,
and weights stored as `[inputs, outputs]` (the Conv1D of the original release), transposed once when they are taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, PLAIN_ACTIVATIONS, bind_head
from penstock.nn.blocks import Attention, Normalization, PlainMlp, Projection, residual
from penstock.nn.operations import Activation, Embed, Heads, Operations, Register
from penstock.nn.program import OUT, STREAM, Head, Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import heads_and_width
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "GPT2Config", "load"]


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The settings of a GPT-2.

    Attributes:
        inner_size: hidden width of the MLP.
        tied: whether the head is the token embedding, unless the checkpoint has a head that differs from it.
    """

    shape: ModelShape
    inner_size: int
    activation: Activation
    eps: float
    tied: bool

    @classmethod
    def read(cls, reader: ConfigReader) -> GPT2Config:
        """Check and read a config."""
        reader.expect("scale_attn_weights", [True], True)
        reader.expect("scale_attn_by_inverse_layer_idx", [False], False)
        reader.expect("reorder_and_upcast_attn", [False], False)
        reader.expect("add_cross_attention", [False], False)
        shape = _read_shape(reader)
        return cls(
            shape=shape,
            inner_size=reader.integer("n_inner", 1, MAX_WIDTH, default=4 * shape.hidden_size),
            activation=PLAIN_ACTIVATIONS[reader.expect("activation_function", list(PLAIN_ACTIVATIONS), "gelu_new")],
            eps=reader.number("layer_norm_epsilon", 0.0, 1.0, default=1e-5),
            tied=reader.boolean("tie_word_embeddings", default=True),
        )


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    config = GPT2Config.read(reader)
    shape, stream = config.shape, Register(STREAM, config.shape.hidden_size)
    # Checkpoints saved without their head, including the original release, have no prefix.
    root = "transformer." if weights.has("transformer.wte.weight") else ""
    tokens = weights.take_table(f"{root}wte.weight", (shape.vocab_size, shape.hidden_size))
    layers = tuple(_bind_layer(config, weights, stream, i, f"{root}h.{i}") for i in range(shape.num_layers))
    norm = Normalization.bind_layer(weights, f"{root}ln_f", shape.hidden_size, config.eps)
    positions = weights.take_table(f"{root}wpe.weight", (shape.max_positions, shape.hidden_size))
    return Program(
        shape=shape,
        embedding=(Embed(stream, tokens), Embed(stream, positions, of_positions=True, adds=True)),
        layers=layers,
        final=norm(stream, Register(OUT, shape.hidden_size)),
        head=Head(bind_head(weights, f"{root}wte", tokens, shape, tied=config.tied)),
        caches=(KvCacheSpec(shape.num_kv_heads, shape.head_dim),) * shape.num_layers,
    )


def _bind_layer(config: GPT2Config, weights: WeightLoader, stream: Register, index: int, name: str) -> Operations:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""
    shape, inner, hidden = config.shape, config.inner_size, config.shape.hidden_size
    # Old checkpoints store the causal mask and its fill value as buffers.
    weights.ignore(f"{name}.attn.bias")
    weights.ignore(f"{name}.attn.masked_bias")
    attention = Attention(
        heads=Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
        qkv=Projection.bind_transposed(weights, f"{name}.attn.c_attn", 3 * hidden, hidden),
        output=Projection.bind_transposed(weights, f"{name}.attn.c_proj", hidden, hidden),
        cache=index,
        spec=AttentionSpec(shape.head_dim**-0.5),
    )
    mlp = PlainMlp(
        up=Projection.bind_transposed(weights, f"{name}.mlp.c_fc", inner, hidden),
        down=Projection.bind_transposed(weights, f"{name}.mlp.c_proj", hidden, inner),
        inner_size=inner,
        activation=config.activation,
    )
    norms = [Normalization.bind_layer(weights, f"{name}.{part}", hidden, config.eps) for part in ("ln_1", "ln_2")]
    return (*residual(stream, attention, before=norms[0]), *residual(stream, mlp, before=norms[1]))


def _read_shape(reader: ConfigReader) -> ModelShape:
    hidden = reader.integer("n_embd", 1, MAX_WIDTH // 4)
    heads = reader.integer("n_head", 1, hidden)
    if hidden % heads:
        raise reader.error("n_head", f"must divide n_embd ({hidden}), got {heads}")
    return ModelShape(
        num_layers=reader.integer("n_layer", 1, MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=reader.integer("vocab_size", 1, MAX_VOCAB),
        max_positions=reader.integer("n_positions", 1, MAX_POSITIONS),
    )


def _settings(keys: GgufKeys) -> dict[str, Any]:
    heads, width = heads_and_width(keys)
    if width % heads:
        raise keys.fail("embedding_length", f"{width} is no multiple of {heads} heads")
    if keys.size("attention.head_count_kv", heads) != heads:
        raise keys.fail("attention.head_count_kv", "must equal attention.head_count in a gpt2 file")
    return {
        "n_layer": keys.size("block_count"),
        "n_embd": width,
        "n_head": heads,
        "n_inner": keys.size("feed_forward_length", 4 * width),
        "n_positions": keys.size("context_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_PROJECTIONS = {
    "blk.{layer}.attn_qkv": "transformer.h.{layer}.attn.c_attn",
    "blk.{layer}.attn_output": "transformer.h.{layer}.attn.c_proj",
    "blk.{layer}.ffn_up": "transformer.h.{layer}.mlp.c_fc",
    "blk.{layer}.ffn_down": "transformer.h.{layer}.mlp.c_proj",
}

GGUF = GgufDialect(
    architecture="gpt2",
    model_type="gpt2",
    tensors={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.{layer}.attn_norm": "transformer.h.{layer}.ln_1",
        "blk.{layer}.ffn_norm": "transformer.h.{layer}.ln_2",
        **_PROJECTIONS,
    },
    metadata=_settings,
    arrangements={f"{name}.weight": Arrangement.TRANSPOSED for name in _PROJECTIONS},
)
