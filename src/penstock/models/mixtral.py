"""Mixtral: `model_type` "mixtral" (Jiang et al. 2024).

Llama's attention, and in place of every MLP a mixture of experts, top-k with a softmax over only the chosen ones. Every
layer has the window if the config sets one. GGUF files have the architecture `llama` and are read by its dialect.
"""

from __future__ import annotations

from penstock.kernels.experts import RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_EXPERTS, MAX_LAYERS, MAX_WINDOW, DecoderParts, read_decoder
from penstock.nn.blocks import MixtureOfExperts, Projection
from penstock.nn.experts import bind_experts
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    count = reader.integer("num_local_experts", 1, MAX_EXPERTS, default=8)
    top_k = reader.integer("num_experts_per_tok", 1, count, default=2)
    router = RouterSpec(experts=count, top_k=top_k, scoring="softmax", normalise=True)
    # ignore `layer_types`: transformers gives all layers the window
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW)
    windows = (window,) * reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    config = read_decoder(reader, eps=1e-5, rope_theta=1e6, windows=windows)
    parts, hidden, inner = DecoderParts(config, weights), config.shape.hidden_size, config.inner_size

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index)
        moe = f"{name}.block_sparse_moe"
        gate = Projection(weights.take_router(f"{moe}.gate.weight", (count, hidden)))
        stack = bind_experts(weights, f"{moe}.experts", experts=count, hidden=hidden, intermediate=inner)
        return parts.pre_norm_layer(name, attention, MixtureOfExperts(gate, stack, router))

    return parts.program(layer)
