"""Angles of rotary position embedding: inverse frequencies, their scalings for longer contexts, and cos/sin tables.

Decides the angle of each position; does not know how angles are applied (`kernels.rope`) or how a config spells them
(`models.config_reader`). Everything is computed in float32 on the CPU, in the same order of operations as in
transformers, so that tables match it bit for bit, and then moved to the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "FrequencyFactors",
    "LinearScaling",
    "Llama3Scaling",
    "ProportionalScaling",
    "Rope",
    "RotaryTable",
    "Scaling",
    "Unscaled",
    "YarnScaling",
    "yarn_temperature",
]


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The original embedding: rope type `default`."""

    def __call__(self, periods: Tensor) -> Tensor:
        """Turn `[R/2]` periods (positions per radian) into frequencies (radians per position)."""
        return 1.0 / periods


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): positions, and so frequencies, are divided by `factor`."""

    factor: float

    def __call__(self, periods: Tensor) -> Tensor:
        """Turn `[R/2]` periods (positions per radian) into frequencies (radians per position)."""
        return 1.0 / periods / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, the rest interpolated.

    Attributes:
        low_freq_factor: frequencies whose wavelength exceeds `original_positions / low_freq_factor` are divided in
            full.
        high_freq_factor: frequencies whose wavelength is below `original_positions / high_freq_factor` are kept;
            greater than `low_freq_factor`.
        original_positions: pretraining context length (`original_max_position_embeddings`).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __call__(self, periods: Tensor) -> Tensor:
        """Turn `[R/2]` periods (positions per radian) into frequencies (radians per position)."""
        frequencies = 1.0 / periods
        wavelengths = 2 * math.pi / frequencies
        longest = self.original_positions / self.low_freq_factor
        shortest = self.original_positions / self.high_freq_factor
        share = self.original_positions / wavelengths - self.low_freq_factor
        share = share / (self.high_freq_factor - self.low_freq_factor)  # 0 at `longest`, 1 at `shortest`
        between = (1 - share) * frequencies / self.factor + share * frequencies
        kept_or_divided = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        is_between = (wavelengths >= shortest) & (wavelengths <= longest)
        return torch.where(is_between, between, kept_or_divided)


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Divides each frequency by its own factor: LongRoPE (Ding et al. 2024, section 3.1).

    GGUF files use it too, with the tensors `rope_freqs.weight` and `rope_factors_*.weight`.

    Attributes:
        factors: one per rotated pair of elements, R / 2 in all.
    """

    factors: tuple[float, ...]

    def __call__(self, periods: Tensor) -> Tensor:
        """Turn `[R/2]` periods (positions per radian) into frequencies (radians per position)."""
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * periods)


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Rotates only a head's fastest pairs, at the frequencies they would have if all rotated: Gemma 4's `proportional`.

    The other pairs carry no position.

    Attributes:
        pairs: number of pairs that rotate.
        factor: divisor of their frequencies.
    """

    pairs: int
    factor: float = 1.0

    def __call__(self, periods: Tensor) -> Tensor:
        """Turn `[R/2]` periods (positions per radian) into frequencies (radians per position)."""
        turning = torch.arange(len(periods)) < self.pairs
        return torch.where(turning, 1.0 / periods / self.factor, 0.0)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3.2): high frequencies are kept, low ones divided, the rest interpolated.

    Attributes:
        theta: base of the frequencies; determines which frequencies are low.
        factor: divisor of the low frequencies.
        original_positions: pretraining context length.
        fast: pairs that make more turns than this within the pretraining context are kept (`beta_fast`).
        slow: pairs that make fewer turns than this are divided in full (`beta_slow`).
        truncate: round the two limits outwards to whole pairs.
    """

    theta: float
    factor: float
    original_positions: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    def __call__(self, periods: Tensor) -> Tensor:
        """Turn `[R/2]` periods (positions per radian) into frequencies (radians per position)."""
        width = 2 * len(periods)
        first, last = self._pair(self.fast, width), self._pair(self.slow, width)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        span = last - first if last != first else 0.001  # as in the authors' code: no division by 0
        ramp = ((torch.arange(len(periods), dtype=torch.float32) - first) / span).clamp(0, 1)
        kept = 1 - ramp  # 1 for high frequencies
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _pair(self, turns: float, width: int) -> float:
        """The (fractional) index of the pair that makes `turns` turns within the pretraining context."""
        return width * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """The factor that YaRN applies to cosines and sines: `0.1 * weight * ln(factor) + 1` (equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


_PAGE = 128
"""Positions filled in together: few enough that torch computes them on one thread, and so in one order."""

Scaling = Unscaled | LinearScaling | Llama3Scaling | FrequencyFactors | ProportionalScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding, as a config describes it.

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: scaling of the frequencies for a longer context.
        share: fraction of a head's elements that are rotated (`partial_rotary_factor`), from the first on; the others
            carry no position.
        amplitude: factor applied to cosines and sines (LongRoPE's attention factor).
    """

    theta: float = 10000.0
    scaling: Scaling = Unscaled()
    share: float = 1.0
    amplitude: float = 1.0

    @property
    def reaches(self) -> int:
        """Context length that YaRN extends the model to, though a config may allow less; 0 for other scalings."""
        if isinstance(self.scaling, YarnScaling):
            return int(self.scaling.factor * self.scaling.original_positions)
        return 0

    def width(self, head_dim: int) -> int:
        """R, the number of rotated elements of a head, rounded up to an even number."""
        return 2 * -(-self._rotated(head_dim) // 2)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Frequencies in radians per position, `[R/2]` float32: `theta ** (-2i / R)`, then scaled.

        Su et al. 2021, section 3.2.2. In the exponent, R is not rounded up to an even number.
        """
        rotated = self._rotated(head_dim)
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated  # [R/2]
        return self.scaling(self.theta**exponents)

    def _rotated(self, head_dim: int) -> int:
        return int(head_dim * self.share)


class RotaryTable:
    """Cosines and sines of positions: `cos` and `sin` are `[P, R/2]` float32, filled in as positions are requested.

    Cosines are tabulated rather than computed when needed: vectorised cosines may differ in the last bit with an
    element's place in its array, and a position's angle must not depend on its neighbours in the batch. Positions are
    therefore filled in by whole pages, each computed by itself and always in the same way.

    Memory for all positions is reserved at once and never moves, so that compiled code may keep its address; on a CPU
    the system commits it as pages are first written. Two threads that fill a page at the same time write the same bits.

    Args:
        cos: undefined from position `known` on.
        sin: likewise.
        frequencies: `[R/2]` float32, radians per position; None if all positions are known.
        amplitude: factor applied to cosines and sines.

    Attributes:
        known: number of positions filled in.
    """

    def __init__(self, cos: Tensor, sin: Tensor, frequencies: Tensor | None = None, amplitude: float = 1.0) -> None:
        self.cos, self.sin = cos, sin
        self.known = 0 if frequencies is not None else len(cos)
        self._frequencies = frequencies
        self._amplitude = amplitude

    @property
    def width(self) -> int:
        """Number of rotated elements at the start of each head."""
        return 2 * self.cos.shape[1]

    def __str__(self) -> str:
        return f"rope[{', '.join(map(str, self.cos.shape))}]"

    @classmethod
    def build(cls, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> RotaryTable:
        """Make a table of positions `[0, max_positions)`: empty on a CPU, filled on other devices."""
        frequencies = rope.inverse_frequencies(head_dim)
        cos, sin = (torch.empty(max_positions, len(frequencies), device=device) for _ in range(2))
        if device == torch.device("meta"):  # the model is being planned, not loaded
            return cls(cos, sin)
        table = cls(cos, sin, frequencies, rope.amplitude)
        if device.type != "cpu":
            table.reach(max_positions)
        return table

    def nbytes(self, positions: int) -> int:
        """Bytes of memory that the table takes once `positions` positions are known."""
        pages = -(-positions // _PAGE)
        return 2 * min(pages * _PAGE, len(self.cos)) * self.cos.shape[1] * self.cos.itemsize

    @torch.inference_mode()
    def reach(self, positions: int) -> None:
        """Fill in the first `positions` positions, or the whole table if it has fewer."""
        wanted = min(positions, len(self.cos))
        while self._frequencies is not None and self.known < wanted:
            first = self.known
            last = min(first + _PAGE, len(self.cos))
            page = torch.arange(first, first + _PAGE, dtype=torch.float32)  # always a whole page, even at the end
            angles = page[:, None] * self._frequencies  # [page, R/2]
            self.cos[first:last] = (angles.cos() * self._amplitude)[: last - first]
            self.sin[first:last] = (angles.sin() * self._amplitude)[: last - first]
            self.known = last

    def make_known(self, positions: Tensor) -> None:
        """Fill in the table up to the highest of `positions` `[T]`, as far as the table goes."""
        if self.known < len(self.cos) and len(positions):
            self.reach(int(positions.max()) + 1)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` `[T]` int64, `[T, R/2]` each."""
        self.make_known(positions)
        return self.cos[positions], self.sin[positions]
