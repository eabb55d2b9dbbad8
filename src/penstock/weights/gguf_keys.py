"""What a GGUF file says of its model: the metadata below its architecture's name, and short tensors that are settings.

Decides how a value is checked and named in errors, and which values change nothing under any architecture (key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Does not know what a key means to a family.

Invariant: an architecture's key is asked for, or has a value that changes nothing, or is refused. None is dropped.
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

# Keys that may stand beside the translated ones, with the values under which they change nothing.
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
    """The settings of one file; remembers which were asked for. Owned by one `open_gguf` call.

    Args:
        header: the file's own words.
        architecture: the prefix of its keys.

    Attributes:
        file: the file's path, for errors.
        tensors_read: names of the tensors whose numbers were asked for as settings.
    """

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.file = str(header.path)
        self.tensors_read: set[str] = set()
        self._header = header
        self._prefix = architecture + "."
        self._values = {k[len(self._prefix) :]: v for k, v in header.metadata.items() if k.startswith(self._prefix)}
        self._read: set[str] = set()

    def fail(self, key: str, message: str) -> ModelFileError:
        """The error that refuses `key`, to be raised by the caller."""
        return ModelFileError(self.file, self._prefix + key, message)

    def has(self, key: str) -> bool:
        """Whether the file has this key, without the architecture's prefix."""
        return key in self._values

    def get(self, key: str) -> Any:
        """A value as it is stored."""
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

    def sizes(self, key: str, count: int) -> tuple[int, ...]:
        """`count` whole numbers from 0 up; where the file has one, it stands for all."""
        value = self.get(key)
        values = value if isinstance(value, tuple) else (value,) * count
        if len(values) != count or any(type(each) is not int or not 0 <= each < _MAX_SIZE for each in values):
            raise self.fail(key, f"must be {count} whole numbers from 0 to 2^31, got {reprlib.repr(value)}")
        return values

    def real(self, key: str, default: float = 0.0) -> float:
        """A finite number above 0; `default`, if not 0, stands for a missing key."""
        if default and not self.has(key):
            return default
        value = self.get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, f"must be a positive number, got {reprlib.repr(value)}")
        return float(value)

    def window(self) -> int | None:
        """`attention.sliding_window`: positions that a sliding layer looks back to; None for no window (absent or 0).

        A family that does not call this has no windows, and its files are refused if they say so.
        """
        key = "attention.sliding_window"
        return self.size(key) if self.has(key) and self.get(key) != 0 else None

    def rope_scaling(self) -> dict[str, Any]:
        """Every `rope.scaling.*` entry, by what follows."""
        names = [key for key in self._values if key.startswith(_ROPE_SCALING)]
        return {name[len(_ROPE_SCALING) :]: self.get(name) for name in names}

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this (GGUF) name."""
        return name in self._header.tensors

    def rows(self, name: str) -> int:
        """How many rows the tensor of this (GGUF) name has.

        Raises:
            ModelFileError: there is no such tensor.
        """
        if not self.has_tensor(name):
            raise ModelFileError(self.file, name, "is missing")
        return self._header.tensors[name].shape[0]

    def vector(self, name: str) -> tuple[float, ...]:
        """The numbers of a short tensor that is a setting and no weight; empty without it.

        Raises:
            ModelFileError: it is not a vector of at most 4,096 numbers in float32.
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
        """Check that every key was asked for or changes nothing.

        Raises:
            ModelFileError: one was not, and it could change the answers.
        """
        for key, value in self._values.items():
            if key in self._read or value in _NEUTRAL.get(key, ()):
                continue
            raise self.fail(key, f"{reprlib.repr(value)} is not supported, and to ignore it could change the answers")
