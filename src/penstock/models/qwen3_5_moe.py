"""Qwen 3.5 and 3.6 with experts: `model_type` "qwen3_5_moe", a vision model and a `qwen3_5_moe_text`.

Only text is computed: the vision model is left out by name. GGUF files hold only the text model.
"""

from __future__ import annotations

from typing import Any

from penstock.models import qwen3_5_moe_text
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen2_moe import SHARED_EXPERT_GATE, SHARED_EXPERT_TENSORS
from penstock.models.qwen3_5 import GGUF as DENSE
from penstock.models.qwen3_5 import TILED, file_settings, hybrid_settings, tiled_conversions
from penstock.models.qwen3_moe import EXPERT_TENSORS, FUSED_EXPERTS
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "MOE_ARRANGEMENTS", "MOE_TENSORS", "load", "moe_settings"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = text_config(reader, "qwen3_5_moe_text")
    return qwen3_5_moe_text.load(text, text_weights(weights, ("visual.",)))


def moe_settings(keys: GgufKeys, *, tiled: bool = True) -> dict[str, Any]:
    """The settings of such a GGUF file, with experts in every layer; for `tiled` see `hybrid_settings`."""
    used = keys.size("expert_used_count")
    dense = keys.size("feed_forward_length", 1)
    inner = keys.size("expert_feed_forward_length", max(dense // used, 1))
    return hybrid_settings(keys, tiled=tiled, inner_size=inner) | {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", dense),
    }


MOE_TENSORS = {name: theirs for name, theirs in DENSE.tensors.items() if not name.startswith("blk.{layer}.ffn_")} | {
    name: theirs
    for name, theirs in (EXPERT_TENSORS | SHARED_EXPERT_TENSORS).items()
    if name.startswith("blk.{layer}.ffn_") and not name.endswith("norm")
}
"""The tensors of `qwen3_5_text` with experts in place of MLPs; see `GgufDialect.tensors`."""

MOE_ARRANGEMENTS = DENSE.arrangements | SHARED_EXPERT_GATE
"""Their arrangements; see `GgufDialect.arrangements`."""

GGUF = GgufDialect(
    architecture="qwen35moe",
    model_type="qwen3_5_moe_text",
    tensors=MOE_TENSORS,
    metadata=moe_settings,
    arrangements=MOE_ARRANGEMENTS,
    whole=DENSE.whole,
    writing=GgufWriting(file_settings, lambda config: [*tiled_conversions(config), *FUSED_EXPERTS], order=TILED),
)
