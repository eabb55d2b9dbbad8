"""The start report says what computes, why that is torch if it is, and how the weights are kept."""

from __future__ import annotations

import pytest
import torch

from penstock.exec import start_report as room
from penstock.kernels.torch_backend import TorchBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FP32, BF16 = torch.float32, torch.bfloat16


COMPILED = TorchBackend(CPU, name="cpu", exact=True, isa="avx2", threads=2)  # what it says of itself is all that counts
WHY = "this was installed without compiled kernels"
NO_COMPILER = TorchBackend(CPU, WHY)
NO_TRITON = TorchBackend(CUDA, "the model runs on CUDA, and Triton is not installed")
TRITON = TorchBackend(CUDA, name="cuda")


@pytest.mark.parametrize(
    ("backend", "dtype", "line"),
    [
        (COMPILED, BF16, "cpu, bfloat16, 2 threads, compiled avx2 kernels, exact bit for bit"),
        (COMPILED, FP32, "cpu, float32, 2 threads, compiled avx2 kernels, exact bit for bit"),
        (NO_COMPILER, FP32, f"cpu, float32, 2 threads, {WHY}: torch kernels, slower, exact up to rounding"),
        (NO_TRITON, BF16, f"cuda:0, bfloat16, 2 threads, {NO_TRITON.reason}: torch kernels, slower"),
        (TRITON, BF16, "cuda:0, bfloat16, 2 threads, Triton kernels between torch's products"),
    ],
)  # fmt: skip
def test_the_line_on_who_computes_says_why_it_is_torch_and_whether_answers_are_exact(backend, dtype, line):
    assert room.computing_line(backend, dtype, 2) == f"runs on          {line}"


def test_heads_too_wide_for_the_compiled_attention_are_said_and_what_they_cost():
    line = room.wide_heads_line(640)
    assert line == "attention        torch: heads of 640 are wider than 512, so answers are exact up to rounding only"


@pytest.mark.parametrize(
    ("formats", "stored", "dtype", "words"),
    [
        (["Q8_0", "Q4_1"], "quantised", BF16, "Q4_1, Q8_0 as in the file"),
        (["Q8_0", "bfloat16"], "quantised", BF16, "Q8_0 as in the file; bfloat16"),
        (["bfloat16"], "bfloat16", BF16, "bfloat16"),
        (["int4", "int8"], "float16", BF16, "int4; int8"),
        (["float32"], "float32", FP32, "float32"),
        (
            ["bfloat16"],
            "float16",
            BF16,
            "bfloat16, rounded from the file's float16 (--dtype float32 keeps its numbers)",
        ),
    ],
)
def test_the_form_of_the_weights_is_said(formats, stored, dtype, words):
    assert room.weight_formats(formats, stored, dtype) == words


def test_experts_that_were_rounded_are_counted_and_the_first_named():
    line = room.mixed_line(["a (Q4_0, Q8_0)", "b (Q4_0, Q8_0)", "c (Q4_0, Q8_0)", "d (Q4_1, Q8_0)"])
    assert line.startswith("rounded          experts of 4 layers to bfloat16")
    assert line.endswith("a (Q4_0, Q8_0), b (Q4_0, Q8_0), c (Q4_0, Q8_0) and 1 more")
    assert "more" not in room.mixed_line(["a (Q4_0, Q8_0)"])


def test_what_of_a_quantised_file_is_rounded_or_not_followed_is_said():
    line = room.rounded_line({"FP8 to bfloat16": 112, "scales of INT8 to float16": 3})
    assert line.startswith("rounded          FP8 to bfloat16 (112 tensors), scales of INT8 to float16 (3 tensors): ")
    assert "--dtype float32" in line
    line = room.unheeded_line(["quantization_config.kv_cache_scheme"])
    assert line.startswith("not rounded      ")
    assert line.endswith(": quantization_config.kv_cache_scheme")
