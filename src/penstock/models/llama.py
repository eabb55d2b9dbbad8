"""Llama (1 to 3.3) and everything published under its name: `model_type` "llama".

The plain case of the shared decoder; biases are optional. `pretraining_tp` sliced training across devices and has no
effect here. GGUF files of Mistral and Mixtral models have the architecture `llama` too, and are recognised by their
window and experts.
"""

from __future__ import annotations

from typing import Any

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, INTERLEAVED, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    attention_bias = reader.boolean("attention_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    parts = DecoderParts(read_decoder(reader), weights)

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=attention_bias, output_bias=attention_bias)
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp", bias=mlp_bias))

    return parts.program(layer)


def _settings(keys: GgufKeys) -> dict[str, Any]:
    settings, window = decoder_settings(keys), keys.window()
    if keys.has("expert_count") and keys.get("expert_count") != 0:
        counts = {
            "num_local_experts": keys.size("expert_count"),
            "num_experts_per_tok": keys.size("expert_used_count"),
        }
        return settings | counts | {"model_type": "mixtral", "sliding_window": window}
    if window is not None and window < keys.size("context_length"):
        return settings | {"model_type": "mistral", "sliding_window": window}
    return settings | {"attention_bias": keys.has_tensor("blk.0.attn_q.bias")}


_MOE = "model.layers.{layer}.block_sparse_moe"

GGUF = GgufDialect(
    architecture="llama",
    model_type="llama",
    tensors={
        **DECODER_TENSORS,
        "blk.{layer}.ffn_gate_inp": f"{_MOE}.gate",
        "blk.{layer}.ffn_gate_exps": f"{_MOE}.experts.gate_proj",
        "blk.{layer}.ffn_up_exps": f"{_MOE}.experts.up_proj",
        "blk.{layer}.ffn_down_exps": f"{_MOE}.experts.down_proj",
    },
    metadata=_settings,
    arrangements=INTERLEAVED,
)
"""Query and key rows are interleaved, because the original release rotates adjacent pairs."""
