"""What lies at one place of several arrays, as one run of bytes: a KV block in all caches, a state of all kinds.

The bytes are as they lie in memory, so that what is put back is the same to the bit. Both directions let go of
Python's lock while they copy.
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
    """The memory of tensors on the host, each contiguous and `[places, ...]`; not a copy."""
    return tuple(tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy() for tensor in tensors)


def copy_place(rows: BytePlaces, place: int, content: memoryview) -> None:
    """Put the bytes at `place`, array after array, into `content`, which has as many."""
    numbers, start = np.frombuffer(content, dtype=np.uint8), 0
    for each in rows:
        end = start + each.shape[1]
        numbers[start:end] = each[place]
        start = end
    assert start == len(numbers), f"{len(numbers)} bytes for {start}"


def fill_place(rows: BytePlaces, place: int, content: memoryview) -> None:
    """Make `place` what `copy_place` put into `content`."""
    numbers, start = np.frombuffer(content, dtype=np.uint8), 0
    for each in rows:
        end = start + each.shape[1]
        each[place] = numbers[start:end]
        start = end
    assert start == len(numbers), f"{len(numbers)} bytes for {start}"
