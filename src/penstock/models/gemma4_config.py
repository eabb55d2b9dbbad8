"""Reads a Gemma 4 text configuration: how its layers differ, and what they share.

Decides which layers slide, which read the keys and values of another layer, and which heads each has. A value that
changes the computation and is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.contract.model import ModelShape
from penstock.kernels.experts import RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    MAX_WINDOW,
    DecoderConfig,
    layer_windows,
    read_decoder,
)
from penstock.models.rope_config import read_layer_rope
from penstock.nn.operations import Heads
from penstock.nn.rope import Rope

__all__ = ["Gemma4Config", "MixtureConfig", "read_config"]

_GELU = "gelu_pytorch_tanh"
_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "hidden_size_per_layer_input": 256,
}
"""Defaults for keys that a config may omit, from transformers' `Gemma4TextConfig`."""

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
_GLOBAL_HEAD_DIM, _PATTERN, _PER_LAYER_VOCAB = 512, 6, 262144


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Experts beside the MLP.

    Attributes:
        inner_size: hidden width of one expert.
    """

    router: RouterSpec
    inner_size: int


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """Everything that a program is built from.

    Attributes:
        decoder: what layers share, with the heads and rope of sliding layers.
        full: the same, with the heads and rope of layers with full attention.
        caches: for each layer, the index of the layer whose keys and values it reads: itself or an earlier one.
        wide_mlp: whether layers that read an earlier layer's keys have MLPs twice as wide.
        keys_are_values: whether layers with full attention use their keys as values, without a value projection.
        bias: whether attention projections have biases.
        softcap: soft cap of logits; None for none.
        per_layer: width of each layer's own input per token, besides the stream; 0 for none.
        per_layer_vocab: rows of the embedding table for these inputs.
        mixture: the experts; None for MLPs only.
    """

    decoder: DecoderConfig
    full: DecoderConfig
    caches: tuple[int, ...]
    wide_mlp: bool
    keys_are_values: bool
    bias: bool
    softcap: float | None
    per_layer: int
    per_layer_vocab: int
    mixture: MixtureConfig | None

    def of_layer(self, index: int) -> DecoderConfig:
        """The settings with the heads and rope of a layer."""
        return self.full if self.decoder.windows[index] is None else self.decoder

    def heads(self, index: int) -> Heads:
        """The heads of a layer."""
        shape = self.of_layer(index).shape
        return Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)

    def inner_size(self, index: int) -> int:
        """Hidden width of a layer's MLP."""
        shares = self.caches[index] != index
        return self.decoder.inner_size * (2 if self.wide_mlp and shares else 1)

    @property
    def owners(self) -> tuple[int, ...]:
        """The layers with their own keys and values."""
        return tuple(index for index, owner in enumerate(self.caches) if owner == index)


def read_config(reader: ConfigReader) -> Gemma4Config:
    """Read every key that changes the computation."""
    reader = reader.with_defaults({**_SIZES, "rope_parameters": _ROPES})
    reader.expect("hidden_activation", [_GELU], _GELU)
    reader.expect("use_bidirectional_attention", ["vision"], "vision")  # affects only images, which are not computed
    for key in ("rope_theta", "rope_scaling"):  # transformers does not read them
        if reader.is_set(key):
            raise reader.error(key, "is not implemented for this family; set rope_parameters for each layer type")
    windows = _read_windows(reader)
    keys_are_values = reader.boolean("attention_k_eq_v", default=False)
    decoder = read_decoder(
        reader, head_dim=256, tied=True, windows=windows, rope=lambda shape: _rope(reader, _SLIDING, shape, windows)
    )
    sliding, full = _read_shapes(reader, decoder.shape, windows, keys_are_values=keys_are_values)
    per_layer = reader.integer("hidden_size_per_layer_input", 0, MAX_WIDTH)
    return Gemma4Config(
        decoder=replace(decoder, shape=sliding),
        full=replace(decoder, shape=full, rope=_rope(reader, _FULL, full, windows)),
        caches=_read_caches(reader, windows),
        wide_mlp=reader.boolean("use_double_wide_mlp", default=False),
        keys_are_values=keys_are_values,
        bias=reader.boolean("attention_bias", default=False),
        softcap=reader.optional_number("final_logit_softcapping", 1e-3, 1e6),
        per_layer=per_layer,
        per_layer_vocab=_per_layer_vocab(reader, decoder.shape) if per_layer else 0,
        mixture=_read_mixture(reader),
    )


def _read_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """The window of each layer; by default every sixth layer, and the last one, attend to all positions."""
    window, last = reader.integer("sliding_window", 1, MAX_WINDOW, default=512), _layers(reader) - 1
    windows = layer_windows(reader, window, lambda layer: (layer + 1) % _PATTERN != 0 and layer != last)
    if windows[-1] is not None:  # transformers gives the last layer full attention nevertheless
        raise reader.error("layer_types", f"{_SLIDING!r} is not implemented for the last layer; it is {_FULL!r}")
    return windows


def _layers(reader: ConfigReader) -> int:
    return reader.integer("num_hidden_layers", 1, MAX_LAYERS)


def _rope(reader: ConfigReader, layer_type: str, shape: ModelShape, windows: Sequence[int | None]) -> Rope:
    """The rope of the layers of one type; it must be set if there are such layers."""
    theta = float(_ROPES[layer_type]["rope_theta"])  # type: ignore[arg-type]
    section = reader.section("rope_parameters")
    used = layer_type == _FULL or any(window is not None for window in windows)
    if used and not section.section(layer_type).keys():
        raise section.error(layer_type, "is missing")
    return read_layer_rope(reader, layer_type, shape.head_dim, shape.max_positions, theta=theta)


def _read_shapes(
    reader: ConfigReader, shape: ModelShape, windows: Sequence[int | None], *, keys_are_values: bool
) -> tuple[ModelShape, ModelShape]:
    """The shape with the heads of sliding layers, and the shape with the heads of layers with full attention.

    Configs set the latter heads by two separate keys, or by `per_layer_config`, as transformers writes them.
    """
    if reader.is_set("per_layer_config"):
        found = _per_layer_shapes(reader, shape)
        kinds = [{found.get(i, shape) for i, each in enumerate(windows) if (each is None) == full} for full in (0, 1)]
        if any(len(kind) > 1 for kind in kinds):
            raise reader.error("per_layer_config", "layers of one type that differ are not implemented")
        return kinds[0].pop() if kinds[0] else shape, kinds[1].pop()
    kv_heads = shape.num_kv_heads
    if keys_are_values:
        kv_heads = reader.integer("num_global_key_value_heads", 1, MAX_HEADS, default=kv_heads)
    _check_heads(reader, "num_global_key_value_heads", shape.num_heads, kv_heads)
    head_dim = _even(reader, "global_head_dim", _GLOBAL_HEAD_DIM)
    return shape, replace(shape, head_dim=head_dim, num_kv_heads=kv_heads)


def _per_layer_shapes(reader: ConfigReader, shape: ModelShape) -> dict[int, ModelShape]:
    """The shapes of the layers that `per_layer_config` names, by layer index."""
    section, found = reader.section("per_layer_config"), {}
    for key in section.keys():  # noqa: SIM118 - a reader is no mapping
        if not key.isdecimal() or int(key) >= shape.num_layers:
            raise section.error(key, f"is no layer; there are {shape.num_layers}")
        layer = section.section(key)
        for name in layer.keys():  # noqa: SIM118
            if name not in ("head_dim", "num_key_value_heads"):
                raise layer.error(name, "is not implemented for single layers")
        kv_heads = layer.integer("num_key_value_heads", 1, MAX_HEADS, default=shape.num_kv_heads)
        _check_heads(layer, "num_key_value_heads", shape.num_heads, kv_heads)
        head_dim = _even(layer, "head_dim", shape.head_dim)
        found[int(key)] = replace(shape, head_dim=head_dim, num_kv_heads=kv_heads)
    return found


def _even(reader: ConfigReader, key: str, default: int) -> int:
    head_dim = reader.integer(key, 2, MAX_HEAD_DIM, default=default)
    if head_dim % 2:
        raise reader.error(key, f"must be even to be rotated in halves, got {head_dim}")
    return head_dim


def _check_heads(reader: ConfigReader, key: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise reader.error(key, f"must divide num_attention_heads ({heads}), got {kv_heads}")


def _read_caches(reader: ConfigReader, windows: Sequence[int | None]) -> tuple[int, ...]:
    """The layer whose keys each layer reads: the last `num_kv_shared_layers` read an earlier one of their own type."""
    shared = reader.integer("num_kv_shared_layers", 0, MAX_LAYERS, default=0)
    own = len(windows) - shared
    owners = {window: index for index, window in enumerate(windows[: max(own, 0)])}
    for window in windows:
        if window not in owners:
            kind = _FULL if window is None else _SLIDING
            raise reader.error("num_kv_shared_layers", f"{shared} leaves no {kind!r} layer with keys of its own")
    return tuple(index if index < own else owners[window] for index, window in enumerate(windows))


def _per_layer_vocab(reader: ConfigReader, shape: ModelShape) -> int:
    key = "vocab_size_per_layer_input"
    rows = reader.integer(key, 1, MAX_VOCAB, default=_PER_LAYER_VOCAB)
    if rows < shape.vocab_size:
        message = f"{shape.vocab_size} tokens are more than the {rows} that layers have inputs for ({key})"
        raise reader.error(key if reader.is_set(key) else "vocab_size", message)
    return rows


def _read_mixture(reader: ConfigReader) -> MixtureConfig | None:
    if not reader.boolean("enable_moe_block", default=False):
        return None
    experts = reader.integer("num_experts", 1, MAX_EXPERTS)
    top_k = reader.integer("top_k_experts", 1, experts)
    router = RouterSpec(experts, top_k, scoring="softmax", normalise=True)
    return MixtureConfig(router, reader.integer("moe_intermediate_size", 1, MAX_WIDTH))
