"""Qwen 3.5 and 3.6: `model_type` "qwen3_5", checkpoints with a vision model and a `qwen3_5_text`.

Only text is computed: the vision model is left out by name. GGUF files hold only the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from penstock.models import qwen3_5_text
from penstock.models.config_reader import ConfigReader
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.source import TensorSource

__all__ = ["GGUF", "TILED", "file_settings", "hybrid_settings", "load", "tiled_conversions"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = text_config(reader, "qwen3_5_text")
    return qwen3_5_text.load(text, text_weights(weights, ("visual.",)))


def hybrid_settings(keys: GgufKeys, *, tiled: bool = True, inner_size: int = 0) -> dict[str, Any]:
    """The settings of a GGUF file with delta nets.

    Args:
        keys: the file's keys.
        tiled: whether value head `h` uses key head `h % key_heads`; otherwise the value heads of a key head are
            neighbours.
        inner_size: see `decoder_settings`.
    """
    settings = decoder_settings(keys, partial_rotary=True, inner_size=inner_size)
    blocks, predicting = settings["num_hidden_layers"], _gguf_predicting(keys)
    if keys.has("rope.dimension_sections"):
        keys.get("rope.dimension_sections")  # assigns pairs to the axes of an image; no effect for text
    value_heads, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if predicting >= blocks:
        raise keys.fail("nextn_predict_layers", f"{predicting} of {blocks} blocks leave none to compute")
    if inner % value_heads:
        raise keys.fail("ssm.inner_size", f"{inner} is no multiple of {value_heads} value heads")
    bias = keys.has_tensor(f"blk.{blocks - predicting - 1}.attn_q.bias")
    return {
        "partial_rotary_factor": 1.0,
        **settings,
        "num_hidden_layers": blocks - predicting,
        "num_nextn_predict_layers": predicting,
        "layer_types": _gguf_layer_types(keys, blocks)[: blocks - predicting],
        "attention_bias": bias,
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_value_heads_tiled": tiled,
    }


def _gguf_predicting(keys: GgufKeys) -> int:
    """Number of the file's last blocks, which predict further tokens."""
    return keys.sizes("nextn_predict_layers", 1)[0] if keys.has("nextn_predict_layers") else 0


def _gguf_layer_types(keys: GgufKeys, blocks: int) -> list[str]:
    """Layer types as the file lists them, or by its interval; by default every fourth attends (`qwen35.cpp`)."""
    interval = keys.size("full_attention_interval", 4)
    recurrent = [(layer + 1) % interval != 0 for layer in range(blocks)]
    if keys.has("attention.recurrent_layers"):
        listed = keys.get("attention.recurrent_layers")
        if not isinstance(listed, tuple) or len(listed) != blocks:
            raise keys.fail("attention.recurrent_layers", f"must say of {blocks} blocks whether they are recurrent")
        recurrent = [bool(each) for each in listed]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def file_settings(config: Mapping[str, Any], _: TensorSource) -> dict[str, Any]:
    """The keys of a GGUF file with delta nets; see `GgufWriting.settings`."""
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    interval = config.get("full_attention_interval", 4)
    attends = (
        [each == "full_attention" for each in types] if types else [(n + 1) % interval == 0 for n in range(layers)]
    )
    value_heads, value_dim = config.get("linear_num_value_heads", 32), config.get("linear_value_head_dim", 128)
    sections = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("mrope_section")
    return {
        "attention.recurrent_layers": [not each for each in attends],
        "feed_forward_length": config.get("intermediate_size"),
        "full_attention_interval": interval,
        "rope.dimension_sections": [*sections, 0] if sections and config["model_type"] != "qwen3_next" else None,
        "ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "ssm.group_count": config.get("linear_num_key_heads", 16),
        "ssm.inner_size": value_heads * value_dim,
        "ssm.state_size": config.get("linear_key_head_dim", 128),
        "ssm.time_step_rank": value_heads,
    }


TILED = {"linear_value_heads_tiled": True}
"""The config entry for the order of value heads after `tiled_conversions`."""


def tiled_conversions(config: Mapping[str, Any]) -> list[Conversion]:
    """Reorder value heads from grouped by key head to tiled, as files have them; see `hybrid_settings`."""
    key_heads, value_heads = config.get("linear_num_key_heads", 16), config.get("linear_num_value_heads", 32)
    keys, width = 2 * key_heads * config.get("linear_key_head_dim", 128), config.get("linear_value_head_dim", 128)
    heads = torch.arange(value_heads).view(key_heads, -1).T.flatten()
    rows = (heads[:, None] * width + torch.arange(width)).flatten()
    behind_keys = torch.cat((torch.arange(keys), keys + rows))
    orders = dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), behind_keys) | {"in_proj_z.weight": rows}
    orders |= dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"), heads)
    taken = [
        Conversion(f"{_MIXER}.{name}", {f"{_MIXER}.{name}": partial(torch.index_select, dim=0, index=order)})
        for name, order in orders.items()
    ]
    columns = partial(torch.index_select, dim=1, index=rows)
    return [*taken, Conversion(f"{_MIXER}.out_proj.weight", {f"{_MIXER}.out_proj.weight": columns})]


_LAYER, _MIXER = "model.layers.{layer}", "model.layers.{layer}.linear_attn"
_NEXTN_NORMS = ("nextn.e", "nextn.h", "nextn.shared_head_")
_NEXTN = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm")

GGUF = GgufDialect(
    architecture="qwen35",
    model_type="qwen3_5_text",
    tensors={
        **{name: theirs for name, theirs in DECODER_TENSORS.items() if not name.endswith("ffn_norm")},
        "blk.{layer}.post_attention_norm": f"{_LAYER}.post_attention_layernorm",
        "blk.{layer}.attn_q_norm": f"{_LAYER}.self_attn.q_norm",
        "blk.{layer}.attn_k_norm": f"{_LAYER}.self_attn.k_norm",
        "blk.{layer}.attn_qkv": f"{_MIXER}.in_proj_qkv",
        "blk.{layer}.attn_gate": f"{_MIXER}.in_proj_z",
        "blk.{layer}.ssm_alpha": f"{_MIXER}.in_proj_a",
        "blk.{layer}.ssm_beta": f"{_MIXER}.in_proj_b",
        "blk.{layer}.ssm_conv1d": f"{_MIXER}.conv1d",
        "blk.{layer}.ssm_norm": f"{_MIXER}.norm",
        "blk.{layer}.ssm_out": f"{_MIXER}.out_proj",
        **{f"blk.{{layer}}.nextn.{part}": f"{_LAYER}.nextn.{part}" for part in _NEXTN},
    },
    metadata=hybrid_settings,
    arrangements={
        "output_norm.weight": Arrangement.MINUS_ONE,
        **{
            f"blk.{{layer}}.{part}norm.weight": Arrangement.MINUS_ONE
            for part in ("attn_", "post_attention_", "attn_q_", "attn_k_", *_NEXTN_NORMS)
        },
        "blk.{layer}.ssm_conv1d.weight": Arrangement.FILTERS,
        "blk.{layer}.ssm_a": Arrangement.DECAY,
    },
    whole={
        "blk.{layer}.ssm_a": f"{_MIXER}.A_log",
        "blk.{layer}.ssm_dt.bias": f"{_MIXER}.dt_bias",
    },
    writing=GgufWriting(file_settings, tiled_conversions, order=TILED),
)
"""Files store norm weights plus 1, and value heads in tiled order throughout a layer."""
