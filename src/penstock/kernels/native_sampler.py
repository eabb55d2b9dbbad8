"""Token sampling in compiled code: argmax, filtered draws without a sort, log probabilities.

Decides how rows are handed over; the arithmetic is in `native/sampler.h`. `penstock.sampling` and `exec.sampler` define
the semantics: temperature, top_k, top_p and min_p in this order, then inversion of the cumulative distribution in
vocabulary order. A row's outcome depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native import Cpu, required

__all__ = ["Choices", "SamplingMetadata", "choose", "rule_out"]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """Sampling parameters of `S` rows: checked once, used for many steps, never changed.

    Attributes:
        temperature: `[S]` float32; 0 takes the top token, the lowest id among equals.
        top_k: `[S]` int32; 0 keeps all tokens.
        top_p: `[S]` float64, above 0; 1 keeps all tokens.
        min_p: `[S]` float32; 0 keeps all tokens.
        wants_logprob: `[S]` bool, whether to return the log probability.

    Raises:
        ValueError: a column does not fit.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    wants_logprob: Tensor
    random: bool = field(init=False)
    """Whether any row draws at random."""
    unused: Tensor = field(init=False)
    """`[S]` float64, passed in place of uniform numbers when no row draws."""
    columns: Any = field(init=False)
    """The columns as the compiled function takes them."""

    def __post_init__(self) -> None:
        count = len(self.temperature)
        _check_column("temperature", self.temperature, torch.float32, count)
        _check_column("top_k", self.top_k, torch.int32, count)
        _check_column("top_p", self.top_p, torch.float64, count)
        _check_column("min_p", self.min_p, torch.float32, count)
        _check_column("wants_logprob", self.wants_logprob, torch.bool, count)
        object.__setattr__(self, "columns", self._columns())
        object.__setattr__(self, "random", bool(self.temperature.any()))
        object.__setattr__(self, "unused", torch.zeros(count, dtype=torch.float64))

    def _columns(self) -> Any:
        return required().SamplingColumns(
            temperature=self.temperature.data_ptr(),
            top_k=self.top_k.data_ptr(),
            top_p=self.top_p.data_ptr(),
            min_p=self.min_p.data_ptr(),
            wants_logprob=self.wants_logprob.data_ptr(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The results of `S` rows.

    Attributes:
        tokens: `[S]` int64; meaningless where the row failed.
        logprobs: `[S]` float32 under the raw distribution, 0 where `wants_logprob` is false.
        failed: `[S]` bool: the logits have a NaN or +inf, or are all -inf.
        normalizers: `[S]` float64, where `wants_logprob`: any token's log probability is its logit minus this, rounded.
    """

    tokens: Tensor
    logprobs: Tensor
    failed: Tensor
    normalizers: Tensor


def choose(cpu: Cpu, logits: Tensor, metadata: SamplingMetadata, uniform: Tensor | None = None) -> Choices:
    """Choose one token for each row.

    The call takes 0.01 to 0.1 ms, which is noticeable next to a small model's step, so nothing that `metadata` has
    checked is checked again.

    Args:
        cpu: runs the kernel.
        logits: `[S, V]` float32; not changed; rows may be strided.
        metadata: one entry per row of `logits`.
        uniform: `[S]` float64 in [0, 1); required if any row draws.

    Raises:
        ValueError: an argument or a value in it does not fit; nothing has been written.
    """
    count, vocabulary = logits.shape
    if logits.dtype != torch.float32 or (vocabulary > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be [S, V] float32 with contiguous rows, not {logits.dtype}")
    if metadata.temperature.shape[0] != count:
        raise ValueError(f"metadata has {metadata.temperature.shape[0]} rows, and logits have {count}")
    if uniform is None:
        if metadata.random:
            raise ValueError("uniform must be given where a row draws")
        uniform = metadata.unused
    else:
        _check_column("uniform", uniform, torch.float64, count)
    tokens = torch.empty(count, dtype=torch.int64)
    logprobs = torch.empty(count, dtype=torch.float32)
    failed = torch.empty(count, dtype=torch.bool)
    normalizers = torch.empty(count, dtype=torch.float64)
    scratch = torch.empty((count, vocabulary), dtype=torch.float32) if metadata.random else None
    native = required()
    cpu.sample(
        rows=count,
        vocabulary=vocabulary,
        logits=native.Rows(logits.data_ptr(), logits.stride(0), 0),
        columns=metadata.columns,
        uniform=uniform.data_ptr(),
        out=native.SampledColumns(
            tokens=tokens.data_ptr(),
            logprobs=logprobs.data_ptr(),
            failed=failed.data_ptr(),
            normalizers=normalizers.data_ptr(),
        ),
        scratch=0 if scratch is None else scratch.data_ptr(),
    )
    return Choices(tokens, logprobs, failed, normalizers)


def rule_out(cpu: Cpu, logits: Tensor, allowed: bytes, lowered: Tensor) -> None:
    """Copy a row of logits, with -inf for every token that is not allowed; NaN stays NaN, so that such a row fails.

    Args:
        cpu: runs the kernel.
        logits: `[V]` float32.
        allowed: a bit for each token, at least `V` in all, the lowest bit of a byte first.
        lowered: `[V]` float32, written; may be `logits`.

    Raises:
        ValueError: an argument does not fit; nothing has been written.
    """
    for name, row in (("logits", logits), ("lowered", lowered)):
        if row.dim() != 1 or row.dtype != torch.float32 or not row.is_contiguous():
            raise ValueError(f"{name} must be [V] float32 and contiguous, not {tuple(row.shape)} {row.dtype}")
    if len(lowered) != len(logits):
        raise ValueError(f"lowered has {len(lowered)} tokens, and logits have {len(logits)}")
    cpu.rule_out(width=len(logits), x=logits.data_ptr(), allowed=allowed, out=lowered.data_ptr())


def _check_column(name: str, column: Tensor, dtype: torch.dtype, count: int) -> None:
    if column.shape != (count,) or column.dtype != dtype or not column.is_contiguous():
        raise ValueError(f"{name} must be [{count}] {dtype}, not {tuple(column.shape)} {column.dtype}")
