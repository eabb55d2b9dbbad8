"""Attention of decode steps over a paged KV cache: bytes of keys and values read a second.

    python bench/attention.py --streams 32 --context 1000 --threads 2

One layer at a time over as many layers' caches as the model has, so that nothing stays in the processor's caches.
Blocks are scattered at random, as a long-running pool's are. The shape is that of the default model.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from penstock.contract.model import ModelShape
from penstock.exec.kv_store import KVStore, block_bytes
from penstock.kernels import native
from penstock.kernels.native_attention import paged_attention

SHAPE = ModelShape(30, 576, 9, 3, 64, 49152, 8192)
BLOCK_SIZE = 16


def seconds_a_step(streams: int, context: int, dtype: torch.dtype, rounds: int) -> list[float]:
    """Times of `rounds` decode steps' attention, all layers, of so many streams of one length."""
    each = -(-context // BLOCK_SIZE)
    kv = KVStore(SHAPE, streams * each, BLOCK_SIZE, dtype, torch.device("cpu"), packed=True)
    for cache in (*kv.keys, *kv.values):
        cache.fill_(0)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(streams * each, generator=generator).int().view(streams, each)
    q = torch.randn(streams, SHAPE.num_heads, SHAPE.head_dim, generator=generator).bfloat16()
    starts, lengths = torch.arange(streams + 1, dtype=torch.int32), torch.full((streams,), context, dtype=torch.int32)
    times = []
    for _ in range(rounds + 1):  # the first finds the memory
        began = time.perf_counter()
        for keys, values in zip(kv.keys, kv.values, strict=True):
            paged_attention(q, keys, values, starts, lengths, table, SHAPE.head_dim**-0.5)
        times.append(time.perf_counter() - began)
    return times[1:]


def main() -> None:
    """Measure as asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    native.set_threads(options.threads)
    torch.set_num_threads(1)
    print(f"{options.streams} streams of {options.context} tokens, {options.threads} threads, {native.isa()}")
    print("KV           read     best ms   median ms   best GB/s")
    for name, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8)):
        times = seconds_a_step(options.streams, options.context, dtype, options.rounds)
        read = options.streams * options.context * block_bytes(SHAPE, BLOCK_SIZE, dtype) / BLOCK_SIZE
        best, median = min(times), statistics.median(times)
        print(f"{name:9} {read / 1e6:6.1f} MB {best * 1e3:9.1f} {median * 1e3:11.1f} {read / best / 1e9:11.1f}")


if __name__ == "__main__":
    main()
