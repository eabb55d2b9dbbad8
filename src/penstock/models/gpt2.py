"""GPT-2: `model_type` "gpt2".

LayerNorm with biases before each half, learned positions, one fused projection for queries, keys and values, and
weights stored as `[inputs, outputs]` (the Conv1D of the original release), which are transposed once when they are
taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels.activation import gelu, gelu_new, relu
from penstock.kernels.native_decoder import NativeDecoder, NativeLayer, Norm
from penstock.kernels.norm import layer_norm
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder_config import MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH
from penstock.nn.attention import Heads, PlainAttention
from penstock.nn.causal_lm import Attend, CausalLM, PagedAttend
from penstock.nn.compiled import compiles, embedded, projection, run_compiled
from penstock.nn.head import bind_head, hidden_dtype, logits
from penstock.nn.layers import Embedding, LayerNorm, Linear
from penstock.nn.mlp import PlainMLP
from penstock.nn.parameters import Parameters

__all__ = ["GPT2", "GPT2Config", "GPT2Layer", "load"]

_ACTIVATIONS = {"gelu_new": gelu_new, "gelu_pytorch_tanh": gelu_new, "gelu": gelu, "relu": relu}


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """All that tells one GPT-2 from another.

    Attributes:
        inner_size: width of the MLP's inside.
        activation: name of the MLP's activation function.
        tied: the head is the token embedding.
    """

    shape: ModelShape
    inner_size: int
    activation: str
    layer_norm_epsilon: float
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
            activation=reader.expect("activation_function", list(_ACTIVATIONS), "gelu_new"),
            layer_norm_epsilon=reader.number("layer_norm_epsilon", 0.0, 1.0, default=1e-5),
            tied=reader.boolean("tie_word_embeddings", default=True),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GPT2Layer:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    attention_norm: LayerNorm
    attention: PlainAttention
    mlp_norm: LayerNorm
    mlp: PlainMLP

    def __call__(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """`[T, H]` to `[T, H]`."""
        x = self.attention(self.attention_norm(x), x, layer, attend)
        return self.mlp(self.mlp_norm(x), x)


@dataclass(frozen=True, slots=True, eq=False)
class GPT2:
    """A `CausalLM`.

    Attributes:
        compiled: the layers and the last norm as one compiled call, where they can be.
    """

    shape: ModelShape
    tokens: Embedding
    positions: Embedding
    layers: tuple[GPT2Layer, ...]
    norm: LayerNorm
    head: Linear
    compiled: NativeDecoder | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `CausalLM.forward`."""
        if self.compiled is not None and isinstance(attend, PagedAttend):
            stream = embedded(token_ids, self.tokens).add_(embedded(positions, self.positions))  # [T, H]
            return run_compiled(self.compiled, stream, positions, attend, hidden_dtype(self.head))
        x = self.tokens(token_ids) + self.positions(positions)  # [T, H]
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return logits(self.head, hidden)


def load(reader: ConfigReader, parameters: Parameters) -> CausalLM:
    """Build the model; see `families.load`."""
    config = GPT2Config.read(reader)
    shape = config.shape
    # Checkpoints saved without their head, the original release among them, have no prefix.
    root = "transformer." if parameters.has("transformer.wte.weight") else ""
    tokens = Embedding.bind(parameters, f"{root}wte", shape.vocab_size, shape.hidden_size)
    layers = tuple(_bind_layer(config, parameters, f"{root}h.{i}") for i in range(shape.num_layers))
    norm = LayerNorm.bind(parameters, f"{root}ln_f", shape.hidden_size, config.layer_norm_epsilon)
    return GPT2(
        shape=shape,
        tokens=tokens,
        positions=Embedding.bind(parameters, f"{root}wpe", shape.max_positions, shape.hidden_size),
        layers=layers,
        norm=norm,
        head=bind_head(parameters, tokens, shape.vocab_size, shape.hidden_size, tied=config.tied),
        compiled=_compiled(config, layers, norm, parameters.dtype),
    )


def _compiled(
    config: GPT2Config, layers: tuple[GPT2Layer, ...], norm: LayerNorm, dtype: torch.dtype
) -> NativeDecoder | None:
    """The layers as one call, if compiled kernels do all that they do; None leaves them to run one by one."""
    shape = config.shape
    if not compiles(dtype, shape.head_dim, (linear for layer in layers for linear in _linears(layer))):
        return None
    return NativeDecoder(
        hidden=shape.hidden_size,
        inner=config.inner_size,
        q_heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=config.layer_norm_epsilon,
        normalise=layer_norm,
        activation=_ACTIVATIONS[config.activation],
        dtype=dtype,
        layers=[_native_layer(layer) for layer in layers],
        norm=_native_norm(norm),
        rotation=None,  # positions are in the stream already
    )


def _linears(layer: GPT2Layer) -> tuple[Linear, Linear, Linear, Linear]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down


def _native_layer(layer: GPT2Layer) -> NativeLayer:
    qkv, output, up, down = (projection(linear) for linear in _linears(layer))
    return NativeLayer(
        attention_norm=_native_norm(layer.attention_norm),
        qkv=qkv,
        q_norm=None,
        k_norm=None,
        output=output,
        mlp_norm=_native_norm(layer.mlp_norm),
        gate_up=up,
        down=down,
    )


def _native_norm(norm: LayerNorm) -> Norm:
    return norm.weight, norm.bias


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


def _bind_layer(config: GPT2Config, parameters: Parameters, name: str) -> GPT2Layer:
    shape, inner, eps = config.shape, config.inner_size, config.layer_norm_epsilon
    hidden = shape.hidden_size
    # The causal mask and its fill value, which old checkpoints store as buffers.
    parameters.ignore(f"{name}.attn.bias")
    parameters.ignore(f"{name}.attn.masked_bias")
    return GPT2Layer(
        attention_norm=LayerNorm.bind(parameters, f"{name}.ln_1", hidden, eps),
        attention=PlainAttention(
            heads=Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            qkv=Linear.bind_transposed(parameters, f"{name}.attn.c_attn", 3 * hidden, hidden),
            output=Linear.bind_transposed(parameters, f"{name}.attn.c_proj", hidden, hidden),
        ),
        mlp_norm=LayerNorm.bind(parameters, f"{name}.ln_2", hidden, eps),
        mlp=PlainMLP(
            up=Linear.bind_transposed(parameters, f"{name}.mlp.c_fc", inner, hidden),
            activation=_ACTIVATIONS[config.activation],
            down=Linear.bind_transposed(parameters, f"{name}.mlp.c_proj", hidden, inner),
        ),
    )
