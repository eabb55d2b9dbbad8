"""GGUF metadata, said in the terms of a Hugging Face `config.json`.

Decides which architectures can be read and what each of their keys means (key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Does not know tensors beyond the few facts it is given.

Invariant: an architecture's key is translated, or has a value that changes nothing, or is refused. None is dropped.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_header import GgufHeader

__all__ = ["ARCHITECTURES", "translate_config"]

ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3")
"""Architectures that can be read; each is also the `model_type`. Mistral files call themselves `llama`."""

_MAX_SIZE = 1 << 31
_ROPE_SCALING = "rope.scaling."

# Keys that may stand beside the translated ones, with the values under which they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


class _Keys:
    """The metadata of one architecture; remembers what was asked for. Owned by one `translate_config` call."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.file = str(header.path)
        self._prefix = architecture + "."
        self._values = {k[len(self._prefix) :]: v for k, v in header.metadata.items() if k.startswith(self._prefix)}
        self._read: set[str] = set()

    def fail(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self.file, self._prefix + key, message)

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        self._read.add(key)
        if key not in self._values:
            raise self.fail(key, "is missing")
        return self._values[key]

    def size(self, key: str, default: int = 0) -> int:
        """A whole number from 1 up; `default`, if not 0, stands for a missing key."""
        if default and not self.has(key):
            return default
        value = self.get(key)
        if type(value) is not int or not 1 <= value < _MAX_SIZE:
            raise self.fail(key, f"must be a whole number from 1 to 2^31, got {reprlib.repr(value)}")
        return value

    def real(self, key: str, default: float = 0.0) -> float:
        """A finite number above 0; `default`, if not 0, stands for a missing key."""
        if default and not self.has(key):
            return default
        value = self.get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, f"must be a positive number, got {reprlib.repr(value)}")
        return float(value)

    def scaling(self) -> dict[str, Any]:
        """Every `rope.scaling.*` entry, by what follows."""
        names = [key for key in self._values if key.startswith(_ROPE_SCALING)]
        return {name[len(_ROPE_SCALING) :]: self.get(name) for name in names}

    def finish(self) -> None:
        for key, value in self._values.items():
            if key in self._read or value in _NEUTRAL.get(key, ()):
                continue
            raise self.fail(key, f"{reprlib.repr(value)} is not supported, and to ignore it could change the answers")


def translate_config(
    header: GgufHeader, vocab_size: int, tied: bool, attention_bias: bool, rope_factors: tuple[float, ...]
) -> dict[str, Any]:
    """The Hugging Face config of a GGUF file.

    Args:
        header: the file's own words.
        vocab_size: rows of the token embedding.
        tied: whether the file has no output matrix of its own.
        attention_bias: whether its query projections have biases (a `llama` config says so; other families are fixed).
        rope_factors: the contents of `rope_freqs.weight`, which divide the inverse frequencies; empty without it.

    Raises:
        ModelFileError: the architecture is none that can be read, or a key is missing, absurd or not understood.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            str(header.path),
            "general.architecture",
            f"{reprlib.repr(architecture)} cannot be read; {', '.join(ARCHITECTURES)} can",
        )
    keys = _Keys(header, architecture)
    if keys.has("vocab_size") and keys.size("vocab_size") != vocab_size:
        raise keys.fail("vocab_size", f"{keys.size('vocab_size')}, but the token embedding has {vocab_size} rows")
    common = {"model_type": architecture, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    common |= _special_tokens(header)
    config = common | (_gpt2(keys) if architecture == "gpt2" else _llama_like(keys, rope_factors))
    if architecture == "llama":
        config["attention_bias"] = attention_bias
    keys.finish()
    return config


def _gpt2(keys: _Keys) -> dict[str, Any]:
    heads, width = _heads_and_width(keys)
    if width % heads:
        raise keys.fail("embedding_length", f"{width} is no multiple of {heads} heads")
    if keys.size("attention.head_count_kv", heads) != heads:
        raise keys.fail("attention.head_count_kv", "must equal attention.head_count in a gpt2 file")
    return {
        "n_layer": keys.size("block_count"),
        "n_embd": width,
        "n_head": heads,
        "n_inner": keys.size("feed_forward_length", 4 * width),
        "n_positions": keys.size("context_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _llama_like(keys: _Keys, rope_factors: tuple[float, ...]) -> dict[str, Any]:
    heads, width = _heads_and_width(keys)
    kv_heads = keys.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.fail("attention.head_count_kv", f"{kv_heads} does not divide {heads} heads")
    if not keys.has("attention.key_length") and width % heads:
        raise keys.fail("embedding_length", f"{width} is no multiple of {heads} heads")
    head_dim = keys.size("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.size(key, head_dim) != head_dim:
            raise keys.fail(key, f"{keys.size(key)} differs from the head's width {head_dim}; that is not supported")
    context = keys.size("context_length")
    _check_sliding_window(keys, context)
    config = {
        "num_hidden_layers": keys.size("block_count"),
        "hidden_size": width,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "max_position_embeddings": context,
        "hidden_act": "silu",
    }
    scaling = _rope_scaling(keys, rope_factors, head_dim)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _heads_and_width(keys: _Keys) -> tuple[int, int]:
    heads, width = keys.size("attention.head_count"), keys.size("embedding_length")
    if heads > width:
        raise keys.fail("attention.head_count", f"{heads} heads are more than the {width} numbers they share")
    return heads, width


def _check_sliding_window(keys: _Keys, context: int) -> None:
    key = "attention.sliding_window"
    if keys.has(key) and keys.get(key) != 0 and keys.size(key) < context:
        raise keys.fail(key, f"a window of {keys.size(key)} below the context of {context} is not supported")


def _rope_scaling(keys: _Keys, factors: tuple[float, ...], head_dim: int) -> dict[str, Any]:
    """The `rope_scaling` entry; empty for none.

    `linear` comes out in Hugging Face terms, per-frequency factors as `{"rope_type": "factors", "factors": [...]}`, and
    anything else under its own name, for the model to refuse.
    """
    entries = keys.scaling()
    # like llama.cpp: a factor alone means linear scaling
    kind = entries.pop("type", "linear" if "factor" in entries else "none")
    if factors:
        if kind != "none":
            raise keys.fail("rope.scaling.type", f"{reprlib.repr(kind)} with rope_freqs.weight is not supported")
        if len(factors) != head_dim // 2 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise ModelFileError(keys.file, "rope_freqs.weight", f"must hold {head_dim // 2} positive factors")
    if kind not in ("none", "linear"):
        return {"rope_type": str(kind)} | entries
    for key in sorted(set(entries) - {"factor", "finetuned", "original_context_length"}):
        raise keys.fail(_ROPE_SCALING + key, f"is not supported together with scaling type {kind}")
    if factors:
        return {"rope_type": "factors", "factors": list(factors)}
    return {"rope_type": "linear", "factor": keys.real(_ROPE_SCALING + "factor")} if kind == "linear" else {}


def _special_tokens(header: GgufHeader) -> dict[str, int]:
    """`bos_token_id` and `eos_token_id`, where the tokenizer's metadata has them."""
    found = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {name: value for name, value in found.items() if type(value) is int}
