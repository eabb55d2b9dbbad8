"""The machine's limits and the timing of kernels: what is counted, and that every case runs."""

from __future__ import annotations

from dataclasses import replace

import compiled_kernels as here
import pytest
import torch

from needs import COMPILED
from penstock.bench import kernel_attention, kernel_products, kernels
from penstock.bench.limits import Limits, share_text, shares
from penstock.cli import bench_kernels
from penstock.contract.model import StepCost
from penstock.kernels import native, native_peak
from penstock.kernels.weight_memory import WeightMemory

compiled = pytest.mark.skipif(not native.available(), reason=COMPILED)
LIMITS = Limits("isa", 2, read_bytes=100.0, fp32_ops=10.0, bf16_ops=20.0, int8_ops=40.0)
LANES = 16


@pytest.fixture
def one_thread():
    here.reset()
    yield
    here.reset()


@compiled
@pytest.mark.parametrize("isa", native.isas())
def test_operations_are_counted_for_every_thread_and_instruction_set(one_thread, isa):
    here.set_isa(isa)
    wide = isa.startswith("avx512")
    rows, panels = (6, 2) if wide else (4, 1)
    pairs = {
        "avx512_amx": 4 * 16 * LANES * 32 * 2,  # four products of tiles, each of 16 rows and 32 inputs
        "avx512_bf16": LANES * panels * rows * 4,  # pairs are instructions
    }.get(isa, LANES * panels * rows * 2)
    code_rows = 3 if isa == "avx2" else rows
    for arithmetic, expected in (
        ("fp32", LANES * panels * rows * 2),
        ("bf16", pairs),
        ("int8", LANES * panels * code_rows * 8),
    ):
        assert here.compute(arithmetic, 10) == 10 * expected
    here.set_threads(2)
    assert here.compute("fp32", 10) == 2 * 10 * LANES * panels * rows * 2


@compiled
def test_more_rounds_take_longer_so_none_was_optimised_away(one_thread):
    for isa in native.isas():
        here.set_isa(isa)
        for arithmetic in native_peak.ARITHMETIC:
            few, many = (
                kernels.shortest_seconds(lambda a=arithmetic, r=rounds: here.compute(a, r), spent=0.01)
                for rounds in (1_000, 10_000)
            )
            assert many > 3 * few, (isa, arithmetic)


@compiled
def test_memory_of_any_length_is_read_and_odd_places_are_refused(one_thread):
    memory = WeightMemory().take(1 << 20)
    for count in (64, 65, 4096 * 64 + 192, 1 << 20):
        here.read(memory[:count])
    with pytest.raises(ValueError, match="64 bytes"):
        here.read(memory[1:])
    with pytest.raises(ValueError, match="contiguous"):
        here.read(memory[::2])
    with pytest.raises(ValueError, match="rounds"):
        here.compute("fp32", 0)


@compiled
def test_limits_are_measured_with_what_is_in_use(one_thread):
    limits = kernels.measure_limits(here.backend(), rounds=1000, memory_bytes=1 << 20)
    assert (limits.isa, limits.threads) == (here.isa(), 1)
    assert min(limits.read_bytes, limits.fp32_ops, limits.bf16_ops, limits.int8_ops) > 1e6


@compiled
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_every_case_runs_and_counts_what_it_moves(one_thread, monkeypatch, name):
    monkeypatch.setattr(kernel_products, "COLD_BYTES", 1)
    monkeypatch.setattr(kernels, "LAYERS", 2)
    monkeypatch.setattr(kernel_products, "LINEAR_SHAPES", ((64, 96), (256, 64)))
    monkeypatch.setattr(kernel_products, "VOCABULARY", 640)
    monkeypatch.setattr(kernels, "VOCABULARY", 640)
    monkeypatch.setattr(kernels, "best_seconds", lambda call: call() is not None or 1.0)
    rows = list(kernels.kernel_rows(here.backend(), [name], lambda line: None))
    assert rows
    assert all(row["bytes"] > 0 and (row["ops"] > 0) == bool(row["arithmetic"]) for row in rows)
    assert len({(row["kernel"], row["form"], row["rows"]) for row in rows}) == len(rows)


@compiled
@pytest.mark.parametrize("name", ["linear", "residual", "gated"])
def test_block_forms_are_timed_where_rows_are_whole_blocks(one_thread, monkeypatch, name):
    monkeypatch.setattr(kernel_products, "COLD_BYTES", 1)
    monkeypatch.setattr(kernel_products, "LINEAR_SHAPES", ((64, 96), (512, 64)))
    cases = {case.form: case for case in kernels.KERNELS[name](here.backend())}
    assert {form for form in cases if form.startswith(("q4k", "q6k"))} == {"q4k 512->64", "q6k 512->64"}
    for form, bits in (("q4k 512->64", 4.625), ("q6k 512->64", 6.625)):
        assert cases[form].bytes == 512 * 64 * bits / 8
        assert cases[form].arithmetic == "int8"
        assert cases[form].call().isfinite().all()


@compiled
def test_every_compiled_kernel_that_a_model_is_made_of_has_its_rows(one_thread, monkeypatch):
    monkeypatch.setattr(kernel_products, "COLD_BYTES", 1)
    monkeypatch.setattr(kernel_products, "LINEAR_SHAPES", ((64, 96),))
    monkeypatch.setattr(kernel_products, "VOCABULARY", 640)
    names = [name for name in kernels.KERNELS if name not in ("decoder", "sampler")]
    timed = {case.kernel for name in names for case in kernels.KERNELS[name](here.backend())}
    products = {"linear", "linear, residual", "linear, gated", "lookup"}
    rowwise = {"rms_norm", "layer_norm", "silu_and_mul", "gelu_new", "rope and KV write"}
    assert timed == products | rowwise | {"attention", "attention, int8"}


@compiled
def test_an_int8_cache_of_random_keys_attends_nearly_as_the_same_in_bfloat16(one_thread):
    found = []
    q = torch.randn(
        2, kernel_attention.Q_HEADS, kernel_attention.HEAD_DIM, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    for dtype in (torch.bfloat16, torch.int8):
        torch.manual_seed(0)
        cache = kernel_attention.FilledCache.of(here.backend(), sequences=2, new_tokens=1, dtype=dtype)
        assert cache.values.dtype == dtype
        found.append(kernel_attention.attend(here.backend(), q, cache).float())
    assert (found[0] - found[1]).abs().max() < 0.05
    assert found[0].abs().max() > 0.05


@compiled
def test_scattered_blocks_are_all_of_the_cache_and_slots_are_the_last_positions():
    cache = kernel_attention.FilledCache.of(here.backend(), sequences=3, new_tokens=2)
    assert sorted(cache.block_table.flatten().tolist()) == list(range(len(cache.values)))
    blocks, places = (
        cache.write_slots.view(3, 2) // kernel_attention.BLOCK,
        cache.write_slots.view(3, 2) % kernel_attention.BLOCK,
    )
    assert torch.equal(blocks, cache.block_table[:, -1:].expand(3, 2).long())
    assert places.tolist() == [[kernel_attention.BLOCK - 2, kernel_attention.BLOCK - 1]] * 3


def test_pairs_of_attention_are_those_of_a_causal_mask(monkeypatch):
    monkeypatch.setattr(kernel_attention, "CONTEXT", 5)
    assert kernel_attention.count_pairs(sequences=2, new_tokens=3) == 2 * (3 + 4 + 5)


def test_the_command_offers_every_kernel():
    assert tuple(kernels.KERNELS) == bench_kernels.NAMES


def test_a_row_is_set_beside_the_limits():
    row = {"bytes_per_s": 50.0, "ops_per_s": 10.0, "arithmetic": "bf16"}
    found = kernels.with_shares(row, LIMITS)
    assert (found["read_share_of_limit"], found["ops_share_of_limit"]) == (0.5, 0.5)
    assert kernels.with_shares(row | {"arithmetic": ""}, LIMITS)["ops_share_of_limit"] is None


def test_a_step_is_as_long_as_the_longer_of_reading_and_computing():
    row = {"streams": 4, "prompt_tokens": 8, "new_tokens": 4, "prefill_tok_s": 2.0, "decode_tok_s": 1.0}
    costs = {
        "prefill": StepCost(weight_bytes=200, int8_ops=592, bf16_ops=20),  # 14.8 s at 40 a second, and 1 at 20
        "decode": StepCost(weight_bytes=200, kv_bytes=160, int8_ops=40),  # 3.6 s at 100 bytes a second
    }
    found = shares(row, costs, LIMITS)
    assert found["prefill_share_of_limit"] == pytest.approx(15.8 / 16)  # 32 tokens took 16 s
    assert found["decode_share_of_limit"] == pytest.approx(3.6 / 4)
    assert share_text(row | found) == "  99%, 90% of the machine's limit"
    assert share_text(row) == ""


def test_of_two_measurements_the_higher_figures_count():
    later = replace(LIMITS, read_bytes=50.0, int8_ops=80.0)
    assert LIMITS.or_better(later) == replace(LIMITS, int8_ops=80.0)
