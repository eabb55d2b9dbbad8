"""Linear on weights packed by oneDNN: bfloat16 products for machines on which its kernels are faster (AMX).

Decides the shapes of oneDNN calls, because a library chooses its order of summation by shape and by its number of
threads. Outputs are cut into panels by the weight's shape alone; rows into tiles of a few sizes, the last one padded
with zeros; each call multiplies one tile by one panel on a single thread. Whether oneDNN then computes a row
identically in tiles of every size, and at every place in a tile, is tested for each panel shape before a weight is
packed. So a row's bits depend neither on the other rows nor on the number of threads. Does not know what the weight
belongs to, nor when oneDNN is the better choice (`exec.device` does).

Computes sums in float32, plus bias, plus residual, rounded once to bfloat16. oneDNN returns only bfloat16 for bfloat16
operands here, so this form cannot serve as a head, whose logits must not be rounded. The library is torch's own oneDNN,
called through the operators that torch's compiler uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from penstock.kernels.native import Cpu

__all__ = ["TILES", "OneDnnWeight", "available", "onednn_linear", "pack_onednn"]

TILES = (256, 128, 64, 32)
"""Rows per call. An AMX tile register has 16 rows; at least two of them are needed to keep the multiplier busy."""

_PANEL_BYTES = 1 << 20
"""The smallest panel worth its own call: reading it takes about 100 us, and a call costs about 20 us."""

_MOST_PANELS = 16
"""Upper limit of panels per weight, hence of cores that share a tile: about as many as a memory controller can feed."""

_PANEL_STEP = 64
"""oneDNN packs outputs in blocks of this many."""


_OPERATORS = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_nbytes", "_reorder_linear_weight")
"""The torch operators used. They are internal to torch's compiler, so `available` checks that they exist."""


@dataclass(frozen=True, slots=True, eq=False)
class OneDnnWeight:
    """A weight `[outputs, inputs]` in oneDNN's layout.

    Attributes:
        panels: oneDNN's own tensors `[width, inputs]`, bfloat16, in the order of outputs.
        nbytes: memory of the panels.
    """

    outputs: int
    inputs: int
    panels: tuple[Tensor, ...]
    nbytes: int

    @property
    def form(self) -> str:
        """The form's name, for display."""
        return "onednn"

    @property
    def arithmetic(self) -> str:
        """The arithmetic of its products."""
        return "bf16"

    @property
    def native(self) -> None:
        """None: the compiled kernels do not multiply it."""
        return

    @property
    def parts(self) -> tuple[OneDnnWeight]:
        """Itself."""
        return (self,)

    def matmul(
        self,
        cpu: Cpu | None,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `kernels.linear.Weight`: `onednn_linear` on as many threads as `cpu` has, rounded to bfloat16 first."""
        out = onednn_linear(x, self, bias, residual, 1 if cpu is None else cpu.threads)
        return out if out_dtype is None else out.to(out_dtype)

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - always raises
        """See `kernels.linear.Weight`; always raises, because only oneDNN knows the layout of its panels."""
        raise ValueError("a weight that oneDNN packed is no table to look rows up in")


def available() -> bool:
    """Whether torch has oneDNN's packed linear, and oneDNN multiplies bfloat16 on this processor."""
    there = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
    return there and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# ---- packing --------------------------------------------------------------------------------------------------------


def pack_onednn(weight: Tensor) -> OneDnnWeight:
    """Pack numbers, rounded to bfloat16; the result shares no memory with `weight`.

    Args:
        weight: `[N, K]`, float32 or bfloat16.

    Raises:
        ValueError: the shape or dtype is another.
        RuntimeError: on this machine, oneDNN's result for a row of such a weight depends on other rows.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16) or not weight.numel():
        raise ValueError(f"a weight must be [N, K], float32 or bfloat16; got {list(weight.shape)} {weight.dtype}")
    if torch.get_num_threads() > 1:
        return _workers.submit(_pack, weight).result()
    return _pack(weight)


def _pack(weight: Tensor) -> OneDnnWeight:
    outputs, inputs = weight.shape
    parts = weight.bfloat16().split(_panel_width(outputs, inputs))
    for width in {len(part) for part in parts}:
        if not _rows_are_alike(width, inputs):
            raise RuntimeError(f"oneDNN's product of {inputs} inputs and {width} outputs depends on a row's neighbours")
    panels = tuple(_panel(part) for part in parts)
    return OneDnnWeight(outputs, inputs, panels, sum(torch.ops.mkldnn._nbytes(panel) for panel in panels))


def _panel_width(outputs: int, inputs: int) -> int:
    """Number of outputs in every panel but the last."""
    panels = min(_MOST_PANELS, -(-2 * outputs * inputs // _PANEL_BYTES))
    return -(-outputs // (panels * _PANEL_STEP)) * _PANEL_STEP


def _panel(part: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), TILES[-1])


@lru_cache(maxsize=1024)
def _rows_are_alike(width: int, inputs: int) -> bool:
    """Whether rows have the same bits in tiles of every size and at every place, with and without bias and residual.

    Random data suffices: the code that oneDNN generates for a shape does not depend on the data, and with another order
    of summation some of 256 random rows would differ.
    """
    generator = torch.Generator().manual_seed(0)
    x, residual, weight, bias = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((TILES[0], inputs), (TILES[0], width), (width, inputs), (width,))
    )
    panel = _panel(weight)
    with torch.inference_mode():
        for adds_bias, adds_residual in product((False, True), repeat=2):
            multiply = partial(_rows_in_tiles, panel=panel, bias=bias if adds_bias else None)
            whole = multiply(x, residual if adds_residual else None, TILES[0])
            shifted = x.roll(1, 0), residual.roll(1, 0) if adds_residual else None
            if not torch.equal(multiply(*shifted, TILES[-1]).roll(-1, 0), whole):
                return False
            if any(not torch.equal(multiply(x, residual if adds_residual else None, tile), whole) for tile in TILES):
                return False
    return True


def _rows_in_tiles(x: Tensor, residual: Tensor | None, tile: int, panel: Tensor, bias: Tensor | None) -> Tensor:
    """The product of all of `x`, in tiles of one size, which divides the number of rows."""
    others = [None] * (len(x) // tile) if residual is None else residual.split(tile)
    return torch.cat([_multiply(rows, panel, bias, other) for rows, other in zip(x.split(tile), others, strict=True)])


# ---- products -------------------------------------------------------------------------------------------------------


def onednn_linear(
    x: Tensor,
    weight: OneDnnWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """`x @ weight.T + bias + residual`.

    Args:
        x: `[T, K]`, bfloat16; rows may be strided views of a wider matrix.
        weight: `[N, K]`.
        bias: `[N]`, bfloat16; or None.
        residual: `[T, N]`, bfloat16, rows may be strided; or None.
        threads: number of threads that share the calls; bits do not depend on it.

    Returns:
        `[T, N]` bfloat16, contiguous, owned by the caller.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check_operands(x, weight, bias, residual)
    out = torch.empty(len(x), weight.outputs, dtype=torch.bfloat16)
    _share_out(list(_calls(x, weight, bias, residual, out, threads)), threads)
    return out


def _calls(
    x: Tensor, weight: OneDnnWeight, bias: Tensor | None, residual: Tensor | None, out: Tensor, threads: int
) -> Iterator[Callable[[], object]]:
    """One call per panel and tile; the calls of a panel are adjacent, so that it is read from memory once."""
    cuts = _cuts(len(x), len(weight.panels), threads)
    tiles = [(slice(start, stop), _filled_up(x[start:stop], tile)) for start, stop, tile in cuts]
    first = 0
    for panel in weight.panels:
        columns = slice(first, first := first + len(panel))
        part = None if bias is None else bias[columns]
        for rows, tile in tiles:
            other = None if residual is None else _filled_up(residual[rows, columns], len(tile))
            yield partial(_multiply_into, out[rows, columns], tile, panel, part, other)


def _cuts(rows: int, panels: int, threads: int) -> list[tuple[int, int, int]]:
    """Start, stop and size of each tile of rows: large tiles, unless they leave threads idle."""
    sizes = [tile for tile in TILES if -(-rows // tile) * panels >= threads] or [TILES[-1]]
    cuts, start = [], 0
    while start < rows:
        tile = next((size for size in sizes if size <= rows - start), sizes[-1])
        cuts.append((start, min(rows, start + tile), tile))
        start += tile
    return cuts


def _filled_up(rows: Tensor, tile: int) -> Tensor:
    """Pad `[T, W]` to `[tile, W]` with rows of zeros."""
    return rows if len(rows) == tile else torch.nn.functional.pad(rows, (0, 0, 0, tile - len(rows)))


def _multiply_into(out: Tensor, x: Tensor, panel: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    out.copy_(_multiply(x, panel, bias, residual)[: len(out)])


def _multiply(x: Tensor, panel: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """One call of oneDNN: `[tile, K]` to `[tile, width]`."""
    linear = torch.ops.mkldnn._linear_pointwise
    if residual is None:
        return linear(x, panel, bias, "none", [], "")
    return linear.binary(x, residual, panel, bias, "add")


# ---- threads --------------------------------------------------------------------------------------------------------


def _share_out(calls: Sequence[Callable[[], object]], threads: int) -> None:
    """Make the calls on `threads` threads; neighbouring calls stay together.

    The calling thread takes a share too, unless torch would use several threads in it.
    """
    if not calls:
        return
    size = -(-len(calls) // threads)
    shares = [calls[start : start + size] for start in range(0, len(calls), size)]
    ours = 0 if torch.get_num_threads() > 1 else 1
    given = [_workers.submit(_make, share) for share in shares[ours:]]
    for share in shares[:ours]:
        _make(share)
    for future in given:
        future.result()


def _make(calls: Sequence[Callable[[], object]]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()


_workers = ThreadPoolExecutor(1024, "onednn", partial(torch.set_num_threads, 1))
"""Threads in which torch, and so oneDNN, uses a single thread (a per-thread setting). Started only as needed."""


def _check_operands(x: Tensor, weight: OneDnnWeight, bias: Tensor | None, residual: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.dtype != torch.bfloat16:
        raise ValueError(f"x must be [T, {weight.inputs}], bfloat16; got {list(x.shape)} {x.dtype}")
    if bias is not None and (bias.shape != (weight.outputs,) or bias.dtype != torch.bfloat16):
        raise ValueError(f"bias must be [{weight.outputs}], bfloat16; got {list(bias.shape)} {bias.dtype}")
    if residual is not None and (residual.shape != (len(x), weight.outputs) or residual.dtype != torch.bfloat16):
        raise ValueError(
            f"residual must be [{len(x)}, {weight.outputs}], bfloat16; got {list(residual.shape)} {residual.dtype}"
        )
