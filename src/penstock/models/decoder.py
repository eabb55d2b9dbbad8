"""The decoder that Llama made common: rotary grouped-query attention and a gated MLP, each after a norm.

Most families are built from it. Decides how the shared keys of a config are read and bounded, and the tensor names of
the shared parts. Families say where they differ, and assemble the parts of a layer. A value that changes the
computation and is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.contract.model import KvCacheSpec, ModelShape, StateSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.linear import Weight
from penstock.models.config_reader import LAYER_TYPES, MAX_POSITIONS, ConfigReader
from penstock.models.rope_config import read_rope
from penstock.nn.blocks import Attention, Block, GatedMlp, Normalization, Projection, residual, rms_norm
from penstock.nn.operations import Activation, Embed, Heads, NormKind, Operations, Register
from penstock.nn.program import OUT, STREAM, Head, Program
from penstock.nn.rope import Rope, RotaryTable
from penstock.nn.weight_loader import WeightLoader

__all__ = [
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "MAX_VOCAB",
    "MAX_WIDTH",
    "MAX_WINDOW",
    "PLAIN_ACTIVATIONS",
    "DecoderConfig",
    "DecoderParts",
    "bind_head",
    "layer_windows",
    "read_decoder",
    "read_shape",
]

# Larger than in any published model, and small enough that nothing derived from a config alone can exhaust memory.
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 14
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_WINDOW = 1 << 30

PLAIN_ACTIVATIONS = {
    "gelu_new": Activation.GELU_NEW,
    "gelu_pytorch_tanh": Activation.GELU_NEW,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
}
"""Activations of an MLP without a gate, by their names in configs."""

_SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The settings that models with this decoder share.

    Attributes:
        inner_size: hidden width of the MLP.
        tied: whether the head is the embedding, unless the checkpoint has a head that differs from it.
        windows: for each layer, the number of positions it attends to, including its own; None for all.
        norm: the kind of all norms of the stream.
    """

    shape: ModelShape
    inner_size: int
    eps: float
    rope: Rope
    tied: bool
    windows: tuple[int | None, ...]
    norm: NormKind = NormKind.RMS


def read_decoder(
    reader: ConfigReader,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    norm: NormKind = NormKind.RMS,
    windows: tuple[int | None, ...] | None = None,
    partial_rotary: bool = False,
    rope_theta: float = 10000.0,
    rope: Callable[[ModelShape], Rope] | None = None,
    inner_size: int | None = None,
) -> DecoderConfig:
    """Read the shared keys.

    Args:
        reader: the config.
        head_dim: the family's default, if it is not the hidden size divided by the heads.
        tied: the family's default for `tie_word_embeddings`.
        eps: the family's default for `eps_key`.
        eps_key: the family's key for the epsilon of its norms.
        norm: see `DecoderConfig`.
        windows: see `DecoderConfig`; None for no window in any layer, which `layer_types` must not contradict.
        partial_rotary: whether the family supports a `partial_rotary_factor` below 1.
        rope_theta: the family's default for `rope_theta`.
        rope: the family's own function to read the rotary embedding; None for the shared keys.
        inner_size: the MLP's hidden width, if the family does not read it from `intermediate_size`.
    """
    shape = read_shape(reader, head_dim)
    if rope is None:
        read = read_rope(reader, shape.head_dim, shape.max_positions, partial=partial_rotary, theta=rope_theta)
    else:
        read = rope(shape)
    if read.width(shape.head_dim) > shape.head_dim:
        key = _head_dim_key(reader, head_dim)
        raise reader.error(key, f"heads must be even to be rotated in halves, got {shape.head_dim} elements")
    if windows is None and _SLIDING in _layer_types(reader, shape.num_layers):
        raise reader.error("layer_types", f"{_SLIDING!r} needs a sliding window, and the config sets none")
    return DecoderConfig(
        shape=replace(shape, max_positions=max(shape.max_positions, read.reaches)),
        inner_size=inner_size or reader.integer("intermediate_size", 1, MAX_WIDTH),
        eps=reader.number(eps_key, 0.0, 1.0, default=eps),
        rope=read,
        tied=reader.boolean("tie_word_embeddings", default=tied),
        windows=(None,) * shape.num_layers if windows is None else windows,
        norm=norm,
    )


def read_shape(reader: ConfigReader, head_dim: int | None = None) -> ModelShape:
    """The sizes under their usual keys; `head_dim` as in `read_decoder`."""
    positions = reader.integer("max_position_embeddings", 1, MAX_POSITIONS)
    hidden = reader.integer("hidden_size", 1, MAX_WIDTH)
    heads = reader.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = reader.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads ({heads}), got {kv_heads}")
    return ModelShape(
        num_layers=reader.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_read_head_dim(reader, hidden, heads, head_dim),
        vocab_size=reader.integer("vocab_size", 1, MAX_VOCAB),
        max_positions=positions,
    )


def layer_windows(reader: ConfigReader, window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` if the config sets it, otherwise by the family's rule.

    Args:
        reader: the config.
        window: number of positions that sliding layers attend to; None if no layer slides.
        slides: whether a layer, given by its index, slides if `layer_types` is not set.
    """
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = _layer_types(reader, layers)
    sliding = [types[i] == _SLIDING if types else slides(i) for i in range(layers)]
    if window is None and types and any(sliding):
        raise reader.error("layer_types", f"{_SLIDING!r} needs a sliding window, and the config sets none")
    return tuple(window if each else None for each in sliding)


class DecoderParts:
    """Makes the parts of a model from a checkpoint with Hugging Face's names.

    Owned by the family's `load`; its product is the program.
    """

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        self.config = config
        self.weights = weights
        self.stream = Register(STREAM, config.shape.hidden_size)
        self._tables: dict[Rope, RotaryTable] = {}

    @property
    def rope(self) -> RotaryTable:
        """The angles of all positions."""
        return self.rotary_table(self.config.rope)

    def rotary_table(self, rope: Rope) -> RotaryTable:
        """The angles of all positions for `rope`; the same table for an equal one."""
        if rope not in self._tables:
            shape = self.config.shape
            self._tables[rope] = RotaryTable.build(rope, shape.head_dim, shape.max_positions, self.weights.device)
        return self._tables[rope]

    def norm(self, name: str, width: int = 0, *, plus_one: bool = False) -> Normalization:
        """A norm of the family's kind; `width` 0 means the stream's width, and `plus_one` is for RMS norms only."""
        width, eps = width or self.config.shape.hidden_size, self.config.eps
        if self.config.norm is NormKind.LAYER:
            assert not plus_one, "layer norms are stored as they are"
            return Normalization.bind_layer(self.weights, name, width, eps)
        return rms_norm(self.weights, name, width, eps, plus_one=plus_one)

    def attention(
        self,
        name: str,
        layer: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        spec: AttentionSpec | None = None,
        norms: tuple[Normalization, Normalization] | None = None,
        norms_heads: bool = True,
        output_name: str = "o_proj",
        query_parts: int = 1,
        inputs: int = 0,
    ) -> Attention:
        """Self-attention under `name`.

        Args:
            name: prefix of the tensors.
            layer: index of the layer, and so of its cache and its window.
            qkv_bias: whether query, key and value projections have biases.
            output_bias: whether the output projection has a bias.
            spec: how scores are computed; None for `1 / sqrt(D)` and the layer's window.
            norms: norms of queries and keys, applied before rotation.
            norms_heads: see `Attention`.
            output_name: name of the output projection.
            query_parts: width of the query projection, as a multiple of the queries' width.
            inputs: width of what it reads; 0 for the stream's.
        """
        shape = self.config.shape
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {f"{name}.q_proj": query_parts * q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
        self.weights.ignore(f"{name}.rotary_emb.inv_freq")  # older checkpoints store what the config determines
        q_norm, k_norm = norms or (None, None)
        return Attention(
            heads=Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            qkv=Projection.bind_fused(self.weights, parts, inputs or shape.hidden_size, bias=qkv_bias),
            output=Projection.bind(self.weights, f"{name}.{output_name}", shape.hidden_size, q_width, bias=output_bias),
            cache=layer,
            spec=spec or AttentionSpec(shape.head_dim**-0.5, window=self.config.windows[layer]),
            rope=self.rope,
            q_norm=q_norm,
            k_norm=k_norm,
            norms_heads=norms_heads,
        )

    def mlp(
        self,
        name: str,
        *,
        bias: bool = False,
        activation: Activation = Activation.SILU_AND_MUL,
        inner_size: int = 0,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> GatedMlp:
        """A gated MLP: the gate, up and down projections under `name`, called `names` there."""
        hidden, inner = self.config.shape.hidden_size, inner_size or self.config.inner_size
        gate, up, down = (f"{name}.{each}" for each in names)
        parts = {gate: inner, up: inner}
        return GatedMlp(
            gate_up=Projection.bind_fused(self.weights, parts, hidden, bias=bias),
            down=Projection.bind(self.weights, down, hidden, inner, bias=bias),
            inner_size=inner,
            activation=activation,
        )

    def pre_norm_layer(self, name: str, attention: Block, mlp: Block) -> Operations:
        """Llama's layer: attention and MLP, each after its own norm."""
        attention_norm = self.norm(f"{name}.input_layernorm")
        mlp_norm = self.norm(f"{name}.post_attention_layernorm")
        return (
            *residual(self.stream, attention, before=attention_norm),
            *residual(self.stream, mlp, before=mlp_norm),
        )

    def program(
        self,
        layer: Callable[[int, str], Operations],
        *,
        embedding_scale: float = 1.0,
        plus_one: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        final_norm: str = "model.norm",
        cached: Sequence[int] | None = None,
        states: Sequence[StateSpec] = (),
    ) -> Program:
        """The whole model.

        Args:
            layer: makes a layer's operations from its index and the prefix of its tensors.
            embedding_scale: factor on embeddings.
            plus_one: for the last norm; see `rms_norm`.
            softcap: soft cap of logits; see `Head`.
            logit_scale: factor on logits.
            final_norm: name of the last norm.
            cached: the layers that have a cache, in the order of the caches; None for all.
            states: see `Program.states`.
        """
        config, shape = self.config, self.config.shape
        table = self.weights.take_table("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
        layers = tuple(layer(i, f"model.layers.{i}") for i in range(shape.num_layers))
        self.weights.ignore("model.rotary_emb.inv_freq")
        norm = self.norm(final_norm, plus_one=plus_one)
        windows = config.windows if cached is None else [config.windows[layer] for layer in cached]
        head = bind_head(self.weights, "model.embed_tokens", table, shape, tied=config.tied)
        return Program(
            shape=shape,
            embedding=(Embed(self.stream, table, scale=embedding_scale),),
            layers=layers,
            final=norm(self.stream, Register(OUT, shape.hidden_size)),
            head=Head(head, softcap, logit_scale),
            caches=tuple(KvCacheSpec(shape.num_kv_heads, shape.head_dim, window) for window in windows),
            states=tuple(states),
        )


def bind_head(weights: WeightLoader, table_name: str, table: Weight, shape: ModelShape, *, tied: bool) -> Weight:
    """Take `lm_head.weight` `[V, H]`; or, if `tied`, share the embedding `table`, stored as `table_name.weight`.

    If a tied checkpoint stores a head that differs from the embedding, that head is used, as in transformers.
    """
    if tied and not (weights.has("lm_head.weight") and weights.differ("lm_head.weight", f"{table_name}.weight")):
        weights.ignore("lm_head.weight")
        return table
    return weights.take_linear([("lm_head.weight", (shape.vocab_size, shape.hidden_size))])


def _layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    return reader.choices("layer_types", LAYER_TYPES, layers)


def _read_head_dim(reader: ConfigReader, hidden: int, heads: int, default: int | None) -> int:
    if _head_dim_key(reader, default) == "head_dim":
        return reader.integer("head_dim", 2, MAX_HEAD_DIM, default=default)
    if hidden % heads:
        raise reader.error("num_attention_heads", f"must divide hidden_size ({hidden}), got {heads}")
    if not 2 <= hidden // heads <= MAX_HEAD_DIM:
        raise reader.error(
            "hidden_size", f"{hidden} gives each of {heads} heads {hidden // heads} elements, not 2..{MAX_HEAD_DIM}"
        )
    return hidden // heads


def _head_dim_key(reader: ConfigReader, default: int | None) -> str:
    """The key that decides how large a head is: `hidden_size`, divided among heads, if nothing sets `head_dim`."""
    return "head_dim" if default is not None or reader.is_set("head_dim") else "hidden_size"
