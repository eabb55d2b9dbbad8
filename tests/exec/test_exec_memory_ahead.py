"""Memory for blocks is obtained ahead of their use, and no more of it than will be used soon."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from pathlib import Path

import pytest
import torch

from penstock.exec import memory_ahead as module
from penstock.exec.memory_ahead import MemoryAhead
from penstock.kernels.weight_memory import LARGE_PAGE, large_block

BLOCKS, BLOCK_BYTES = 64, LARGE_PAGE // 8
PATIENCE = 30.0


def can_populate() -> bool:
    """Whether this system knows MADV_POPULATE_WRITE: Linux 5.14 and later."""
    if sys.platform != "linux":
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return module._populate(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE)


pytestmark = pytest.mark.skipif(not can_populate(), reason="MADV_POPULATE_WRITE is of Linux 5.14 and later")


def cache() -> torch.Tensor:
    return large_block(BLOCKS * BLOCK_BYTES).view(BLOCKS, BLOCK_BYTES)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that have memory, as /proc/self/pagemap says."""
    first, count = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = pages.read(8 * count)
    return mmap.PAGESIZE * sum(entries[at + 7] >> 7 for at in range(0, len(entries), 8))


def settle(ahead: MemoryAhead) -> None:
    last = time.monotonic() + PATIENCE
    while ahead._working:
        assert time.monotonic() < last
        time.sleep(0.005)


def test_a_page_more_than_is_in_use_is_found_in_every_cache_and_nothing_is_changed():
    caches = [cache(), cache()]
    ahead = MemoryAhead(caches)
    caches[0][0] = 7
    ahead.reach((0, 2))
    settle(ahead)
    for each in caches:
        assert 3 * BLOCK_BYTES + LARGE_PAGE <= resident(each) <= 3 * BLOCK_BYTES + 2 * LARGE_PAGE
    assert caches[0][0].eq(7).all()
    assert not caches[0][1:].any()
    before = [resident(each) for each in caches]
    ahead.reach((3,))
    settle(ahead)
    assert [resident(each) for each in caches] == before, "there is enough of it"


def test_who_waits_for_it_waits_without_pauses(monkeypatch):
    monkeypatch.setattr(module, "_REST_SECONDS", PATIENCE)
    caches = [cache(), cache()]
    ahead = MemoryAhead(caches)
    ahead.settle()  # nothing is asked for
    ahead.reach((0, 2))
    began = time.monotonic()
    ahead.settle()
    assert not ahead._working
    assert time.monotonic() - began < PATIENCE / 2
    assert all(resident(each) >= 3 * BLOCK_BYTES + LARGE_PAGE for each in caches)


def test_all_of_it_is_found_when_the_last_block_is_near():
    one = cache()
    ahead = MemoryAhead([one])
    for block in range(0, BLOCKS, 5):
        ahead.reach((block,))
        settle(ahead)
    assert resident(one) == one.nbytes
    ahead.reach((BLOCKS - 1,))
    assert not ahead._working


def test_a_system_that_refuses_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_populate", lambda *given: asked.append(given))
    ahead = MemoryAhead([cache()])
    ahead.reach((1,))
    settle(ahead)
    ahead.reach((BLOCKS - 1,))
    settle(ahead)
    assert len(asked) == 1


def test_a_model_without_caches_starts_no_thread(monkeypatch):
    monkeypatch.setattr(module.threading, "Thread", None)
    MemoryAhead([]).reach((0,))
