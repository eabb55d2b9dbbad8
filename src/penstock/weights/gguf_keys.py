"""A GGUF file's model settings: the metadata under its architecture's prefix, and short tensors that are settings.

Decides how a value is checked and named in errors, and which values have no effect under any architecture (key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Does not know what a key means to a family.

Invariant: every key of the architecture is read, or has a value without effect, or is refused. None is dropped.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_header import GgufHeader
from penstock.weights.source import read_elements

__all__ = ["GgufKeys"]

_MAX_SIZE = 1 << 31
_MAX_VECTOR = 4096
_ROPE_SCALING = "rope.scaling."

# Keys that may be left unread, with the values under which they have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0, 1, 2, 3),  # none, mean, cls, last: how states become embeddings; see embedding_config
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


class GgufKeys:
    """The settings of one file; remembers which were read. Owned by one `open_gguf` call.

    Args:
        header: the file's header.
        architecture: the prefix of its keys.

    Attributes:
        file: the file's path, for errors.
        tensors_read: names of the tensors that were read as settings.
    """

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.file = str(header.path)
        self.tensors_read: set[str] = set()
        self._header = header
        self._prefix = architecture + "."
        self._values = {k[len(self._prefix) :]: v for k, v in header.metadata.items() if k.startswith(self._prefix)}
        self._read: set[str] = set()

    def fail(self, key: str, message: str) -> ModelFileError:
        """The error that refuses `key`, for the caller to raise."""
        return ModelFileError(self.file, self._prefix + key, message)

    def has(self, key: str) -> bool:
        """Whether the file has this key (given without the architecture's prefix)."""
        return key in self._values

    def get(self, key: str) -> Any:
        """A value as stored; raises ModelFileError if the key is missing."""
        self._read.add(key)
        if key not in self._values:
            raise self.fail(key, "is missing")
        return self._values[key]

    def size(self, key: str, default: int = 0) -> int:
        """An integer of at least 1; a nonzero `default` replaces a missing key."""
        if default and not self.has(key):
            return default
        value = self.get(key)
        if type(value) is not int or not 1 <= value < _MAX_SIZE:
            raise self.fail(key, f"must be a whole number from 1 to 2^31, got {reprlib.repr(value)}")
        return value

    def sizes(self, key: str, count: int) -> tuple[int, ...]:
        """`count` integers of at least 0; a single stored number is repeated `count` times."""
        value = self.get(key)
        values = value if isinstance(value, tuple) else (value,) * count
        if len(values) != count or any(type(each) is not int or not 0 <= each < _MAX_SIZE for each in values):
            raise self.fail(key, f"must be {count} whole numbers from 0 to 2^31, got {reprlib.repr(value)}")
        return values

    def real(self, key: str, default: float = 0.0) -> float:
        """A finite number above 0; a nonzero `default` replaces a missing key."""
        if default and not self.has(key):
            return default
        value = self.get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, f"must be a positive number, got {reprlib.repr(value)}")
        return float(value)

    def window(self) -> int | None:
        """`attention.sliding_window`: how many positions a sliding layer looks back; None if absent or 0.

        A family without sliding windows does not call this, so its files are refused if they set one.
        """
        key = "attention.sliding_window"
        return self.size(key) if self.has(key) and self.get(key) != 0 else None

    def rope_scaling(self) -> dict[str, Any]:
        """Every `rope.scaling.*` entry, keyed without that prefix."""
        names = [key for key in self._values if key.startswith(_ROPE_SCALING)]
        return {name[len(_ROPE_SCALING) :]: self.get(name) for name in names}

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this (GGUF) name."""
        return name in self._header.tensors

    def rows(self, name: str) -> int:
        """Number of rows of the tensor of this (GGUF) name.

        Raises:
            ModelFileError: there is no such tensor.
        """
        if not self.has_tensor(name):
            raise ModelFileError(self.file, name, "is missing")
        return self._header.tensors[name].shape[0]

    def vector(self, name: str) -> tuple[float, ...]:
        """The numbers of a short tensor that is a setting, not a weight; empty if the file lacks it.

        Raises:
            ModelFileError: it is not a float32 vector of at most 4,096 numbers.
        """
        tensor = self._header.tensors.get(name)
        if tensor is None:
            return ()
        if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.elements > _MAX_VECTOR:
            raise ModelFileError(self.file, name, "must be a short F32 vector")
        self.tensors_read.add(name)
        numbers = torch.empty(tensor.shape)
        read_elements(tensor.path, name, tensor.offset, torch.float32, numbers)
        return tuple(numbers.tolist())

    def special_tokens(self) -> dict[str, int]:
        """`bos_token_id` and `eos_token_id`, where the tokenizer's metadata has them."""
        metadata = self._header.metadata
        found = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        return {name: value for name, value in found.items() if type(value) is int}

    def finish(self) -> None:
        """Check that every key was read or has no effect.

        Raises:
            ModelFileError: a key was not read, and could change the answers.
        """
        for key, value in self._values.items():
            if key in self._read or value in _NEUTRAL.get(key, ()):
                continue
            raise self.fail(key, f"{reprlib.repr(value)} is not supported, and to ignore it could change the answers")
