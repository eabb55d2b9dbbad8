"""The KV cache: memory for the keys and values of every block, sized once from a budget in bytes.

Decides how much fits and how it is laid out. A block holds a fixed number of positions of one sequence in all caches of
a model; each cache has its own heads and head width, and layers may share a cache. Does not know layers, owners or
contents of blocks: blocks are reused without being cleared, so readers must not read beyond what was written.

Invariant: the memory never moves and never grows after construction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.contract.memory import readable_bytes
from penstock.contract.model import KvCacheSpec
from penstock.exec.places import BytePlaces, copy_place, fill_place, rows_of_bytes
from penstock.kernels.backend import Backend
from penstock.kernels.native import MAX_HEAD_DIM
from penstock.kernels.native_attention import (
    int8_keys_shape,
    int8_latent_shape,
    int8_values_shape,
    latent_values,
    packed_keys_shape,
    packed_values_shape,
)
from penstock.kernels.weight_memory import large_block

__all__ = ["KVStore", "block_bytes", "blocks_for", "resolve_kv_dtype"]

_CACHE_LINE = 64  # bytes
_HOST = torch.device("cpu")


def resolve_kv_dtype(option: str, dtype: torch.dtype, backend: Backend) -> torch.dtype:
    """The dtype of keys and values for the option `kv_cache_dtype`; `auto` means the activations' dtype, `dtype`.

    Raises:
        ConfigError: for int8 if the attention that will run cannot read it.
    """
    if option == "auto":
        return dtype
    reason = backend.why_torch()
    if reason is not None:
        raise ConfigError("kv_cache_dtype", f"int8 needs the compiled CPU kernels; here {reason}")
    return torch.int8


def block_bytes(specs: Sequence[KvCacheSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` positions in all caches, with the scales of int8."""
    return sum(_numbers(spec, block_size, dtype) for spec in specs) * dtype.itemsize


def _numbers(spec: KvCacheSpec, block_size: int, dtype: torch.dtype) -> int:
    """Numbers of one block in one cache; packed caches have as many."""
    shapes = _shapes(spec, 1, block_size, dtype, packed=False)
    return sum(math.prod(shape) for shape in shapes if shape is not None)


def blocks_for(budget_bytes: int, each: int, block_size: int) -> int:
    """How many blocks of `each` bytes and `block_size` tokens a budget pays for.

    Raises:
        ConfigError: the budget does not pay for one block.
    """
    if budget_bytes < each:
        raise ConfigError(
            "kv_cache_memory",
            f"{readable_bytes(budget_bytes)} does not hold even one KV block, which takes {readable_bytes(each)}"
            f" ({block_size} tokens); give it more, or lower block_size",
        )
    return budget_bytes // each


class KVStore:
    """Keys and values of all caches of a model, in blocks. Owned by the runner.

    Attributes:
        keys: for each cache `[num_blocks, block_size, Hkv, D]`, undefined until written; the operating system allocates
            the memory as blocks are first used, in large pages if it has them.
        values: the same; for a latent cache `[num_blocks, block_size, 1, value_dim]`, a view of its keys.

    With `packed`, which only the compiled attention reads, both have the shapes of `packed_keys_shape` and
    `packed_values_shape` in `kernels.native_attention`; with `dtype` int8, of `int8_keys_shape` and
    `int8_values_shape`. `packed` changes nothing in a latent cache, which has `int8_latent_shape` with `dtype` int8.
    """

    def __init__(
        self,
        specs: Sequence[KvCacheSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        widest = max((spec.head_dim for spec in specs if not spec.value_dim), default=0)
        if dtype == torch.int8 and widest > MAX_HEAD_DIM:
            raise ConfigError(
                "kv_cache_dtype",
                f"int8 is for heads of at most {MAX_HEAD_DIM}, and these have {widest}; use auto",
            )
        shapes = [_shapes(spec, num_blocks, block_size, dtype, packed=packed) for spec in specs]
        self.keys = _tensors([keys for keys, _ in shapes], dtype, device)
        of_their_own = iter(_tensors([values for _, values in shapes if values is not None], dtype, device))
        self.values = tuple(
            latent_values(keys, spec.head_dim, spec.value_dim) if spec.value_dim else next(of_their_own)
            for keys, spec in zip(self.keys, specs, strict=True)
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all caches, as `copy_block` gives them."""
        return sum(len(rows[0]) for rows in self._rows)

    def copy_block(self, block: int, content: memoryview) -> None:
        """Copy all bytes of a block, cache after cache, into `content` on the host."""
        copy_place(self._rows, block, content)

    def block_content(self, block: int) -> bytes:
        """All bytes of a block, as `copy_block` writes them."""
        content = bytearray(self.block_bytes)
        self.copy_block(block, memoryview(content))
        return bytes(content)

    def fill_block(self, block: int, content: memoryview) -> None:
        """Fill a block with what `copy_block` wrote, in a store of the same form."""
        fill_place(self._rows, block, content)

    @cached_property
    def _rows(self) -> BytePlaces:
        """Each cache's memory on the host, block by block; for a latent cache only its keys, which hold its values."""
        own = [values for keys, values in zip(self.keys, self.values, strict=True) if not _within(values, keys)]
        return rows_of_bytes((*self.keys, *own))

    def fill_with_nan(self) -> None:
        """Fill everything with NaN, for tests that nothing is read before it is written."""
        for cache in (*self.keys, *self.values):
            cache.view(torch.uint8).fill_(0xFF)  # a NaN in every floating dtype, so also in the scales of int8

    @contextmanager
    def borrowed_block(self, block: int) -> Iterator[None]:
        """Inside the `with`, `block` may be overwritten; afterwards its contents are restored."""
        caches = (*self.keys, *self.values)
        held = [cache[block].clone() for cache in caches]
        try:
            yield
        finally:
            for cache, old in zip(caches, held, strict=True):
                cache[block] = old


def _within(values: Tensor, keys: Tensor) -> bool:
    """Whether a cache's values are a part of its keys."""
    return keys.data_ptr() <= values.data_ptr() < keys.data_ptr() + keys.nbytes


def _shapes(
    spec: KvCacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, *, packed: bool
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shapes of keys and of values; None for values that are a part of the keys."""
    size = num_blocks, block_size, spec.heads, spec.head_dim
    if spec.value_dim:
        if dtype == torch.int8:
            size = int8_latent_shape(num_blocks, block_size, spec.head_dim, spec.value_dim)
        return size, None
    if dtype == torch.int8:
        return int8_keys_shape(*size), int8_values_shape(*size)
    if packed:
        return packed_keys_shape(*size, dtype), packed_values_shape(*size, dtype)
    return size, size


def _tensors(sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """A tensor of each size; on a CPU in large pages, since scattered blocks would otherwise each need a page."""
    if not sizes:
        return ()
    if device != _HOST:
        return tuple(torch.empty(size, dtype=dtype, device=device) for size in sizes)
    lengths = [math.prod(size) * dtype.itemsize for size in sizes]
    starts = [0, *accumulate(-(-length // _CACHE_LINE) * _CACHE_LINE for length in lengths)]
    try:
        memory = large_block(starts[-1])
    except OSError as error:
        wanted = readable_bytes(starts[-1])
        raise ConfigError("kv_cache_memory", f"the system does not give {wanted}: {error.strerror}") from error
    return tuple(
        memory[start : start + length].view(dtype).view(size)
        for start, length, size in zip(starts, lengths, sizes, strict=False)  # starts has the end as one more entry
    )
