"""Translates Hugging Face's names, row arrangements and settings to those of a GGUF file. The inverse of `gguf_file`.

Decides which families of directories can be written. Names and arrangements come from the family's dialect, applied in
reverse; the writer checks that no setting was lost, by reading the file back (`penstock.quantizing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.contract.model import ModelShape
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.source import TensorSource

__all__ = ["ARCHITECTURES", "StoredTensor", "settings_of", "tensors_of"]

ARCHITECTURES: Mapping[str, str] = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt2": "gpt2",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoehybrid": "granitehybrid",
    "lfm2": "lfm2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_5_vl": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen2_moe": "qwen2moe",
    "qwen2_vl": "qwen2vl",
    "qwen2_vl_text": "qwen2vl",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_vl_text": "qwen3vl",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
"""GGUF's architecture for each `model_type` whose directories can be written."""

_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<number>\d+)\.(?P<part>[a-z0-9_]+)(?P<ending>\.weight)")
_ORIGINAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names for the parts of an expert."""

_BUFFER = re.compile(r".*(rotary_emb\.inv_freq|h\.\d+\.attn\.(bias|masked_bias))")
"""Buffers in older checkpoints that follow from the config."""


_ROOTS = ("model", "transformer")
"""Name prefixes that checkpoints without a head omit."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it will be in a GGUF file.

    Attributes:
        shape: its shape in the file, rows last.
        rows: yields its numbers, float32, in file order: pieces of whole rows.
    """

    name: str
    shape: tuple[int, ...]
    rows: Callable[[], Iterator[Tensor]]


def tensors_of(source: TensorSource, dialect: GgufDialect, config: Mapping[str, Any], file: str) -> list[StoredTensor]:
    """The checkpoint's tensors in the form of this dialect, layer by layer.

    Raises:
        ModelFileError: the dialect has no name for a tensor.
    """
    names = _Names(dialect)
    stacks: dict[str, dict[int, str]] = {}
    found: list[StoredTensor] = []
    for name in source.names():
        if _is_left_out(name, source, config):
            continue
        expert = _EXPERT.fullmatch(name)
        if expert:
            part = _ORIGINAL_PARTS.get(expert["part"], expert["part"])
            stacks.setdefault(f"{expert['before']}{part}{expert['ending']}", {})[int(expert["number"])] = name
            continue
        stored = names.stored(name)
        if stored is None:
            raise ModelFileError(file, name, f"has no name in a GGUF file of a {dialect.architecture}")
        found.append(_tensor(source, name, *stored, config))
    for name, parts in stacks.items():
        stored = names.stored(name)
        if stored is None or sorted(parts) != list(range(len(parts))):
            raise ModelFileError(file, name, f"has no name in a GGUF file of a {dialect.architecture}")
        found.append(_stack(source, stored[0], [parts[number] for number in range(len(parts))]))
    return sorted(found, key=lambda tensor: _place(tensor.name))


def _is_left_out(name: str, source: TensorSource, config: Mapping[str, Any]) -> bool:
    if _BUFFER.fullmatch(name):
        return True
    table = "model.embed_tokens.weight"
    if name != "lm_head.weight" or not config.get("tie_word_embeddings") or table not in source.names():
        return False
    if source.shape(name) != source.shape(table):
        return False
    head, embedding = (source.read(each, torch.float32, "cpu") for each in (name, table))
    return torch.equal(head, embedding)  # a "tied" checkpoint whose head differs does use its head


def _place(name: str) -> tuple[int, int, str]:
    """Sort key: embeddings, layers in order, then the output tensors, as files are usually laid out."""
    parts = name.split(".")
    if parts[0] == "blk":
        return 1, int(parts[1]), name
    return (2 if name.startswith("output") else 0), 0, name


class _Names:
    """Maps Hugging Face names to a dialect's names."""

    def __init__(self, dialect: GgufDialect) -> None:
        pairs = [
            (f"{ours}.{ending}", f"{stored}.{ending}")
            for stored, ours in dialect.tensors.items()
            for ending in ("weight", "bias")
        ]
        pairs += [(ours, stored) for stored, ours in dialect.whole.items()]
        self._plain = {ours: stored for ours, stored in pairs if "{layer}" not in ours}
        self._layered = [
            (re.compile(re.escape(ours).replace(r"\{layer\}", r"(\d+)")), stored)
            for ours, stored in pairs
            if "{layer}" in ours
        ]
        self._arrangements = dialect.arrangements

    def stored(self, name: str) -> tuple[str, Arrangement] | None:
        """A tensor's name in the file and its arrangement; None if the dialect has no name for it."""
        for candidate in (name, *(f"{root}.{name}" for root in _ROOTS)):
            if candidate in self._plain:
                stored = self._plain[candidate]
                return stored, self._arrangements.get(stored, Arrangement.SAME)
            for pattern, stored in self._layered:
                if found := pattern.fullmatch(candidate):
                    return stored.replace("{layer}", found[1]), self._arrangements.get(stored, Arrangement.SAME)
        return None


def _tensor(
    source: TensorSource, name: str, stored: str, arrangement: Arrangement, config: Mapping[str, Any]
) -> StoredTensor:
    shape = source.shape(name)
    if arrangement is Arrangement.TRANSPOSED:
        shape = shape[::-1]
    elif arrangement is Arrangement.ROW:
        shape = shape[-1:]
    elif arrangement is Arrangement.FILTERS:
        shape = shape[0], shape[-1]

    def rows() -> Iterator[Tensor]:
        if len(shape) > 2 and arrangement is Arrangement.SAME:  # all matrices at once may not fit in memory
            for index in range(shape[0]):
                matrix = torch.empty(shape[1:])
                source.read_slice_into(name, index, matrix)
                yield matrix.view(-1, shape[-1])
            return
        yield _arranged(source.read(name, torch.float32, "cpu"), arrangement, config).reshape(-1, shape[-1])

    return StoredTensor(stored, shape, rows)


def _arranged(numbers: Tensor, arrangement: Arrangement, config: Mapping[str, Any]) -> Tensor:
    match arrangement:
        case Arrangement.SAME | Arrangement.ROW | Arrangement.FLAT:  # a `Conversion` adds any dimensions of the file
            return numbers
        case Arrangement.FILTERS:
            return numbers.squeeze(1)
        case Arrangement.DECAY:
            return -numbers.exp()
        case Arrangement.TRANSPOSED:
            return numbers.T.contiguous()
        case Arrangement.MINUS_ONE:
            return numbers + 1.0
        case Arrangement.INTERLEAVED_QUERY | Arrangement.INTERLEAVED_KEY:
            heads = config["num_attention_heads"]
            if arrangement is Arrangement.INTERLEAVED_KEY:
                heads = config.get("num_key_value_heads") or heads
            halves = numbers.view(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
            return halves.transpose(1, 2).reshape(numbers.shape)


def _stack(source: TensorSource, stored: str, names: list[str]) -> StoredTensor:
    def rows() -> Iterator[Tensor]:
        for name in names:
            yield source.read(name, torch.float32, "cpu")

    return StoredTensor(stored, (len(names), *source.shape(names[0])), rows)


_SAME_MEANING = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("norm_epsilon", "layer_norm_epsilon"),
    "attention.scale": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logits_scaling",),
    "residual_scale": ("residual_multiplier",),
}
"""Keys of a file, and the config settings with the same meaning."""

_REAL = ("epsilon", "scale", "softcapping")


def settings_of(
    config: Mapping[str, Any], shape: ModelShape, window: int | None, rotated: int, architecture: str
) -> dict[str, Any]:
    """The settings under a file's architecture prefix that all families share, without RoPE scaling.

    Args:
        config: the checkpoint's config.
        shape: the model's shape.
        window: the sliding window of the layers that have one; None if none has.
        rotated: number of elements of a head that are rotated; 0 for a model without RoPE.
        architecture: the file's `general.architecture`.
    """
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * shape.hidden_size
    keys: dict[str, Any] = {
        "block_count": shape.num_layers,
        "context_length": config.get("max_position_embeddings") or shape.max_positions,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
    }
    if rotated:
        keys |= {"attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim}
        keys |= {"rope.dimension_count": rotated}
    if window is not None:
        keys["attention.sliding_window"] = window
    for key, names in _SAME_MEANING.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            keys[key] = float(value) if key.endswith(_REAL) else value
    return {f"{architecture}.{key}": value for key, value in keys.items()}
