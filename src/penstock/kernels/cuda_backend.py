"""The backend `cuda`: torch's products in pieces of rows, and Triton kernels for most operations between them.

Operations without a kernel go to the references, as in `torch_backend`. Attention of latent caches and of heads wider
than `triton_attention.MAX_HEAD_DIM` goes to torch's memory-efficient kernel (`cuda_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from penstock.kernels import triton_attention, triton_rows
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.step_cache import StepCache
from penstock.kernels.torch_backend import TorchBackend
from penstock.kernels.triton_attention import Tiles

__all__ = ["CudaBackend"]


@dataclass(frozen=True, slots=True)
class CudaBackend(TorchBackend):
    """A `Backend` of Triton kernels on one CUDA device."""

    name: str = "cuda"
    _tiles: StepCache[Tiles] = field(default_factory=StepCache, repr=False, compare=False)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend.rms_norm`."""
        return triton_rows.rms_norm(x, weight, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """See `Backend.activate`."""
        if activation not in triton_rows.ACTIVATIONS:
            return TorchBackend.activate(self, x, activation)
        return triton_rows.activate(x, activation)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Backend.rotate`; in place."""
        return triton_rows.rotate(x, cos, sin)

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
        """See `Backend.write_kv`; a token with a negative slot is not stored."""
        if v_cache.is_contiguous():
            triton_rows.write_kv(k_cache, v_cache, k, v, write_slots)
        else:  # a latent cache's values are part of its keys
            TorchBackend.write_kv(self, k_cache, v_cache, k, v, write_slots)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_start: Tensor,
        kv_len: Tensor,
        block_table: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.paged_attention`."""
        kv_heads = k_cache.shape[2]
        groups = q.shape[1] // kv_heads
        if triton_attention.why_not(q.shape[2], groups, latent=not v_cache.is_contiguous()):
            return TorchBackend.paged_attention(self, q, k_cache, v_cache, q_start, kv_len, block_table, spec, sinks)
        make = partial(triton_attention.tiles_of, q_start, kv_len, block_table, groups, kv_heads)
        tiles = self._tiles.get(block_table, (groups, kv_heads), make)
        return self.attend_tiles(q, k_cache, v_cache, tiles, spec, sinks)

    def attend_tiles(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tiles: Tiles,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `triton_attention.attend_tiles`."""
        return triton_attention.attend_tiles(q, k_cache, v_cache, tiles, spec, sinks)
