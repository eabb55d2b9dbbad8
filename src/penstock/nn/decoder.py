"""The decoder that Llama made common: pre-norm, rotary grouped-query attention, gated MLP.

Decides the computation and the checkpoint's tensor names; families declare only where they differ (biases, norms on
queries and keys). Knows no config file and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels.activation import silu_and_mul
from penstock.kernels.native_decoder import NativeDecoder, NativeLayer
from penstock.kernels.norm import rms_norm
from penstock.nn.attention import Heads, RotaryAttention
from penstock.nn.causal_lm import Attend, PagedAttend
from penstock.nn.compiled import compiles, embedded, projection, run_compiled
from penstock.nn.head import bind_head, hidden_dtype, logits
from penstock.nn.layers import Embedding, Linear, RMSNorm
from penstock.nn.mlp import GatedMLP
from penstock.nn.parameters import Parameters
from penstock.nn.rope import Rope, RotaryTable

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All that tells one such model from another.

    Attributes:
        intermediate_size: width of the MLP's inside.
        tied: the head is the embedding.
        qkv_bias: query, key and value projections have biases.
        output_bias: the attention's output projection has a bias.
        mlp_bias: the MLP's three projections have biases.
        qk_norm: queries and keys are normed over each head before they are rotated.
    """

    shape: ModelShape
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    attention_norm: RMSNorm
    attention: RotaryAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, layer: int, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """`[T, H]` to `[T, H]`; see `RotaryAttention` for `rotation`."""
        x = self.attention(self.attention_norm(x), x, layer, rotation, attend)
        return self.mlp(self.mlp_norm(x), x)


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A `CausalLM`.

    Attributes:
        compiled: the layers and the last norm as one compiled call, where they can be.
    """

    shape: ModelShape
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Linear
    rope: RotaryTable
    compiled: NativeDecoder | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `CausalLM.forward`."""
        if self.compiled is not None and isinstance(attend, PagedAttend):
            stream = embedded(token_ids, self.embedding)  # [T, H]
            return run_compiled(self.compiled, stream, positions, attend, hidden_dtype(self.head))
        rotation = self.rope.rows(positions)
        x = self.embedding(token_ids)  # [T, H]
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotation, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return logits(self.head, hidden)

    @classmethod
    def bind(cls, config: DecoderConfig, parameters: Parameters) -> Decoder:
        """Take every tensor of the model by its Hugging Face name, and ignore by name the redundant ones."""
        shape = config.shape
        table = Embedding.bind(parameters, "model.embed_tokens", shape.vocab_size, shape.hidden_size)
        layers = tuple(_bind_layer(config, parameters, f"model.layers.{i}") for i in range(shape.num_layers))
        # Older checkpoints store the frequencies that the config already determines.
        parameters.ignore("model.rotary_emb.inv_freq")
        norm = RMSNorm.bind(parameters, "model.norm", shape.hidden_size, config.rms_norm_eps)
        rope = RotaryTable.build(config.rope, shape.head_dim, shape.max_positions, parameters.device)
        return cls(
            shape=shape,
            embedding=table,
            layers=layers,
            norm=norm,
            head=bind_head(parameters, table, shape.vocab_size, shape.hidden_size, tied=config.tied),
            rope=rope,
            compiled=_compiled(config, layers, norm, rope, parameters.dtype),
        )


def _compiled(
    config: DecoderConfig, layers: tuple[DecoderLayer, ...], norm: RMSNorm, rope: RotaryTable, dtype: torch.dtype
) -> NativeDecoder | None:
    """The layers as one call, if compiled kernels do all that they do; None leaves them to run one by one."""
    head_dim = config.shape.head_dim
    if head_dim % 2 or not compiles(dtype, head_dim, (linear for layer in layers for linear in _linears(layer))):
        return None
    return NativeDecoder(
        hidden=config.shape.hidden_size,
        inner=config.intermediate_size,
        q_heads=config.shape.num_heads,
        kv_heads=config.shape.num_kv_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        normalise=rms_norm,
        activation=silu_and_mul,
        dtype=dtype,
        layers=[_native_layer(layer) for layer in layers],
        norm=(norm.weight, None),
        rotation=(rope.cos, rope.sin),
    )


def _linears(layer: DecoderLayer) -> tuple[Linear, Linear, Linear, Linear]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down


def _native_layer(layer: DecoderLayer) -> NativeLayer:
    qkv, output, gate_up, down = (projection(linear) for linear in _linears(layer))
    q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
    return NativeLayer(
        attention_norm=(layer.attention_norm.weight, None),
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        output=output,
        mlp_norm=(layer.mlp_norm.weight, None),
        gate_up=gate_up,
        down=down,
    )


def _bind_layer(config: DecoderConfig, parameters: Parameters, name: str) -> DecoderLayer:
    hidden, eps = config.shape.hidden_size, config.rms_norm_eps
    return DecoderLayer(
        attention_norm=RMSNorm.bind(parameters, f"{name}.input_layernorm", hidden, eps),
        attention=_bind_attention(config, parameters, f"{name}.self_attn"),
        mlp_norm=RMSNorm.bind(parameters, f"{name}.post_attention_layernorm", hidden, eps),
        mlp=GatedMLP.bind(parameters, f"{name}.mlp", hidden, config.intermediate_size, bias=config.mlp_bias),
    )


def _bind_attention(config: DecoderConfig, parameters: Parameters, name: str) -> RotaryAttention:
    shape = config.shape
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    parts = {f"{name}.q_proj": q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
    q_norm = k_norm = None
    if config.qk_norm:
        q_norm = RMSNorm.bind(parameters, f"{name}.q_norm", shape.head_dim, config.rms_norm_eps)
        k_norm = RMSNorm.bind(parameters, f"{name}.k_norm", shape.head_dim, config.rms_norm_eps)
    parameters.ignore(f"{name}.rotary_emb.inv_freq")
    return RotaryAttention(
        heads=Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
        qkv=Linear.bind_fused(parameters, parts, shape.hidden_size, bias=config.qkv_bias),
        output=Linear.bind(parameters, f"{name}.o_proj", shape.hidden_size, q_width, bias=config.output_bias),
        q_norm=q_norm,
        k_norm=k_norm,
    )
