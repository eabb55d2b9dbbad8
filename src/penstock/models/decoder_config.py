"""Reads what the configurations of all Llama-like families have in common.

Decides bounds and defaults of the shared keys. Families say where they differ; a value that changes the computation and
is not implemented is refused by name.
"""

from __future__ import annotations

from penstock.contract.model import ModelShape
from penstock.models.config_reader import ConfigReader
from penstock.nn.decoder import DecoderConfig

__all__ = ["MAX_LAYERS", "MAX_POSITIONS", "MAX_VOCAB", "MAX_WIDTH", "layer_window", "read_decoder"]

# Beyond any published model, and small enough that nothing derived from a config alone can exhaust memory.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 21

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_decoder(
    reader: ConfigReader,
    *,
    window: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """Read the shared keys.

    Args:
        reader: the config.
        window: sliding window of some layer. Sequences no longer than it see the same keys with full attention, so it
        caps
            `max_positions` and the computation stays exact.
        head_dim: the family's default, where it is not the hidden size divided by the heads.
        qkv_bias: see `DecoderConfig`, here and below.
        output_bias: as there.
        mlp_bias: as there.
        qk_norm: as there.
    """
    reader.expect("hidden_act", ["silu"], "silu")
    positions = reader.integer("max_position_embeddings", 1, MAX_POSITIONS)
    shape = _read_shape(reader, head_dim, min(positions, window) if window else positions)
    if window is None and _SLIDING in _layer_types(reader, shape.num_layers):
        raise reader.error("layer_types", f"{_SLIDING!r} needs a sliding window, and the config sets none")
    return DecoderConfig(
        shape=shape,
        intermediate_size=reader.integer("intermediate_size", 1, MAX_WIDTH),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        rope=reader.rope(shape.head_dim, positions),
        tied=reader.boolean("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def layer_window(reader: ConfigReader) -> int | None:
    """The sliding window of Qwen's configurations, None where no layer uses one.

    With `use_sliding_window`, the layers from `max_window_layers` on slide, unless `layer_types` lists each layer.
    """
    if not reader.boolean("use_sliding_window", default=False):
        return None
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = _layer_types(reader, layers)
    first = reader.integer("max_window_layers", 0, 1 << 30, default=28)
    slides = _SLIDING in types if types else first < layers
    return reader.optional_integer("sliding_window", 1, 1 << 30, absent=4096) if slides else None


def _layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    return reader.choices("layer_types", [_FULL, _SLIDING], layers)


def _read_shape(reader: ConfigReader, head_dim: int | None, max_positions: int) -> ModelShape:
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
        max_positions=max_positions,
    )


def _read_head_dim(reader: ConfigReader, hidden: int, heads: int, default: int | None) -> int:
    if default is None and not reader.is_set("head_dim") and hidden % heads:
        raise reader.error("num_attention_heads", f"must divide hidden_size ({hidden}), got {heads}")
    head_dim = reader.integer("head_dim", 2, MAX_HEAD_DIM, default=default or hidden // heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"must be even to be rotated in halves, got {head_dim}")
    return head_dim
