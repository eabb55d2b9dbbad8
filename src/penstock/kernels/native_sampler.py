"""Choosing tokens in compiled code: argmax, filtered draws without a sort, log probabilities.

Decides how rows are handed over; the arithmetic is in `native/sampler.h`. What is kept and drawn is defined by
`penstock.sampling` and `exec.sampler`: temperature, top_k, top_p, min_p in this order, then the inverse of the
distribution function in the order of the vocabulary. A row's outcome depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.native_rows import required

__all__ = ["Choices", "choose"]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """What came of `S` rows.

    Attributes:
        tokens: `[S]` int64; of no meaning where the row failed.
        logprobs: `[S]` float32 under the raw distribution, 0 where it was not asked for.
        failed: `[S]` bool: NaN or +inf among the logits, or nothing but -inf.
    """

    tokens: Tensor
    logprobs: Tensor
    failed: Tensor


def choose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    wants_logprob: Tensor,
) -> Choices:
    """Choose one token for each row.

    Args:
        logits: `[S, V]` float32; not changed; rows may be strided.
        temperature: `[S]` float32; 0 takes the likeliest token, the lowest id where several are.
        top_k: `[S]` int32; 0 takes all.
        top_p: `[S]` float64, above 0; 1 takes all.
        min_p: `[S]` float32; 0 takes all.
        uniform: `[S]` float64 in [0, 1).
        wants_logprob: `[S]` bool.

    Raises:
        ValueError: a column or a value in it does not fit; nothing was written then.
    """
    count, vocabulary = logits.shape
    if logits.dtype != torch.float32 or (vocabulary > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be [S, V] float32 with contiguous rows, not {logits.dtype}")
    columns = (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float64),
        ("min_p", min_p, torch.float32),
        ("uniform", uniform, torch.float64),
        ("wants_logprob", wants_logprob, torch.bool),
    )
    for name, column, dtype in columns:
        if column.shape != (count,) or column.dtype != dtype or not column.is_contiguous():
            raise ValueError(f"{name} must be [{count}] {dtype}, not {tuple(column.shape)} {column.dtype}")
    chosen = Choices(
        tokens=torch.empty(count, dtype=torch.int64),
        logprobs=torch.empty(count, dtype=torch.float32),
        failed=torch.empty(count, dtype=torch.bool),
    )
    scratch = torch.empty((count, vocabulary) if bool(temperature.any()) else (0,), dtype=torch.float32)
    required().sample(
        *(count, vocabulary, logits.data_ptr(), logits.stride(0)),
        *(column.data_ptr() for _, column, _ in columns),
        *(chosen.tokens.data_ptr(), chosen.logprobs.data_ptr(), chosen.failed.data_ptr(), scratch.data_ptr()),
    )
    return chosen
