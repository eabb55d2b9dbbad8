"""The KV store: what fits a budget, what is reported, and that a borrowed block comes back whole."""

from __future__ import annotations

import pytest
import torch

from needs import COMPILED
from penstock.contract.errors import ConfigError
from penstock.contract.memory import MemoryReport
from penstock.contract.model import KvCacheSpec
from penstock.exec.device import open_backend
from penstock.exec.kv_store import KVStore, block_bytes, blocks_for, resolve_kv_dtype
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.torch_backend import TorchBackend

SPECS = (KvCacheSpec(heads=3, head_dim=64),) * 30
UNLIKE = (KvCacheSpec(1, 30), KvCacheSpec(4, 64), KvCacheSpec(2, 100, window=7))


def test_a_block_costs_what_its_tensors_take():
    for specs in (SPECS, UNLIKE):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            for packed in (False, True):
                store = KVStore(specs, 2, 16, dtype, torch.device("cpu"), packed=packed)
                taken = sum(cache.nbytes for cache in (*store.keys, *store.values))
                assert taken == 2 * block_bytes(specs, 16, dtype)
    assert KVStore(SPECS, 2, 16, torch.float32, torch.device("cpu")).keys[29].shape == (2, 16, 3, 64)
    assert block_bytes(SPECS, 1, torch.bfloat16) == 30 * 2 * 192 * 2
    assert block_bytes(SPECS, 16, torch.int8) == 16 * 30 * 2 * 3 * (64 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("packed", [False, True])
def test_caches_of_different_heads_lie_side_by_side_and_do_not_overlap(dtype, packed):
    store = KVStore(UNLIKE, 3, 16, dtype, torch.device("cpu"), packed=packed)
    caches = (*store.keys, *store.values)
    for index, cache in enumerate(caches):
        cache.fill_(index)
    for index, cache in enumerate(caches):
        assert bool((cache == index).all())
        assert cache.is_contiguous()
        assert cache.data_ptr() % 64 == 0
        assert len(cache) == 3
    if dtype != torch.int8 and not packed:
        assert [cache.shape[2:] for cache in store.values] == [(1, 30), (4, 64), (2, 100)]


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_int8_is_there_on_a_cpu_only():
    cuda = open_backend(torch.device("cuda"), 1)
    for dtype in (torch.float32, torch.bfloat16):
        assert resolve_kv_dtype("int8", dtype, CpuBackend()) == torch.int8
    assert resolve_kv_dtype("auto", torch.float16, cuda) == torch.float16
    with pytest.raises(ConfigError, match="here the model runs on CUDA") as refused:
        resolve_kv_dtype("int8", torch.bfloat16, cuda)
    assert refused.value.option == "kv_cache_dtype"


def test_int8_is_refused_where_heads_are_too_wide_for_the_attention_that_reads_it():
    wide = (KvCacheSpec(2, 64), KvCacheSpec(1, 640))
    assert KVStore(wide, 1, 16, torch.float32, torch.device("cpu")).keys[1].shape == (1, 16, 1, 640)
    with pytest.raises(ConfigError, match="heads of at most 512, and these have 640") as refused:
        KVStore(wide, 1, 16, torch.int8, torch.device("cpu"))
    assert refused.value.option == "kv_cache_dtype"


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_cache_is_packed_where_the_compiled_attention_is_quicker_with_it():
    backend = CpuBackend()
    for dtype in (torch.float32, torch.bfloat16):
        assert backend.packs_kv(dtype, 64, 16)
        assert not backend.packs_kv(dtype, 64, 8)
        assert not TorchBackend().packs_kv(dtype, 64, 16)
        for head_dim in (63, 640):
            assert not backend.packs_kv(dtype, head_dim, 16)
    assert not backend.packs_kv(torch.int8, 64, 16)  # which is packed by itself


def test_int8_without_compiled_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(native, "module", None)
    with pytest.raises(ConfigError, match="without compiled kernels") as refused:
        resolve_kv_dtype("int8", torch.bfloat16, open_backend(torch.device("cpu"), 1))
    assert refused.value.option == "kv_cache_dtype"


def test_a_store_can_be_filled_with_nan():
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        store = KVStore(SPECS, 1, 16, dtype, torch.device("cpu"))
        store.fill_with_nan()
        for cache in (*store.keys, *store.values):
            assert (cache if dtype != torch.int8 else cache.view(torch.float32)).isnan().all()


def test_a_packed_cache_takes_as_much_and_blocks_come_first():
    store = KVStore(SPECS, 2, 16, torch.bfloat16, torch.device("cpu"), packed=True)
    assert store.keys[3].shape == (2, 3, 32, 16, 2)
    assert store.values[3].shape == (2, 3, 8, 64, 2)
    assert store.keys[3].nbytes + store.values[3].nbytes == 2 * block_bytes(SPECS, 16, torch.bfloat16) // len(SPECS)
    with store.borrowed_block(1):
        before = store.keys[3][0].view(torch.int16).clone()
        store.keys[3][1] = 7.0
    assert torch.equal(store.keys[3][0].view(torch.int16), before)


def test_a_budget_pays_for_whole_blocks():
    each = block_bytes(SPECS, 16, torch.bfloat16)
    assert blocks_for(each, each, 16) == 1
    assert blocks_for(10 * each - 1, each, 16) == 9


def test_a_budget_below_one_block_is_refused_by_option():
    with pytest.raises(ConfigError) as refused:
        blocks_for(block_bytes(SPECS, 16, torch.float32) - 1, block_bytes(SPECS, 16, torch.float32), 16)
    assert refused.value.option == "kv_cache_memory"


def test_the_report_says_where_the_memory_goes():
    report = MemoryReport(98 * 2**20, 3 * 2**30, num_blocks=100, block_size=16, max_model_len=1200, kv_dtype="int8")
    assert report.kv_tokens == 1600
    text = "\n".join(report.lines())
    for part in ("98.0 MiB", "3.0 GiB", "100 blocks", "1600 tokens in all, int8", "1200 tokens, prompt and output"):
        assert part in text
    assert MemoryReport(0, 1500, 1, 1, 1, "float32").lines()[0] == "weights          0 bytes"
    assert MemoryReport(0, 1500, 1, 1, 1, "float32", "int8").lines()[0] == "weights          0 bytes: int8"
    assert "1.5 KiB" in MemoryReport(0, 1500, 1, 1, 1, "float32").lines()[1]


def test_a_borrowed_block_comes_back_whole_even_after_an_error():
    store = KVStore((KvCacheSpec(1, 4), KvCacheSpec(2, 6)), 3, 2, torch.float32, torch.device("cpu"))
    for index, cache in enumerate((*store.keys, *store.values)):
        cache.fill_(index)

    def spoil_and_fail():
        with store.borrowed_block(1):
            for cache in (*store.keys, *store.values):
                cache[1] = -1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        spoil_and_fail()
    for index, cache in enumerate((*store.keys, *store.values)):
        assert bool((cache == index).all())


def test_memory_that_the_system_does_not_give_is_refused_by_option():
    blocks = 2**62 // block_bytes(SPECS, 16, torch.bfloat16)
    with pytest.raises(ConfigError, match="the system does not give") as refused:
        KVStore(SPECS, blocks, 16, torch.bfloat16, torch.device("cpu"))
    assert refused.value.option == "kv_cache_memory"
