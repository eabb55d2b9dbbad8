"""Random blocks of every kind that GGUF files hold: any codes, with scales that are sensible numbers."""

from __future__ import annotations

import gguf
import numpy as np

KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)

_HALVES = {
    **dict.fromkeys(KINDS, (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "IQ1_M": (),
    "INT4": (0,),
    "INT4_128": (0,),
}
"""Where blocks have their float16 numbers."""


_INTEGERS = {"INT4": (32, 19), "INT4_128": (128, 67)}
"""Kinds of blocks that no file has, with a zero point: (numbers, bytes) of a block."""


def unit(kind: str) -> int:
    """Numbers in a block."""
    return _sizes(kind)[0]


def _sizes(kind: str) -> tuple[int, int]:
    return _INTEGERS[kind] if kind in _INTEGERS else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Uint8 `[rows, bytes of a row]`; numbers of the size that weights have."""
    random = np.random.default_rng(seed)
    elements, size = _sizes(kind)
    blocks = random.integers(0, 256, (rows * (columns // elements), size), dtype=np.uint8)
    for at in _HALVES[kind]:
        blocks[:, at : at + 2] = _halves(random, len(blocks)).view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(116, 124, len(blocks))
    if kind in _INTEGERS:
        blocks[:, 2] %= 17
    if kind == "IQ1_M":  # a nibble of the scale in each of four words
        words = blocks[:, 48:56].copy().view(np.uint16)
        scales = _halves(random, len(blocks)).view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | (scales >> 4 * i & 15) << 12
        blocks[:, 48:56] = words.view(np.uint8)
    return blocks.reshape(rows, -1)


def set_scales(kind: str, blocks: np.ndarray, scale: float) -> None:
    """Set every float16 of blocks from `random_blocks` to one number, minima to a quarter of it."""
    flat = blocks.reshape(-1, _sizes(kind)[1])
    for place, at in enumerate(_HALVES[kind]):
        flat[:, at : at + 2] = np.array([scale / (4 if place else 1)], dtype=np.float16).view(np.uint8)


def _halves(random: np.random.Generator, count: int) -> np.ndarray:
    """Random numbers of either sign, from below the normal range of float16 on."""
    return (random.standard_normal(count) * 10.0 ** random.integers(-5, -1, count)).astype(np.float16)


def numbers(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The blocks' numbers, by the official package: float32."""
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).astype(np.float32)
