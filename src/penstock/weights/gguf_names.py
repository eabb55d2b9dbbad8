"""GGUF tensor names to Hugging Face names, and how the rows of each tensor are arranged.

Decides, per architecture, what a stored tensor is called and whether it lies as Hugging Face has it, transposed
(GPT-2's `Conv1D` keeps `[in, out]`), or with its rows in the order that interleaved rotary embeddings want. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Arrangement", "HuggingFaceTensor", "hugging_face_tensor"]


class Arrangement(Enum):
    """How a stored tensor differs from Hugging Face's."""

    SAME = auto()
    TRANSPOSED = auto()
    """Stored `[out, in]`, wanted `[in, out]`."""
    INTERLEAVED_QUERY = auto()
    """Row `2i + j` of a head is Hugging Face's row `j * D / 2 + i`."""
    INTERLEAVED_KEY = auto()
    """The same, with the number of key heads."""


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """What a stored tensor is to a Hugging Face model."""

    name: str
    arrangement: Arrangement = Arrangement.SAME


_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_BLOCK = _LLAMA_BLOCK | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_TRANSPOSED = {f"{name}.weight" for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}

_TOP: Mapping[str, Mapping[str, str]] = {
    "gpt2": _GPT2_TOP,
    "llama": _LLAMA_TOP,
    "qwen2": _LLAMA_TOP,
    "qwen3": _LLAMA_TOP,
}
_BLOCK: Mapping[str, Mapping[str, str]] = {
    "gpt2": _GPT2_BLOCK,
    "llama": _LLAMA_BLOCK,
    "qwen2": _LLAMA_BLOCK,
    "qwen3": _QWEN3_BLOCK,
}


def hugging_face_tensor(architecture: str, name: str) -> HuggingFaceTensor | None:
    """What the GGUF tensor `name` is called by Hugging Face, or None if the architecture has no such tensor."""
    stem, dot, ending = name.rpartition(".")
    if ending not in ("weight", "bias") or not dot:
        return None
    if stem in _TOP[architecture]:
        return HuggingFaceTensor(f"{_TOP[architecture][stem]}.{ending}")
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _BLOCK[architecture] or not _is_index(parts[1]):
        return None
    layers = "transformer.h" if architecture == "gpt2" else "model.layers"
    renamed = f"{layers}.{parts[1]}.{_BLOCK[architecture][parts[2]]}.{ending}"
    return HuggingFaceTensor(renamed, _arrangement(architecture, f"{parts[2]}.{ending}"))


def _is_index(text: str) -> bool:
    """Plain decimal without leading zeros, so that no two stored names become one."""
    return text.isascii() and text.isdigit() and (text == "0" or not text.startswith("0"))


def _arrangement(architecture: str, kind: str) -> Arrangement:
    if architecture == "gpt2" and kind in _TRANSPOSED:
        return Arrangement.TRANSPOSED
    if architecture == "llama" and kind.startswith("attn_q."):
        return Arrangement.INTERLEAVED_QUERY
    if architecture == "llama" and kind.startswith("attn_k."):
        return Arrangement.INTERLEAVED_KEY
    return Arrangement.SAME
