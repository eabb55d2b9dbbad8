"""How a family's GGUF files map to its Hugging Face checkpoints: names, arrangements of rows, settings.

Decides what a dialect consists of and how it is applied to a name. Does not know any family: each family's dialect is
in its own file in `models`, and what several families share is in `gguf_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["Arrangement", "FindDialect", "GgufDialect", "HuggingFaceTensor"]


_LAYER = "{layer}"


class Arrangement(Enum):
    """How a stored tensor differs from Hugging Face's."""

    SAME = auto()
    TRANSPOSED = auto()
    """Stored `[out, in]`, wanted `[in, out]`."""
    INTERLEAVED_QUERY = auto()
    """Row `2i + j` of a head is Hugging Face's row `j * D / 2 + i`."""
    INTERLEAVED_KEY = auto()
    """The same for keys, with the number of key heads."""
    MINUS_ONE = auto()
    """A vector that Hugging Face stores minus 1 (the weights of Gemma's norms)."""
    FLAT = auto()
    """Stored with several dimensions where Hugging Face has one vector."""
    FILTERS = auto()
    """Stored `[C, L]`, wanted `[C, 1, L]`."""
    DECAY = auto()
    """A vector `x`, possibly with extra dimensions, that Hugging Face stores as `log(-x)` (Mamba's `A_log`)."""
    ROW = auto()
    """A vector that Hugging Face stores as a matrix of one row."""


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """A stored tensor's Hugging Face name and its arrangement."""

    name: str
    arrangement: Arrangement = Arrangement.SAME


@dataclass(frozen=True, slots=True)
class GgufDialect:
    """How the GGUF files of one family are read.

    Attributes:
        architecture: the files' `general.architecture`; the prefix of their keys.
        model_type: Hugging Face's name of the family.
        tensors: Hugging Face names by GGUF names, both without the `.weight` or `.bias` suffix that they share;
            `{layer}` stands for a layer's number.
        metadata: translates the file's settings to Hugging Face's. It reads every key that it understands; a key that
            it does not read is refused, unless its value has no effect. Vocabulary size, tied embeddings and special
            tokens are the same for all families and handled elsewhere; a returned `model_type` replaces the dialect's.
        arrangements: arrangements of the tensors stored differently from Hugging Face's, by full GGUF name.
        whole: full Hugging Face names, by full GGUF name, of tensors whose suffixes differ or are missing.
        writing: extra settings and tensor conversions for writing files; None for a family whose files need only the
            common keys, and its tensors unchanged.
    """

    architecture: str
    model_type: str
    tensors: Mapping[str, str]
    metadata: Callable[[GgufKeys], dict[str, Any]]
    arrangements: Mapping[str, Arrangement] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    writing: GgufWriting | None = None

    def settings(self, keys: GgufKeys, vocab_size: int) -> dict[str, Any]:
        """The Hugging Face config of a file.

        Args:
            keys: the file's settings, none of which may be left over.
            vocab_size: rows of the token embedding.

        Raises:
            ModelFileError: a key is missing, invalid or not understood.
        """
        if keys.has("vocab_size") and keys.size("vocab_size") != vocab_size:
            stated = keys.size("vocab_size")
            raise keys.fail("vocab_size", f"{stated}, but the token embedding has {vocab_size} rows")
        config = {"model_type": self.model_type, "vocab_size": vocab_size}
        config |= {"tie_word_embeddings": not keys.has_tensor("output.weight")} | keys.special_tokens()
        config |= self.metadata(keys)
        keys.finish()
        return config

    def hugging_face_tensor(self, name: str) -> HuggingFaceTensor | None:
        """The Hugging Face name and arrangement of the GGUF tensor `name`; None if the family has no such tensor."""
        if _LAYER in name:
            return None
        layer, stored = _split_layer(name)
        stem, _, ending = stored.rpartition(".")
        if stored in self.whole:
            renamed = self.whole[stored]
        elif stem in self.tensors and ending in ("weight", "bias"):
            renamed = f"{self.tensors[stem]}.{ending}"
        else:
            return None
        return HuggingFaceTensor(renamed.replace(_LAYER, layer), self.arrangements.get(stored, Arrangement.SAME))


FindDialect = Callable[[str, str], GgufDialect]
"""Finds the dialect of an architecture (first argument). Raises `ModelFileError`, naming the file (second argument), if
no family has this architecture."""


def _split_layer(stem: str) -> tuple[str, str]:
    """A layer's number, and the name with `{layer}` in its place; "" and the name itself outside layers."""
    parts = stem.split(".")
    if len(parts) < 3 or parts[0] != "blk" or not _is_index(parts[1]):
        return "", stem
    return parts[1], ".".join(["blk", _LAYER, *parts[2:]])


def _is_index(text: str) -> bool:
    """Whether `text` is decimal without leading zeros, so that no two stored names map to the same one."""
    return text.isascii() and text.isdigit() and (text == "0" or not text.startswith("0"))
