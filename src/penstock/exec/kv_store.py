"""The KV cache: memory for the keys and values of every block, sized once from a budget in bytes.

Decides how much fits and how it is laid out. Does not know which sequence owns which block, nor what a block holds:
blocks are handed out again without being cleared, so readers must not look beyond what was written.

Invariant: the memory never moves and never grows after construction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.contract.model import ModelShape
from penstock.kernels import native
from penstock.kernels.native_attention import (
    int8_keys_shape,
    int8_values_shape,
    packed_keys_shape,
    packed_values_shape,
)
from penstock.kernels.weight_memory import large_block

__all__ = ["KVStore", "MemoryReport", "block_bytes", "blocks_for", "resolve_kv_dtype", "serves_packed"]

_CACHE_LINE = 64  # bytes


def resolve_kv_dtype(option: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of keys and values for the option `kv_cache_dtype`; `auto` is that of the activations, `dtype`.

    Raises:
        ConfigError: int8, where the attention that will run cannot read it.
    """
    if option == "auto":
        return dtype
    if device.type != "cpu":
        raise ConfigError("kv_cache_dtype", f"int8 needs the compiled CPU kernels; here the model runs on {device}")
    if not native.available():
        raise ConfigError(
            "kv_cache_dtype",
            "int8 needs the compiled CPU kernels; here this installation was made without a C++ compiler",
        )
    return torch.int8


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes: keys and values of `block_size` positions in all layers, with the scales of int8."""
    size = (1, block_size, shape.num_kv_heads, shape.head_dim)
    if dtype == torch.int8:
        return shape.num_layers * (math.prod(int8_keys_shape(*size)) + math.prod(int8_values_shape(*size)))
    return 2 * shape.num_layers * math.prod(size) * dtype.itemsize


def blocks_for(budget_bytes: int, shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks a budget pays for.

    Raises:
        ConfigError: when it does not pay for one.
    """
    each = block_bytes(shape, block_size, dtype)
    if budget_bytes < each:
        raise ConfigError(
            "kv_cache_memory",
            f"{_readable(budget_bytes)} does not hold even one KV block, which takes {_readable(each)}"
            f" ({block_size} tokens); give it more, or lower block_size",
        )
    return budget_bytes // each


def serves_packed(shape: ModelShape, dtype: torch.dtype, device: torch.device, block_size: int) -> bool:
    """Whether the attention that will run here reads a packed cache, and is quicker with it."""
    compiled = native.available() and dtype in (torch.float32, torch.bfloat16) and device.type == "cpu"
    # An odd head_dim would be filled up, and take more memory than `block_bytes` says.
    return compiled and shape.head_dim <= native.MAX_HEAD_DIM and shape.head_dim % 2 == 0 and block_size % 16 == 0


class KVStore:
    """Keys and values of all layers, in blocks. Owned by the runner.

    Attributes:
        keys: one `[num_blocks, block_size, Hkv, D]` a layer, undefined until written; the operating system finds the
            memory as blocks are first used, in large pages where it has them.
        values: the same.

    With `packed`, which only the compiled attention reads, both have the shapes of `packed_keys_shape` and
    `packed_values_shape` in `kernels.native_attention`; with `dtype` int8 those of `int8_keys_shape` and
    `int8_values_shape`.
    """

    def __init__(
        self,
        shape: ModelShape,
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
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        key_size: tuple[int, ...] = size
        value_size: tuple[int, ...] = size
        if dtype == torch.int8:
            if shape.head_dim > native.MAX_HEAD_DIM:
                raise ConfigError(
                    "kv_cache_dtype",
                    f"int8 is for heads of at most {native.MAX_HEAD_DIM}, and these have {shape.head_dim}; use auto",
                )
            key_size, value_size = int8_keys_shape(*size), int8_values_shape(*size)
        elif packed:
            key_size, value_size = packed_keys_shape(*size, dtype), packed_values_shape(*size, dtype)
        self.keys = _caches(shape.num_layers, key_size, dtype, device)
        self.values = _caches(shape.num_layers, value_size, dtype, device)

    def fill_with_nan(self) -> None:
        """Make everything held NaN, for those who test that nothing is read before it was written."""
        for cache in (*self.keys, *self.values):
            cache.view(torch.uint8).fill_(0xFF)  # in each floating dtype a NaN; so is the scale of int8

    @contextmanager
    def borrowed_block(self, block: int) -> Iterator[None]:
        """Inside the `with`, `block` may be overwritten; after it, the block holds again what it held before."""
        caches = (*self.keys, *self.values)
        held = [cache[block].clone() for cache in caches]
        try:
            yield
        finally:
            for cache, old in zip(caches, held, strict=True):
                cache[block] = old


def _caches(count: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """`count` tensors; on a CPU in large pages: blocks lie scattered, and each would be on a small page of its own."""
    if device.type != "cpu":
        return tuple(torch.empty(size, dtype=dtype, device=device) for _ in range(count))
    each = math.prod(size) * dtype.itemsize
    apart = -(-each // _CACHE_LINE) * _CACHE_LINE
    try:
        memory = large_block(count * apart)
    except OSError as error:
        wanted = _readable(count * apart)
        raise ConfigError("kv_cache_memory", f"the system does not give {wanted}: {error.strerror}") from error
    return tuple(memory[at : at + each].view(dtype).view(size) for at in range(0, count * apart, apart))


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the memory goes, for the operator to read at start.

    Attributes:
        weight_bytes: what the model's parameters take.
        weight_forms: how they are kept, in words.
        kv_bytes: what the KV cache takes once all of it is used.
        kv_dtype: what it is kept in, as its name in torch.
        max_model_len: most tokens of one request.
    """

    weight_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_dtype: str
    weight_forms: str = ""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, of all sequences together."""
        return self.num_blocks * self.block_size

    @property
    def longest_request(self) -> int:
        """Most tokens of one request: what the context allows and the cache holds."""
        return min(self.max_model_len, self.kv_tokens)

    def lines(self) -> tuple[str, ...]:
        """The report, a line each."""
        holds = f"{self.num_blocks} blocks, {self.kv_tokens} tokens in all, {self.kv_dtype}"
        forms = f": {self.weight_forms}" if self.weight_forms else ""
        return (
            f"weights          {_readable(self.weight_bytes)}{forms}",
            f"KV cache         {_readable(self.kv_bytes)}: {holds}",
            f"longest request  {self.longest_request} tokens, prompt and output together",
        )


def _readable(count: int) -> str:
    """A number of bytes, in the largest binary unit of which there is one."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
