"""Writing behind: a block that was handed out again is never written, and a failing disk stops nothing."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from store_harness import BYTES, body_of, fill, open_store, save_of

from penstock.store import BlockWriter, DiskBudget, Shelf, StatefulPrefixes, default_bytes, folders
from penstock.store import budget as budget_module
from penstock.store.folders import block_files

PLENTY = GIB = 1 << 30


@pytest.fixture
def disk(monkeypatch, tmp_path):
    """Sets the disk's size and its free space, which then changes as stores on it gain or lose files."""

    def say(free: int, total: int):
        said = SimpleNamespace(bytes=free)
        held = sum(folder.size()[1] for folder in folders(tmp_path))

        def usage(_):
            return SimpleNamespace(
                free=said.bytes + held - sum(folder.size()[1] for folder in folders(tmp_path)), total=total
            )

        monkeypatch.setattr(budget_module.shutil, "disk_usage", usage)
        return said

    return say


class Memory:
    """Blocks that hold what was last written to them; `slow` copies them piece by piece."""

    def __init__(self, blocks: int, *, slow: bool = False) -> None:
        self.blocks = [bytearray(BYTES) for _ in range(blocks)]
        self.slow = slow
        self.gate = threading.Event()
        self.gate.set()

    def put(self, block: int, content: bytes) -> None:
        self.blocks[block][:] = content

    def copy(self, block: int, content: memoryview) -> None:
        self.gate.wait()
        if not self.slow:
            content[:] = self.blocks[block]
            return
        for start in range(0, BYTES, 1000):
            content[start : start + 1000] = self.blocks[block][start : start + 1000]
            time.sleep(0)


@pytest.fixture
def made(request):
    """Makes writers, and ends them."""
    writers = []

    def make(store, memory, most=PLENTY, **options):
        budget = DiskBudget(store.folder.path.parent, most)
        writers.append(BlockWriter([Shelf(store, memory.copy)], budget, **options))
        return writers[-1]

    yield make
    for each in writers:
        each.close()


def test_what_is_offered_is_written(tmp_path, made):
    store, memory = open_store(tmp_path), Memory(4)
    writer = made(store, memory)
    for block in range(4):
        memory.put(block, body_of(block))
    writer.offer([save_of(block) for block in range(4)])
    assert writer.settle(10)
    assert all(store.read(save_of(block).key) == body_of(block) for block in range(4))
    assert writer.counts.written == 4
    assert writer.counts.bytes == 4 * store.folder.form.file_bytes


def test_what_is_taken_back_in_time_is_dropped(tmp_path, made):
    store, memory = open_store(tmp_path), Memory(4)
    writer = made(store, memory)
    memory.gate.clear()
    writer.offer([save_of(block) for block in range(4)])
    while writer._copied != (0, 0):
        time.sleep(0.001)
    writer.take_back([0, 2])  # one is being copied, the other waits
    memory.gate.set()
    assert writer.settle(10)
    assert [store.has(save_of(block).key) for block in range(4)] == [False, True, False, True]
    assert (writer.counts.dropped, writer.counts.failed) == (1, 1)


def test_a_memory_that_changes_all_the_time_is_never_saved_wrong(tmp_path, made):
    """Blocks are handed out again while they are copied; whatever is found is what its key says."""
    store, memory, rng = open_store(tmp_path), Memory(12, slow=True), random.Random(3)
    writer = made(store, memory)
    number = 0
    for _ in range(2000):
        block = rng.randrange(12)
        writer.take_back([block])
        memory.put(block, body_of(number))
        of = save_of(number)
        writer.offer([replace(of, block=block)])
        number += 1
        if number % 200 == 0:
            assert writer.settle(20)
    assert writer.settle(20)
    found = [(n, bytes(content)) for n in range(number) if (content := store.read(save_of(n).key)) is not None]
    assert all(content == body_of(n) for n, content in found)
    counts = writer.counts
    assert len(found) == counts.written > 12
    assert counts.dropped > 0
    assert counts.written + counts.dropped + counts.failed == number
    assert counts.damaged == 0


def test_while_steps_run_little_is_written_and_then_the_rest(tmp_path, made):
    store, memory = open_store(tmp_path), Memory(40)
    writer = made(store, memory)
    writer.step_begins()
    writer.offer([save_of(block) for block in range(40)])
    assert not writer.settle(0.2)
    assert writer.counts.written < 30
    writer.step_ends()
    assert writer.settle(10)
    assert writer.counts.written == 40


def test_a_writer_that_hardly_gets_a_processor_goes_on_all_the_same(tmp_path, made):
    """It rests for as long as it worked, not for as long as it waited."""

    class Waiting(Memory):
        def copy(self, block, content):
            time.sleep(0.02)
            super().copy(block, content)

    store = open_store(tmp_path)
    writer = made(store, Waiting(40))
    writer.step_begins()
    writer.offer([save_of(block) for block in range(40)])
    assert writer.settle(30), "with a rest of a second after each it takes 40"


def test_a_full_disk_is_counted_and_left_alone_for_a_while(tmp_path, made, monkeypatch):
    store, memory = open_store(tmp_path), Memory(4)
    tries = []

    def full(*_):
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = made(store, memory, rest_seconds=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        writer.offer([save_of(block) for block in range(3)])
        assert writer.settle(10)
    assert len(tries) == 1
    assert writer.counts.failed == 3
    time.sleep(0.25)
    writer.offer([save_of(3)])
    assert writer.settle(10)
    assert store.has(save_of(3).key)


def test_shelves_are_apart(tmp_path):
    """A block and a state may have the same number and the same key."""
    stores = [open_store(tmp_path), open_store(tmp_path, block_bytes=2 * BYTES, holds="states")]
    bodies = [body_of(1), body_of(2, 2 * BYTES)]

    def copies(body):
        def copy(_, content):
            content[:] = body

        return copy

    shelves = [Shelf(store, copies(body)) for store, body in zip(stores, bodies, strict=True)]
    writer = BlockWriter(shelves, DiskBudget(tmp_path, PLENTY))
    writer.step_begins()
    time.sleep(0.01)
    for shelf in (0, 1):
        writer.offer([save_of(1)], shelf)
    writer.take_back([7], 1)
    writer.step_ends()
    assert writer.settle(10)
    assert [store.read(save_of(1).key) for store in stores] == bodies
    assert writer.counts.written == 2
    writer.close()


def test_a_prefix_with_state_ends_behind_the_last_block_that_has_one(tmp_path):
    blocks, states = open_store(tmp_path), open_store(tmp_path, holds="states")
    fill(blocks, range(5))
    prefixes, keys = StatefulPrefixes(blocks, states), [save_of(number).key for number in range(7)]
    assert prefixes.leading(keys) == 0
    fill(states, range(3))
    assert prefixes.leading(keys) == 3
    fill(states, range(6, 7))
    assert prefixes.leading(keys) == 3, "its block is not there"
    blocks.remove(keys[1])
    assert prefixes.leading(keys) == 1


def test_the_budget_keeps_what_was_used_last(tmp_path):
    store = open_store(tmp_path)
    fill(store, range(10))
    for age in range(10):
        os.utime(store._file(save_of(age).key), (1000 + age, 1000 + age))
    assert store.read(save_of(0).key) == body_of(0)  # the oldest was used just now
    budget = DiskBudget(tmp_path, 6 * store.folder.form.file_bytes)
    budget.look()
    left = [number for number in range(10) if store.has(save_of(number).key)]
    assert left == [0, 6, 7, 8, 9]
    assert budget.evicted == 5
    assert budget.taken == 5 * store.folder.form.file_bytes


def test_two_writers_share_a_budget(tmp_path, made):
    """Each sees what the other wrote when it looks; the sum stays near the budget."""
    stores = [open_store(tmp_path), open_store(tmp_path, isa="other")]
    length = stores[0].folder.form.file_bytes
    for number in range(400):
        if number % 100 == 0:
            budgets = [DiskBudget(tmp_path, 64 * length) for _ in stores]
        for store, budget in zip(stores, budgets, strict=True):
            budget.wrote(store.write(save_of(number), body_of(number)))
        taken = sum(len(list(block_files(store.folder.path))) for store in stores)
        assert taken <= 64 + 2 * 64 // 32 + 2


def test_what_a_killed_process_left_open_goes_when_it_is_old(tmp_path):
    store = open_store(tmp_path)
    left = store.folder.path / "tmp" / "1-2-3"
    left.write_bytes(b"half")
    DiskBudget(tmp_path, PLENTY).look()
    assert left.exists()
    os.utime(left, (1000, 1000))
    DiskBudget(tmp_path, PLENTY).look()
    assert not left.exists()


def test_the_default_is_a_tenth_of_what_is_free_and_what_is_held_counts_as_free(tmp_path, disk):
    fill(open_store(tmp_path), range(3))
    held = sum(folder.size()[1] for folder in folders(tmp_path))
    disk(free=GIB, total=2 * GIB)
    assert default_bytes(tmp_path) == (GIB + held) // 10
    assert default_bytes(tmp_path / "not" / "there") == GIB // 10
    disk(free=1000 * GIB, total=2000 * GIB)
    assert default_bytes(tmp_path) == 16 * GIB


def test_a_store_gives_way_where_others_need_the_disk(tmp_path, disk):
    store = open_store(tmp_path)
    fill(store, range(10))
    for age in range(10):
        os.utime(store._file(save_of(age).key), (1000 + age, 1000 + age))
    length = store.folder.form.file_bytes
    free = disk(free=GIB, total=10 * GIB)
    budget = DiskBudget(tmp_path, PLENTY)
    budget.make_room(length)
    assert budget.evicted == 0
    free.bytes = GIB // 2 - 4 * length  # a twentieth of the disk is left to others, and lacks four files' room
    budget.make_room(length)
    left = [number for number in range(10) if store.has(save_of(number).key)]
    assert left == [5, 6, 7, 8, 9]
    free.bytes = 0
    with pytest.raises(OSError, match="left to others"):
        budget.make_room(length)
    assert not list(block_files(store.folder.path))


def test_a_disk_without_room_is_counted_and_said_once(tmp_path, made, disk, caplog):
    store, memory = open_store(tmp_path), Memory(4)
    free = disk(free=0, total=10 * GIB)
    writer = made(store, memory, rest_seconds=0.0)
    writer.offer([save_of(block) for block in range(3)])
    assert writer.settle(10)
    assert writer.counts.failed == 3
    assert not list(block_files(store.folder.path))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    free.bytes = GIB
    writer.offer([save_of(3)])
    assert writer.settle(10)
    assert writer.counts.written == 1
