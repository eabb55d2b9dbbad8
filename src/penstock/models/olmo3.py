"""OLMo 3: `model_type` "olmo3" (OLMo Team 2025).

The layers of `olmo2`, three of four with a sliding window. Windowed layers are rotated as in the pretraining: RoPE
scaling for longer contexts applies only to layers with full attention. GGUF files have the architecture `olmo2` and are
recognised by their window.
"""

from __future__ import annotations

from penstock.contract.model import ModelShape
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WINDOW, layer_windows, read_decoder, read_shape
from penstock.models.olmo2 import build
from penstock.models.rope_config import read_layer_rope
from penstock.nn.program import Program
from penstock.nn.rope import Rope
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]

_INTERVAL = 4


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
    if window is None and not reader.is_set("layer_types"):
        raise reader.error("sliding_window", "must be set where layer_types does not say that no layer slides")
    windows = layer_windows(reader, window, lambda layer: (layer + 1) % _INTERVAL != 0)
    local = _read_rope(reader, read_shape(reader), "sliding_attention")
    config = read_decoder(
        reader, eps=1e-5, windows=windows, rope=lambda shape: _read_rope(reader, shape, "full_attention")
    )
    return build(reader, weights, config, local)


def _read_rope(reader: ConfigReader, shape: ModelShape, layer_type: str) -> Rope:
    scaled = layer_type == "full_attention"
    return read_layer_rope(reader, layer_type, shape.head_dim, shape.max_positions, theta=500000.0, scaled=scaled)
