"""Numbers into blocks: of 32 as the `gguf` package makes them, of 256 as near as llama.cpp's quantiser's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.weights.gguf_blocks import decode
from penstock.weights.gguf_encode import ENCODABLE, encode

OF_32 = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
OF_256 = ("Q4_K", "Q5_K", "Q6_K")


def samples() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    normal = draw.standard_normal((64, 512)).astype(np.float32) * 0.02
    wide = (draw.standard_normal((64, 512)) * np.exp(draw.standard_normal((1, 512)))).astype(np.float32)
    heavy = draw.standard_t(3, (64, 512)).astype(np.float32)
    uneven = normal.copy()
    uneven[::2] = 0.0
    uneven[1, :] = 3.0
    uneven[3, :] = -1e-7
    uneven[5, ::7] = 40.0
    return {"normal": normal, "wide": wide, "heavy": heavy, "positive": np.abs(normal), "uneven": uneven}


SAMPLES = samples()

# Squared error of llama.cpp's quantiser (`ggml_quantize_chunk` without an importance matrix, as of
# llama-cpp-python 0.3.36) on the same numbers, summed over the sample in float64.
OF_LLAMA_CPP = {
    ("normal", "Q4_K"): 0.0667313,
    ("normal", "Q5_K"): 0.0170035,
    ("normal", "Q6_K"): 0.00413161,
    ("wide", "Q4_K"): 2638.08,
    ("wide", "Q5_K"): 726.123,
    ("wide", "Q6_K"): 222.562,
    ("heavy", "Q4_K"): 838.766,
    ("heavy", "Q5_K"): 213.445,
    ("heavy", "Q6_K"): 64.6414,
    ("positive", "Q4_K"): 0.0235009,
    ("positive", "Q5_K"): 0.00564631,
    ("positive", "Q6_K"): 0.00411769,
    ("uneven", "Q4_K"): 0.58899,
    ("uneven", "Q5_K"): 0.191925,
    ("uneven", "Q6_K"): 0.182537,
}


@pytest.mark.parametrize("kind", OF_32)
@pytest.mark.parametrize("sample", SAMPLES)
def test_blocks_of_32_are_those_of_the_gguf_package(kind, sample):
    numbers = SAMPLES[sample]
    theirs = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(encode(torch.from_numpy(numbers), kind).numpy(), theirs.reshape(-1))


@pytest.mark.parametrize("kind", [*OF_32, *OF_256])
def test_the_gguf_package_reads_the_same_numbers_out_of_our_blocks(kind):
    for numbers in SAMPLES.values():
        raw = encode(torch.from_numpy(numbers), kind)
        ours = decode(raw, ENCODABLE[kind]).numpy()
        assert np.array_equal(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]).reshape(-1), ours)


@pytest.mark.parametrize(("sample", "kind"), OF_LLAMA_CPP)
def test_blocks_of_256_come_as_near_as_those_of_llama_cpp(sample, kind):
    numbers = torch.from_numpy(SAMPLES[sample])
    error = (decode(encode(numbers, kind), ENCODABLE[kind]).double() - numbers.view(-1).double()).square().sum()
    assert float(error) <= 1.02 * OF_LLAMA_CPP[sample, kind]


@pytest.mark.parametrize("kind", OF_256)
def test_numbers_that_a_kind_holds_exactly_stay(kind):
    each = torch.arange(512).float()
    codes = {"Q4_K": each % 16, "Q5_K": each % 32, "Q6_K": each % 16 * 4 - 32}[kind]
    numbers = codes * (128 if kind == "Q6_K" else 63)
    assert torch.equal(decode(encode(numbers, kind), ENCODABLE[kind]), numbers)
    assert torch.equal(decode(encode(torch.zeros(256), kind), ENCODABLE[kind]), torch.zeros(256))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_kinds_are_torchs_own(kind):
    numbers = torch.from_numpy(SAMPLES["wide"])
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert torch.equal(decode(encode(numbers, kind), ENCODABLE[kind]), numbers.to(dtype).view(-1))


@pytest.mark.parametrize("kind", [kind for kind in ENCODABLE if kind not in ("F32", "BF16")])
def test_numbers_beyond_a_kinds_range_are_refused(kind):
    numbers = torch.full((256,), 1e12)
    numbers[::2] = -1e12
    with pytest.raises(ValueError, match="range"):
        encode(numbers, kind)
    with pytest.raises(ValueError, match="not finite"):
        encode(torch.full((256,), torch.nan), kind)
