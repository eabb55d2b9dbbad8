"""A weight made of several weights with the same inputs, each in its own form.

Each part computes its own products. Used where a family multiplies projections as one weight (queries, keys and values;
gates and ups) but a file stores them in blocks of different kinds, so that no part has to be requantised into another's
form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from penstock.kernels.linear import Weight
from penstock.kernels.native import Cpu

__all__ = ["FusedWeight"]


@dataclass(frozen=True, slots=True, eq=False)
class FusedWeight:
    """Weights `[N1, K], [N2, K], ...` as one `[N1 + N2 + ..., K]`.

    Attributes:
        parts: two or more, in the order of outputs.
    """

    parts: tuple[Weight, ...]

    @property
    def outputs(self) -> int:
        """N, the sum over all parts."""
        return sum(part.outputs for part in self.parts)

    @property
    def inputs(self) -> int:
        """K."""
        return self.parts[0].inputs

    @property
    def nbytes(self) -> int:
        """Memory of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def form(self) -> str:
        """The forms of the parts, for display."""
        return " + ".join(part.form for part in self.parts)

    @property
    def arithmetic(self) -> str:
        """`bf16` if all parts use it; else that of the first part that does not, which takes unrounded inputs."""
        return next((part.arithmetic for part in self.parts if part.arithmetic != "bf16"), "bf16")

    @property
    def native(self) -> None:
        """None: compiled programs take the parts one by one."""
        return

    def matmul(
        self,
        cpu: Cpu | None,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `kernels.linear.Weight`."""
        sizes = [part.outputs for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        residuals = [None] * len(sizes) if residual is None else residual.split(sizes, dim=1)
        products = zip(self.parts, biases, residuals, strict=True)
        return torch.cat([part.matmul(cpu, x, own, beside, out_dtype) for part, own, beside in products], dim=1)

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> NoReturn:  # noqa: ARG002
        """Always raises: an embedding table has a single form."""
        raise ValueError("a weight of parts in different forms is no table of rows")
