"""Per-head projections: in torch, or one head after the other by compiled products.

In multi-head latent attention (absorbed form: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2) they map queries into the
latent space and attention's latent outputs back to values.

Invariant: with compiled products, a head's bits depend only on its own columns of its own row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.experts import StackedWeight
from penstock.kernels.native import Cpu
from penstock.kernels.row_pieces import filled_up, pieces

__all__ = ["project_heads"]


def project_heads(cpu: Cpu | None, x: Tensor, weights: StackedWeight, passed: int) -> Tensor:
    """Project each head by its own weight: the first `passed` columns are copied, the others multiplied.

    Args:
        cpu: computes products of packed weights; None for torch.
        x: `[T, heads * (passed + K)]`.
        weights: `[heads, N, K]`.
        passed: number of columns of each head that are copied.

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
    """`[T, heads, K]` by `[heads, N, K]`: `[T, heads, N]`; on CUDA in pieces of rows, like every product there."""
    if not x.is_cuda:
        return torch.einsum("thk,hnk->thn", x, weights)
    made = [torch.einsum("thk,hnk->thn", piece, weights) for piece in pieces(filled_up(x))]
    return torch.cat(made)[: len(x)]
