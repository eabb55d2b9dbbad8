"""The interface of a weight, whatever its form: products, rows, size.

Decides the signature that all forms share. A form has one file beside this one (`dense_weight`, `packed_linear`)
and, if compiled kernels multiply it, one header under `native/`.
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
        """Memory of the weight."""
        ...

    @property
    def form(self) -> str:
        """The form's name, for display."""
        ...

    @property
    def arithmetic(self) -> str:
        """The arithmetic of its products: `fp32`, `bf16` or `int8`."""
        ...

    @property
    def native(self) -> Any:
        """The weight as compiled programs take it, or None if they do not multiply it."""
        ...

    @property
    def parts(self) -> tuple[Weight, ...]:
        """The weights that make up its outputs, in order: itself, unless it is a `FusedWeight`."""
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
            cpu: runs the compiled kernels, if the form has any; None for torch.
            x: `[T, K]`.
            bias: `[N]`, or None.
            residual: `[T, N]`, or None. It may be overwritten: the result may reuse its memory.
            out_dtype: dtype of the result; None for the dtype of `x`.

        Returns:
            `[T, N]`, owned by the caller.

        Raises:
            ValueError: a shape or dtype does not fit.
        """
        ...

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows at `ids` as numbers.

        Args:
            cpu: as for `matmul`.
            ids: `[T]` int64, each in `[0, N)`. A `DenseWeight` does not check them, so code that takes token ids from
                outside must.
            dtype: dtype of the result.

        Returns:
            `[T, K]`, a copy.

        Raises:
            ValueError: the form cannot look up rows, or an id or dtype does not fit.
        """
        ...
