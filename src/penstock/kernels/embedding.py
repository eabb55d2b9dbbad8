"""Table look-up by index: token embeddings and learned positions.

Decides nothing but how rows are gathered. Indices are trusted: whoever takes token ids from outside checks them first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.linear import Weight
from penstock.kernels.packed_linear import embedding_rows
from penstock.kernels.packed_weight import PackedWeight

__all__ = ["embedding"]


def embedding(indices: Tensor, table: Weight, dtype: torch.dtype) -> Tensor:
    """The rows of `table` at `indices`.

    Args:
        indices: `[T]` int64, each in `[0, V)`.
        table: `[V, H]`; a packed one is shared with the head of a model that ties them.
        dtype: of the result; a plain table has it already.

    Returns:
        `[T, H]`, a copy.
    """
    if isinstance(table, PackedWeight):
        return embedding_rows(indices, table, dtype)
    return torch.nn.functional.embedding(indices, table)
