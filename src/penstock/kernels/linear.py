"""What a weight answers for itself, whatever its form: products, rows, size.

Decides the signature that all forms share. A form is one file beside this one (`dense_weight`, `packed_linear`,
`onednn_linear`) and, where it is multiplied by compiled kernels, one header under `native/`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.native import Cpu

__all__ = ["Weight"]


class Weight(Protocol):
    """A weight `[outputs, inputs]`, immutable."""

    @property
    def outputs(self) -> int:
        """N."""
        ...

    @property
    def inputs(self) -> int:
        """K."""
        ...

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        ...

    @property
    def form(self) -> str:
        """The form's name, for people."""
        ...

    @property
    def arithmetic(self) -> str:
        """In what its products are computed: `fp32`, `bf16` or `int8`."""
        ...

    @property
    def native(self) -> Any:
        """The weight as compiled programs take it, or None where they do not multiply it."""
        ...

    @property
    def parts(self) -> tuple[Weight, ...]:
        """The weights that its outputs come from, in their order: itself, unless it is a `FusedWeight`."""
        ...

    def matmul(
        self,
        cpu: Cpu | None,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`x @ weight.T + bias + residual`.

        Args:
            cpu: what computes where the form has compiled kernels; None is torch.
            x: `[T, K]`.
            bias: `[N]`, or None.
            residual: `[T, N]`, or None.
            out_dtype: of the result; None is that of `x`.

        Returns:
            `[T, N]`, owned by the caller.

        Raises:
            ValueError: a shape or dtype that does not fit.
        """
        ...

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows at `ids` as numbers.

        Args:
            cpu: as for `matmul`.
            ids: `[T]` int64, each in `[0, N)`. A plain weight trusts them: whoever takes token ids from outside checks
                them first.
            dtype: of the result.

        Returns:
            `[T, K]`, a copy.

        Raises:
            ValueError: the form has no rows to show, or an id or dtype does not fit.
        """
        ...
