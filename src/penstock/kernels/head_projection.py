"""A projection of each head by a weight of its own, in torch or one head after the other by compiled products.

What makes queries ask for a latent, and values of one (multi-head latent attention, absorbed: DeepSeek-AI 2024,
"DeepSeek-V2", section 2.1.2).

Invariant: a head's bits depend on its own columns of its own row alone, where its product is a compiled one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.experts import StackedWeight
from penstock.kernels.native import Cpu
from penstock.kernels.row_pieces import filled_up, pieces

__all__ = ["project_heads"]


def project_heads(cpu: Cpu | None, x: Tensor, weights: StackedWeight, passed: int) -> Tensor:
    """Of each head the first `passed` columns as they are, then what its weight makes of the others.

    Args:
        cpu: what computes packed weights; None for torch.
        x: `[T, heads * (passed + K)]`.
        weights: `[heads, N, K]`.
        passed: columns of each head.

    Returns:
        `[T, heads * (passed + N)]` in the dtype of `x`.
    """
    heads, _, inputs = weights.shape
    parted = x.unflatten(1, (heads, passed + inputs))  # [T, heads, passed + K]
    of_weights = parted[:, :, passed:]
    if isinstance(weights, Tensor):
        projected = _by_numbers(of_weights, weights)
    else:
        made = [weights[head].matmul(cpu, of_weights[:, head].contiguous()) for head in range(heads)]
        projected = torch.stack(made, dim=1)  # [T, heads, N]
    return torch.cat((parted[:, :, :passed], projected), dim=2).flatten(1)


def _by_numbers(x: Tensor, weights: Tensor) -> Tensor:
    """`[T, heads, K]` by `[heads, N, K]`: `[T, heads, N]`; on CUDA in pieces of rows, as all products are there."""
    if not x.is_cuda:
        return torch.einsum("thk,hnk->thn", x, weights)
    made = [torch.einsum("thk,hnk->thn", piece, weights) for piece in pieces(filled_up(x))]
    return torch.cat(made)[: len(x)]
