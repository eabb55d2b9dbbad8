"""Quantises numbers to GGUF's blocks of 256 with two levels of scales: Q4_K, Q5_K and Q6_K.

Each share of 32 or 16 neighbours has its own scale, and in Q4_K and Q5_K its own minimum; a block stores them as
integers of six or eight bits, in float16 units. A search minimises the squared error in three steps. First it fits
each share alone, with an unrestricted scale: from several initial guesses, it rounds to get codes, then fits the scale
by least squares. Then it tries the integers nearest to these scales, and their neighbours. Then it fits the block's
units again, by least squares for the resulting codes. Rounds within a step never increase the squared error.

Layouts as in `gguf_k_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.weights.gguf_parts import half_bytes

__all__ = ["K_ENCODERS"]

_LINE_GUESSES = torch.linspace(-1.0, 3.0, 11).tolist()
_RAY_GUESSES = torch.linspace(-1.0, 3.0, 9).tolist()
_ROUNDS = 2
_NEIGHBOURS = (-1, 0, 1)


def _ratio(above: Tensor | float, below: Tensor) -> Tensor:
    """`above / below`, and 0 where `below` is 0."""
    return torch.where(below == 0, 0.0, above / below)


def _as_half(numbers: Tensor) -> Tensor:
    """Round each number to float16, as float32; a number too large becomes infinite, which `half_bytes` refuses."""
    return numbers.to(torch.float16).float()


def _error(shares: Tensor, numbers: Tensor) -> Tensor:
    return (numbers - shares).square_().sum(-1, keepdim=True)


def _codes(numbers: Tensor, scales: Tensor, least: int, top: int) -> Tensor:
    return (numbers * _ratio(1.0, scales)).round_().clamp_(least, top)


def _fit_line(shares: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Fit scales and minima `[N, 1]` so that `scale * code - minimum` is nearest to shares `[N, E]`.

    No minimum is below 0.
    """
    count = shares.shape[-1]
    sum_x, sum_q = shares.sum(-1, keepdim=True), codes.sum(-1, keepdim=True)
    sum_qq, sum_xq = (codes * codes).sum(-1, keepdim=True), (shares * codes).sum(-1, keepdim=True)
    spread = count * sum_qq - sum_q * sum_q
    scale = _ratio(count * sum_xq - sum_x * sum_q, spread)
    minimum = (scale * sum_q - sum_x) / count
    through_zero = (minimum < 0) | (spread == 0)
    scale = torch.where(through_zero, _ratio(sum_xq, sum_qq), scale).clamp_(min=0.0)
    return scale, torch.where(through_zero, 0.0, minimum)


def _nearest_lines(shares: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scales and minima `[N, 1]` for shares `[N, E]` taken alone, for codes from 0 to `top`."""
    least = shares.amin(1, keepdim=True).clamp_(max=0.0)
    span = shares.amax(1, keepdim=True).sub_(least)
    scale, minimum = span / top, -least
    best = _error(shares, _codes(shares + minimum, scale, 0, top) * scale - minimum)

    def take(codes: Tensor) -> None:
        other_scale, other_minimum = _fit_line(shares, codes)
        error = _error(shares, codes * other_scale - other_minimum)
        better = error < best
        torch.where(better, error, best, out=best)
        torch.where(better, other_scale, scale, out=scale)
        torch.where(better, other_minimum, minimum, out=minimum)

    # A finer step than `span / top` clips the outermost numbers and represents the others more precisely.
    for guess in _LINE_GUESSES:
        take(_codes(shares - least, span / (top + guess), 0, top))
    for _ in range(_ROUNDS):
        take(_codes(shares + minimum, scale, 0, top))
    return scale, minimum


def _line_integers(
    shares: Tensor, scales: Tensor, minima: Tensor, units: tuple[Tensor, Tensor], top: int
) -> tuple[Tensor, Tensor]:
    """Six-bit integers for the scales and minima `[B, S, 1]` of shares `[B, S, E]`, in `units`, `[B, 1, 1]` each."""
    start = [_codes(wanted, unit, 0, 63) for wanted, unit in zip((scales, minima), units, strict=True)]
    best = torch.full_like(scales, torch.inf)
    found = start[0].clone(), start[1].clone()
    for scale_step in _NEIGHBOURS:
        scale_code = (start[0] + scale_step).clamp_(0, 63)
        scale = scale_code * units[0]
        for minimum_step in _NEIGHBOURS:
            minimum_code = (start[1] + minimum_step).clamp_(0, 63)
            minimum = minimum_code * units[1]
            error = _error(shares, _codes(shares + minimum, scale, 0, top) * scale - minimum)
            better = error < best
            torch.where(better, error, best, out=best)
            torch.where(better, scale_code, found[0], out=found[0])
            torch.where(better, minimum_code, found[1], out=found[1])
    return found


def _fit_units(shares: Tensor, scaled: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Fit units `u, v` `[B, 1, 1]` so that `u * scaled - v * minima` is nearest to shares `[B, S, E]`."""

    def over_block(numbers: Tensor) -> Tensor:
        return numbers.sum((1, 2), keepdim=True, dtype=torch.float64)

    minima = minima.expand_as(shares)
    aa, bb, ab = over_block(scaled * scaled), over_block(minima * minima), over_block(scaled * minima)
    xa, xb = over_block(shares * scaled), over_block(shares * minima)
    spread = aa * bb - ab * ab
    first, second = _ratio(bb * xa - ab * xb, spread), _ratio(ab * xa - aa * xb, spread)
    alone = (spread <= 1e-9 * aa * bb) | (second < 0)
    units = torch.where(alone, _ratio(xa, aa), first), torch.where(alone, 0.0, second)
    return units[0].float(), units[1].float()


def _lines(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise blocks `[B, 256]`: units of scales and minima `[B, 1]`, their integers `[B, 8]`, codes `[B, 256]`."""
    shares = blocks.view(-1, 8, 32)
    scales, minima = (each.view(-1, 8, 1) for each in _nearest_lines(shares.view(-1, 32), top))
    units = _as_half(scales.amax(1, keepdim=True) / 63), _as_half(minima.amax(1, keepdim=True) / 63)
    integers = _line_integers(shares, scales, minima, units, top)

    def numbers(units: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        scale, minimum = integers[0] * units[0], integers[1] * units[1]
        codes = _codes(shares + minimum, scale, 0, top)
        return codes, _error((codes * scale - minimum).flatten(1), shares.flatten(1))

    codes, error = numbers(units)
    for _ in range(_ROUNDS):
        other = tuple(_as_half(each) for each in _fit_units(shares, codes * integers[0], integers[1]))
        other_codes, other_error = numbers(other)
        better = (other_error < error) & (other[0][:, 0] > 0)
        units = tuple(torch.where(better[:, :, None], new, old) for new, old in zip(other, units, strict=True))
        codes = torch.where(better[:, :, None], other_codes, codes)
        error = torch.where(better, other_error, error)
    narrow = [each.to(torch.uint8).view(-1, 8) for each in integers]
    return units[0].view(-1, 1), units[1].view(-1, 1), *narrow, codes.to(torch.uint8).view(-1, 256)


def _packed_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack six-bit scales and minima `[B, 8]` into `[B, 12]` bytes; see `gguf_k_blocks` for the layout."""
    return torch.cat(
        (
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | minima[:, 4:] << 4,
        ),
        dim=1,
    )


def _packed_nibbles(codes: Tensor, run: int) -> Tensor:
    """Pack four-bit codes `[B, 256]` into `[B, 128]` bytes: of each two runs, the first is in the low nibbles."""
    pairs = codes.view(len(codes), -1, 2, run)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale_unit, minimum_unit, scales, minima, codes = _lines(blocks, 15)
    head = half_bytes(scale_unit), half_bytes(minimum_unit), _packed_scales(scales, minima)
    return torch.cat((*head, _packed_nibbles(codes, 32)), dim=1)


def _q5_k(blocks: Tensor) -> Tensor:
    scale_unit, minimum_unit, scales, minima, codes = _lines(blocks, 31)
    head = half_bytes(scale_unit), half_bytes(minimum_unit), _packed_scales(scales, minima)
    bits = (codes >> 4).view(-1, 8, 32) << torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    return torch.cat((*head, bits.sum(1, dtype=torch.uint8), _packed_nibbles(codes & 15, 32)), dim=1)


def _nearest_rays(shares: Tensor) -> Tensor:
    """Scales `[N, 1]` of either sign for shares `[N, E]` taken alone, for codes from -32 to 31."""
    largest = shares.gather(1, shares.abs().argmax(1, keepdim=True))
    scale = largest / -32
    best = _error(shares, _codes(shares, scale, -32, 31) * scale)

    def take(codes: Tensor) -> None:
        other = _ratio((shares * codes).sum(1, keepdim=True), (codes * codes).sum(1, keepdim=True))
        error = _error(shares, codes * other)
        better = error < best
        torch.where(better, error, best, out=best)
        torch.where(better, other, scale, out=scale)

    for guess in _RAY_GUESSES:
        take(_codes(shares, largest / -(32 + guess), -32, 31))
    for _ in range(_ROUNDS):
        take(_codes(shares, scale, -32, 31))
    return scale


def _ray_integers(shares: Tensor, scales: Tensor, unit: Tensor) -> Tensor:
    """Eight-bit integers for the scales `[B, S, 1]` of shares `[B, S, E]`, in units `[B, 1, 1]`."""
    start = _codes(scales, unit, -128, 127)
    best, found = torch.full_like(scales, torch.inf), start.clone()
    for step in _NEIGHBOURS:
        integers = (start + step).clamp_(-128, 127)
        scale = integers * unit
        error = _error(shares, _codes(shares, scale, -32, 31) * scale)
        better = error < best
        torch.where(better, error, best, out=best)
        torch.where(better, integers, found, out=found)
    return found


def _q6_k(blocks: Tensor) -> Tensor:
    shares = blocks.view(-1, 16, 16)
    scales = _nearest_rays(shares.view(-1, 16)).view(-1, 16, 1)
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    unit = _as_half(largest / -128)
    integers = _ray_integers(shares, scales, unit)
    codes = _codes(shares, integers * unit, -32, 31)
    error = _error(blocks, (codes * integers * unit).flatten(1))
    for _ in range(_ROUNDS):
        scaled = (codes * integers).flatten(1)
        other = _as_half(_ratio((blocks * scaled).sum(1, keepdim=True), (scaled * scaled).sum(1, keepdim=True)))[
            ..., None
        ]
        other_codes = _codes(shares, integers * other, -32, 31)
        other_error = _error(blocks, (other_codes * integers * other).flatten(1))
        better = other_error < error
        unit = torch.where(better[..., None], other, unit)
        codes = torch.where(better[..., None], other_codes, codes)
        error = torch.where(better, other_error, error)
    raised = (codes + 32).to(torch.uint8).view(-1, 256)
    two_bits = (raised >> 4).view(-1, 2, 4, 32) << torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    narrow = integers.view(-1, 16).to(torch.int8).view(torch.uint8)
    low, high = _packed_nibbles(raised & 15, 64), two_bits.sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat((low, high, narrow, half_bytes(unit.view(-1, 1))), dim=1)


K_ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
"""From float32 `[B, 256]` to as many blocks, uint8 `[B, bytes]`."""
