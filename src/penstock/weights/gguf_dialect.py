"""How a family's GGUF files say what its Hugging Face checkpoints say: names, arrangements of rows, settings.

Decides what a dialect is made of and how it is applied to a name. Does not know any family: each has its dialect in its
own file of `models`, and what several share is in `gguf_decoder`.
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
    """The same, with the number of key heads."""
    MINUS_ONE = auto()
    """A vector of which Hugging Face holds what it differs from 1 by (the weights of Gemma's norms)."""
    FLAT = auto()
    """Stored with axes where Hugging Face has one vector."""
    FILTERS = auto()
    """Stored `[C, L]`, wanted `[C, 1, L]`."""
    DECAY = auto()
    """A vector, maybe with axes, of which Hugging Face holds the logarithm of its opposite (Mamba's `A_log`)."""
    ROW = auto()
    """A vector that Hugging Face has as a matrix of one row."""


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """What a stored tensor is to a Hugging Face model."""

    name: str
    arrangement: Arrangement = Arrangement.SAME


@dataclass(frozen=True, slots=True)
class GgufDialect:
    """How the GGUF files of one family are read.

    Attributes:
        architecture: what such files call themselves (`general.architecture`); the prefix of their keys.
        model_type: what Hugging Face calls the family.
        tensors: Hugging Face names by GGUF names, without `.weight` and `.bias`, which follow both alike; `{layer}`
            stands for the number of a layer.
        metadata: makes Hugging Face's settings of the file's. It asks for every key that it understands; what it does
            not ask for is refused, unless it changes nothing. Vocabulary, tied embeddings and special tokens are
            common to all families and come from elsewhere; a `model_type` among the settings replaces the dialect's.
        arrangements: of the tensors that do not lie as Hugging Face has them, by GGUF name with its ending.
        whole: Hugging Face names, with their endings, of tensors whose endings differ or are missing; by GGUF name
            with its ending, if it has one.
        writing: what files say besides, and what becomes of a checkpoint's tensors, where files are written too; None
            for a family whose files hold the keys that are common, and its tensors as they are.
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
            ModelFileError: a key is missing, absurd or not understood.
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
        """What the GGUF tensor `name` is called by Hugging Face, or None if the family has no such tensor."""
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
"""The dialect of an architecture, the first argument. Raises `ModelFileError`, naming the file that is the second, if
no family has this architecture."""


def _split_layer(stem: str) -> tuple[str, str]:
    """The number of the layer, and the name with `{layer}` in its place; nothing is split off other names."""
    parts = stem.split(".")
    if len(parts) < 3 or parts[0] != "blk" or not _is_index(parts[1]):
        return "", stem
    return parts[1], ".".join(["blk", _LAYER, *parts[2:]])


def _is_index(text: str) -> bool:
    """Plain decimal without leading zeros, so that no two stored names become one."""
    return text.isascii() and text.isdigit() and (text == "0" or not text.startswith("0"))
