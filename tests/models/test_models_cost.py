"""What a program says it costs, counted by hand beside it."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import write_checkpoint

from needs import COMPILED
from penstock.contract.model import StepCost, StepRow
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import CompiledExecutor
from penstock.nn.cost import cost
from penstock.nn.operations import Experts, Linear, ShortConvolution
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat


def program_of(tmp_path, family, variant, fmt=WeightFormat.BF16, dtype=torch.bfloat16):
    files = open_model(write_checkpoint(tmp_path, family, variant), gguf_dialect)
    return load(files.config, Binder(files.source, dtype, "cpu", "m", weight_format=fmt), "m")


def products_of(program):
    """Numbers in all projections, and in the head."""
    shape = program.shape
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner = 88  # of wide_heads_untied
    layer = shape.hidden_size * (q + 2 * kv) + q * shape.hidden_size + 3 * shape.hidden_size * inner
    return shape.num_layers * layer, shape.vocab_size * shape.hidden_size


@pytest.mark.parametrize(
    ("dtype", "fmt", "arithmetic"),
    [
        (torch.float32, WeightFormat.DENSE, "fp32"),
        (torch.float32, WeightFormat.F32, "fp32"),
        (torch.bfloat16, WeightFormat.BF16, "bf16"),
        (torch.float32, WeightFormat.INT8, "int8"),
        (torch.bfloat16, WeightFormat.INT4, "int8"),
    ],
)
def test_products_are_two_operations_a_number_in_the_arithmetic_of_the_weights(tmp_path, dtype, fmt, arithmetic):
    program = program_of(tmp_path, "llama", "wide_heads_untied", fmt, dtype)
    layers, head = products_of(program)
    other = torch.bfloat16 if arithmetic == "fp32" else torch.float32  # attention is counted in the dtype of its cache
    found, silent = (cost(program, [StepRow(0, 1, samples)], other) for samples in (1, 0))
    assert getattr(found, f"{arithmetic}_ops") == 2 * (layers + head)
    assert getattr(silent, f"{arithmetic}_ops") == 2 * layers


def test_attention_reads_what_a_row_sees_and_counts_pairs(tmp_path):
    program = program_of(tmp_path, "llama", "wide_heads_untied")
    shape = program.shape
    found = cost(program, [StepRow(10, 3), StepRow(0, 1)], torch.float32)
    assert found.kv_bytes == shape.num_layers * (13 + 1) * 2 * shape.num_kv_heads * shape.head_dim * 4
    assert found.fp32_ops == shape.num_layers * 4 * shape.num_heads * shape.head_dim * (11 + 12 + 13 + 1)
    eight = cost(program, [StepRow(10, 3), StepRow(0, 1)], torch.int8)
    assert eight.kv_bytes == shape.num_layers * 14 * 2 * shape.num_kv_heads * (shape.head_dim + 4)


def test_a_window_bounds_what_is_read_and_computed(tmp_path):
    program = program_of(tmp_path, "mistral", "all_to_one_small_window")
    shape, window = program.shape, program.caches[0].window
    found = cost(program, [StepRow(300, 2)], torch.float32)
    assert found.kv_bytes == shape.num_layers * (window + 1) * 2 * shape.num_kv_heads * shape.head_dim * 4
    assert found.fp32_ops == shape.num_layers * 4 * shape.num_heads * shape.head_dim * 2 * window


def test_weights_are_read_once_whatever_the_rows_and_the_head_only_where_tokens_are_chosen(tmp_path):
    program = program_of(tmp_path, "gpt2", "tied")
    one, many = (cost(program, [StepRow(5, 1)] * count, torch.bfloat16) for count in (1, 9))
    rows = program.embedding[0].table.nbytes // program.shape.vocab_size
    assert many.weight_bytes - one.weight_bytes < 8 * 3 * rows  # rows of two tables
    silent = cost(program, [StepRow(5, 1, 0)], torch.bfloat16)
    assert one.weight_bytes - silent.weight_bytes == program.head.weight.nbytes


def test_costs_add_up():
    assert StepCost(1, 2, 3, 4, 5) + StepCost(10, 20, 30, 40, 50) == StepCost(11, 22, 33, 44, 55)


@pytest.mark.parametrize(
    ("family", "variant", "layers", "taps", "heads", "keys", "values", "convolved", "each"),
    [
        # the scan decays, scales the value, multiplies, adds and reads; the delta rule also asks and subtracts
        ("granitemoehybrid", "wide_heads_untied_factors", 3, 4, 8, 20, 12, 96 + 2 * 2 * 20, 5),
        ("qwen3_5_text", "wide_heads_every_fourth", 4, 4, 6, 12, 20, 2 * 2 * 12 + 6 * 20, 8),
    ],
)
def test_recurrent_layers_count_their_states(
    tmp_path, family, variant, layers, taps, heads, keys, values, convolved, each
):
    program = program_of(tmp_path, family, variant)
    found = cost(program, [StepRow(10, 3), StepRow(0, 1)], torch.bfloat16)
    state = heads * keys * values
    assert found.fp32_ops == layers * 4 * (each * state + 2 * taps * convolved)
    states = layers * (state + (taps - 1) * convolved)
    assert found.kv_bytes - 2 * 4 * states == 14 * 2 * 2 * program.caches[0].heads * program.caches[0].head_dim


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "wide_heads_untied"),
        ("granitemoehybrid", "wide_heads_untied_factors"),
        ("qwen3_5_text", "wide_heads_every_fourth"),
        ("lfm2", "wide_heads_tied_four_taps"),
    ],
)
def test_steps_are_shared_out_by_the_same_count(tmp_path, family, variant):
    """Of products, filters, recurrences and their states; attention is counted where a step's rows are known."""
    program = program_of(tmp_path, family, variant)
    shared = CompiledExecutor(program, torch.bfloat16, CpuBackend("", 1)).cost
    first, second = (cost(program, [StepRow(computed, 1, 0)], torch.bfloat16) for computed in (0, 1))

    def without_attention(count):  # which reads one position in the first step, and two in the second
        return 2 * count(first) - count(second)

    assert shared.operations == without_attention(lambda each: each.fp32_ops + each.bf16_ops + each.int8_ops)
    assert 4 * shared.state == without_attention(lambda each: each.kv_bytes)
    assert shared.layer_bytes == max(sum(map(weight_bytes, layer)) for layer in program.layers)


def weight_bytes(operation):
    match operation:
        case Linear(weight=weight) | ShortConvolution(weight=weight):
            return weight.nbytes
        case Experts(stack=stack):
            return stack.nbytes
    return 0
