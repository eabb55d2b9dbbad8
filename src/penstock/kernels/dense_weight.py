"""Plain numbers as a weight, multiplied by torch on any device.

Library matrix products choose their order of summation by shape, so on a CPU a row's last bits may depend on how many
rows there are. On CUDA all products are of one shape: see `row_pieces`.
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
    """A weight whose numbers lie as they are.

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
        """The form's name, for people: that of the dtype."""
        return str(self.numbers.dtype).removeprefix("torch.")

    @property
    def arithmetic(self) -> str:
        """In what its products are computed; narrow ones are taken for bfloat16."""
        return "fp32" if self.numbers.dtype == torch.float32 else "bf16"

    @property
    def native(self) -> None:
        """The compiled kernels do not multiply it."""
        return

    @property
    def parts(self) -> tuple[DenseWeight]:
        """Itself."""
        return (self,)

    def matmul(
        self,
        cpu: Cpu | None,  # noqa: ARG002 - torch multiplies, with threads of its own
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `kernels.linear.Weight`."""
        multiply = linear_in_pieces if x.is_cuda else torch.nn.functional.linear
        out = multiply(x, self.numbers, bias)
        out = out if residual is None else residual + out
        return out if out_dtype is None else out.to(out_dtype)

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - as in `matmul`
        """See `kernels.linear.Weight`."""
        return torch.nn.functional.embedding(ids, self.numbers).to(dtype)
