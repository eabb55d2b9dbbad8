"""Saving and reading blocks of a real KV memory: what was written comes back, in another runner too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from test_exec_runner import BACKEND, CACHES, CPU, SHAPE, Ticks, ToyLM

from needs import COMPILED
from penstock.contract.model import KvCacheSpec
from penstock.contract.plan import Admit, Row, Save, StepPlan
from penstock.contract.sampling import SamplingSpec
from penstock.exec.block_keeping import BlockKeeping
from penstock.exec.kv_store import KVStore, block_bytes
from penstock.exec.runner import TorchRunner
from penstock.kernels import native
from penstock.store import BlockStore, open_folder

SIZE = 4
PROMPT = tuple(random.Random(5).randrange(97) for _ in range(19))
GREEDY = SamplingSpec((("logprobs", 0), ("temperature", 0)))


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize(
    ("dtype", "packed"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False), (torch.int8, True)],
)
@pytest.mark.parametrize("latent", [False, True])
def test_a_block_is_its_bytes(dtype, packed, latent):
    caches = (KvCacheSpec(2, 64), KvCacheSpec(1, 96, 64) if latent else KvCacheSpec(3, 32), KvCacheSpec(2, 64))
    stores = [KVStore(caches, 5, 16, dtype, CPU, packed=packed) for _ in range(2)]
    one, two = stores
    assert one.block_bytes == block_bytes(caches, 16, dtype)
    for cache in (*one.keys, *one.values):
        cache.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    two.fill_with_nan()
    two.fill_block(3, memoryview(one.block_content(1)))
    assert two.block_content(3) == one.block_content(1)
    for mine, other in zip((*one.keys, *one.values), (*two.keys, *two.values), strict=True):
        assert torch.equal(mine[1].view(torch.uint8), other[3].view(torch.uint8))
    assert set(two.block_content(2)) == {0xFF}


def keeping_in(root: Path, kv: KVStore) -> BlockKeeping:
    return BlockKeeping(kv, BlockStore(open_folder(root, {"model": "toy"}, SIZE, kv.block_bytes)), 1 << 30)


class Driver:
    """A runner with a store, and the plans that it gets."""

    def __init__(self, root: Path, num_blocks: int = 12) -> None:
        self.kv = KVStore(CACHES, num_blocks, SIZE, torch.float32, CPU)
        self.kv.fill_with_nan()
        self.keeping = keeping_in(root, self.kv)
        self.runner = TorchRunner(ToyLM(), self.kv, 2, SHAPE.max_positions, Ticks(), BACKEND, keeping=self.keeping)
        self.step = 0
        self.results = []

    def run(self, *rows, admits=(), saves=(), releases=()):
        result = self.runner.run(StepPlan(self.step, tuple(releases), tuple(admits), rows, saves=tuple(saves)))
        self.step += 1
        self.results.append(result)
        return result

    def close(self) -> None:
        self.runner.close()


def admit(blocks, computed: int = 0) -> Admit:
    return Admit(0, "s", PROMPT, tuple(blocks), computed, GREEDY, 0)


def saves(blocks) -> list[Save]:
    keys = [bytes([number]) * 32 for number in range(len(blocks) + 1)]
    tokens = [PROMPT[at * SIZE : (at + 1) * SIZE] for at in range(len(blocks))]
    return [Save(block, keys[n + 1], keys[n], n, tokens[n]) for n, block in enumerate(blocks)]


def after_a_first(root: Path):
    """The first token of the prompt, and its four full blocks saved."""
    first = Driver(root)
    token = first.run(Row(0, 0, 19, (), True), admits=[admit((7, 3, 9, 1, 5))]).rows[0].tokens[0].id
    first.run(saves=saves((7, 3, 9, 1)))
    assert first.keeping.settle(10)
    assert first.run().store.written == 4
    assert first.run().store is None, "nothing has changed"
    first.close()
    return token


def keys() -> tuple[bytes, ...]:
    return tuple(save.key for save in saves((0, 1, 2, 3)))


def test_another_runner_goes_on_from_what_was_saved(tmp_path):
    token = after_a_first(tmp_path)
    second = Driver(tmp_path)
    read = second.run(Row(0, 0, 16, (), False, stored=keys()), admits=[admit((2, 4, 6, 8, 10))])
    assert read.rows == ()
    assert 0 < read.restoring <= read.seconds
    assert second.run(Row(0, 16, 3, (), True)).rows[0].tokens[0].id == token
    second.close()


@pytest.mark.parametrize("gone", range(4))
def test_what_is_damaged_is_computed(tmp_path, gone):
    token = after_a_first(tmp_path)
    second = Driver(tmp_path)
    path = Path(second.keeping._store._file(keys()[gone]))
    content = bytearray(path.read_bytes())
    content[-1 - gone] ^= 1
    path.write_bytes(content)
    read = second.run(Row(0, 0, 16, (), False, stored=keys()), admits=[admit((2, 4, 6, 8, 10))])
    assert [row.restored for row in read.rows] == [gone]
    assert read.store.damaged == 1
    assert second.run(Row(0, 4 * gone, 19 - 4 * gone, (), True)).rows[0].tokens[0].id == token
    second.close()


def test_a_block_that_is_handed_out_again_is_not_saved_as_it_was(tmp_path):
    """Whatever the writer does and when: a file holds what its key says, or there is none."""
    first = Driver(tmp_path)
    first.run(Row(0, 0, 19, (), True), admits=[admit((7, 3, 9, 1, 5))])
    right = [first.kv.block_content(block) for block in (7, 3, 9, 1)]
    other = Admit(1, "t", PROMPT[::-1], (7, 3, 9, 1, 5), 0, GREEDY, 0)
    first.run(Row(1, 0, 19, (), True), admits=[other], saves=saves((7, 3, 9, 1)), releases=[0])
    assert first.keeping.settle(10)
    store = first.keeping._store
    for key, content in zip(keys(), right, strict=True):
        found = store.read(key)
        assert found is None or found == content
    counts = first.keeping.end() or first.results[-1].store
    assert counts.written + counts.dropped + counts.failed == 4
    first.close()


def test_warming_up_saves_nothing_and_takes_nothing_back(tmp_path):
    first = Driver(tmp_path)
    first.run(Row(0, 0, 19, (), True), admits=[admit((0, 3, 9, 1, 5))])
    first.keeping.begin(StepPlan(0, (), (), (), saves=tuple(saves((0, 3)))))
    first.runner.warm_up()
    assert first.keeping.settle(10)
    assert first.keeping.end().dropped == 0
    first.close()
