"""A weight kept as a plain tensor, multiplied by torch on any device.

Matrix libraries choose the order of summation by shape, so on a CPU a row's last bits may depend on the number of rows.
On CUDA, products are cut into pieces of rows, of sizes that give the same bits: see `row_pieces`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.native import Cpu
from penstock.kernels.row_pieces import linear_in_pieces

__all__ = ["DenseWeight"]


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A weight stored as a plain matrix.

    Attributes:
        numbers: `[N, K]`, in the dtype of the activations.
    """

    numbers: Tensor

    @property
    def outputs(self) -> int:
        """N."""
        return self.numbers.shape[0]

    @property
    def inputs(self) -> int:
        """K."""
        return self.numbers.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory of the numbers."""
        return self.numbers.nbytes

    @property
    def form(self) -> str:
        """The form's name for display: the name of the dtype."""
        return str(self.numbers.dtype).removeprefix("torch.")

    @property
    def arithmetic(self) -> str:
        """The arithmetic of its products; every dtype but float32 counts as bf16."""
        return "fp32" if self.numbers.dtype == torch.float32 else "bf16"

    @property
    def native(self) -> None:
        """None: the compiled kernels do not multiply it."""
        return

    @property
    def parts(self) -> tuple[DenseWeight]:
        """Itself."""
        return (self,)

    def matmul(
        self,
        cpu: Cpu | None,  # noqa: ARG002 - torch multiplies, on its own threads
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `kernels.linear.Weight`."""
        if x.is_cuda:
            return linear_in_pieces(x, self.numbers, bias, out_dtype, residual)
        out = torch.nn.functional.linear(x, self.numbers, bias)
        out = out if residual is None else residual + out
        return out if out_dtype is None else out.to(out_dtype)

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - as in `matmul`
        """See `kernels.linear.Weight`."""
        return torch.nn.functional.embedding(ids, self.numbers).to(dtype)
