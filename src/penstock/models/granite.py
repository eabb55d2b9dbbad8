"""Granite 3: `model_type` "granite" (IBM Granite team 2024).

The shared decoder with four factors from the config: on embeddings, on scores, on what attention and MLP add to the
stream, and as a divisor of logits.

The stream is kept divided by the third factor m, so that attention and MLP add to it as in a Llama: embeddings are
divided by m, and `rms_norm(m s, eps)` is `rms_norm(s, eps / m^2)`. This rounds no weight and adds no operation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, INTERLEAVED, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]

_SMALLEST, _LARGEST = 1e-4, 1e4


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    attention_bias = reader.boolean("attention_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    embedding, scores, added, logits = (
        reader.number(key, _SMALLEST, _LARGEST, default=1.0)
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    config = read_decoder(reader)
    parts = DecoderParts(replace(config, eps=config.eps / added**2), weights)
    spec = AttentionSpec(scores)

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(
            f"{name}.self_attn", index, qkv_bias=attention_bias, output_bias=attention_bias, spec=spec
        )
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp", bias=mlp_bias))

    return parts.program(layer, embedding_scale=embedding / added, logit_scale=1.0 / logits)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """A missing factor is 1, for scores `1 / sqrt(head_dim)`, as in `granite.cpp`; `logit_scale` is required."""
    if keys.has("rope.scaling.finetuned") and keys.get("rope.scaling.finetuned") is not True:
        raise keys.fail("rope.scaling.finetuned", "says of a Granite that it is not rotated, which is not supported")
    settings = decoder_settings(keys)
    return settings | {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_gate.bias"),
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "attention_multiplier": keys.real("attention.scale", settings["head_dim"] ** -0.5),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "logits_scaling": keys.real("logit_scale"),
    }


GGUF = GgufDialect(
    architecture="granite",
    model_type="granite",
    tensors=DECODER_TENSORS,
    metadata=_gguf_settings,
    arrangements=INTERLEAVED,
)
"""Query and key rows are interleaved, as in a Llama's files."""
