"""Table look-up by index: token embeddings and learned positions.

Decides nothing but how rows are gathered. Indices are trusted: whoever takes token ids from outside checks them first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["embedding"]


def embedding(indices: Tensor, table: Tensor) -> Tensor:
    """The rows of `table` at `indices`.

    Args:
        indices: `[T]` int64, each in `[0, len(table))`.
        table: `[V, H]`.

    Returns:
        `[T, H]`, a copy.
    """
    return torch.nn.functional.embedding(indices, table)
