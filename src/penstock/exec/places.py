"""One place of several arrays as one run of bytes: a KV block in all caches, or all parts of a recurrent state.

The bytes are copied as they lie in memory, so that a restored place is bit-identical. Both directions release Python's
lock while they copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["BytePlaces", "copy_place", "fill_place", "rows_of_bytes"]

BytePlaces = tuple[npt.NDArray[np.uint8], ...]
"""The memory of each array, `[places, bytes]`."""


def rows_of_bytes(tensors: Sequence[Tensor]) -> BytePlaces:
    """The memory of host tensors, each contiguous and `[places, ...]`; not a copy."""
    return tuple(tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy() for tensor in tensors)


def copy_place(rows: BytePlaces, place: int, content: memoryview) -> None:
    """Copy the bytes at `place`, array after array, into `content`, which has the same size."""
    numbers, start = np.frombuffer(content, dtype=np.uint8), 0
    for each in rows:
        end = start + each.shape[1]
        numbers[start:end] = each[place]
        start = end
    assert start == len(numbers), f"{len(numbers)} bytes for {start}"


def fill_place(rows: BytePlaces, place: int, content: memoryview) -> None:
    """Fill `place` with what `copy_place` wrote to `content`."""
    numbers, start = np.frombuffer(content, dtype=np.uint8), 0
    for each in rows:
        end = start + each.shape[1]
        each[place] = numbers[start:end]
        start = end
    assert start == len(numbers), f"{len(numbers)} bytes for {start}"
