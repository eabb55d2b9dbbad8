"""Angles of rotary position embedding: inverse frequencies, their scalings for longer contexts, and cos/sin tables.

Decides which angle a position has; does not know how angles are applied (`kernels.rope`) or how a config spells them
(`models.config_reader`). Everything is float32 on the CPU, in the same order of operations as transformers, so that
tables agree with it bit by bit; then moved to the device.
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
        """From `[R/2]` positions per radian to as many radians per position."""
        return 1.0 / periods


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): positions, and so frequencies, are divided by `factor`."""

    factor: float

    def __call__(self, periods: Tensor) -> Tensor:
        """From `[R/2]` positions per radian to as many radians per position."""
        return 1.0 / periods / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: slow frequencies are divided by `factor`, fast ones kept, those between interpolated.

    Attributes:
        low_freq_factor: wavelengths longer than `original_positions / low_freq_factor` are divided in full.
        high_freq_factor: wavelengths shorter than `original_positions / high_freq_factor` are kept;
            above `low_freq_factor`.
        original_positions: context length of the pretraining (`original_max_position_embeddings`).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __call__(self, periods: Tensor) -> Tensor:
        """From `[R/2]` positions per radian to as many radians per position."""
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
    """Each frequency is divided by a factor of its own: LongRoPE (Ding et al. 2024, section 3.1).

    So are those of GGUF files, by the tensors `rope_freqs.weight` and `rope_factors_*.weight`.

    Attributes:
        factors: one per pair of elements that are rotated, R / 2 in all.
    """

    factors: tuple[float, ...]

    def __call__(self, periods: Tensor) -> Tensor:
        """From `[R/2]` positions per radian to as many radians per position."""
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * periods)


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The fastest pairs of a head turn as if all did, and the others keep no position: Gemma 4's `proportional`.

    Attributes:
        pairs: how many turn.
        factor: what their frequencies are divided by.
    """

    pairs: int
    factor: float = 1.0

    def __call__(self, periods: Tensor) -> Tensor:
        """From `[R/2]` positions per radian to as many radians per position."""
        turning = torch.arange(len(periods)) < self.pairs
        return torch.where(turning, 1.0 / periods / self.factor, 0.0)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3.2): fast frequencies are kept, slow ones divided, those between interpolated.

    Attributes:
        theta: base of the frequencies, from which follows which of them are slow.
        factor: what slow ones are divided by.
        original_positions: context length of the pretraining.
        fast: pairs that turn more often than this within the pretraining's context are kept (`beta_fast`).
        slow: those that turn less often than this are divided in full (`beta_slow`).
        truncate: the two limits are rounded to whole pairs, outwards.
    """

    theta: float
    factor: float
    original_positions: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    def __call__(self, periods: Tensor) -> Tensor:
        """From `[R/2]` positions per radian to as many radians per position."""
        width = 2 * len(periods)
        first, last = self._pair(self.fast, width), self._pair(self.slow, width)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        span = last - first if last != first else 0.001  # as in the authors' code: no division by 0
        ramp = ((torch.arange(len(periods), dtype=torch.float32) - first) / span).clamp(0, 1)
        kept = 1 - ramp  # 1 where a frequency is fast
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _pair(self, turns: float, width: int) -> float:
        """Which pair of a head turns so often within the pretraining's context, as a real number."""
        return width * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by: `0.1 * weight * ln(factor) + 1` (equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


_PAGE = 128
"""Positions that become known together: few enough that torch computes them on one thread, so in one order."""

Scaling = Unscaled | LinearScaling | Llama3Scaling | FrequencyFactors | ProportionalScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding, as a config describes it.

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: what a longer context made of them.
        share: of a head's elements, how many are rotated (`partial_rotary_factor`): its first ones, the rest keeps no
            position.
        amplitude: what cosines and sines are multiplied by (LongRoPE's attention factor).
    """

    theta: float = 10000.0
    scaling: Scaling = Unscaled()
    share: float = 1.0
    amplitude: float = 1.0

    @property
    def reaches(self) -> int:
        """Positions that the scaling extends the pretraining's to, where it says so; a config may still say fewer."""
        if isinstance(self.scaling, YarnScaling):
            return int(self.scaling.factor * self.scaling.original_positions)
        return 0

    def width(self, head_dim: int) -> int:
        """R, elements of a head that are rotated: an even number, so one more than `head_dim` where that is odd."""
        return 2 * -(-self._rotated(head_dim) // 2)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians per position, `[R/2]` float32: `theta ** (-2i / R)` (Su et al. 2021, section 3.2.2), then scaled."""
        rotated = self._rotated(head_dim)
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated  # [R/2]
        return self.scaling(self.theta**exponents)

    def _rotated(self, head_dim: int) -> int:
        return int(head_dim * self.share)


class RotaryTable:
    """Cosines and sines of positions: `cos` and `sin` are `[P, R/2]` float32, known as far as somebody asked for them.

    A table, and not cosines computed where needed: vectorised cosines may differ in the last bit with an element's
    place in its array, and a position's angle must not depend on its neighbours in the batch. So positions become known
    in whole pages, each of which is computed by itself and always alike.

    Memory for all positions is reserved at once and never moves, so that compiled code may keep its address; on a CPU
    the system finds it as pages are first written. Two threads that compute a page at once write the same bits.

    Args:
        cos: undefined from position `known` on.
        sin: beside `cos`.
        frequencies: `[R/2]` float32, radians per position; None where all positions are known.
        amplitude: what cosines and sines are multiplied by.

    Attributes:
        known: how many positions have their angles.
    """

    def __init__(self, cos: Tensor, sin: Tensor, frequencies: Tensor | None = None, amplitude: float = 1.0) -> None:
        self.cos, self.sin = cos, sin
        self.known = 0 if frequencies is not None else len(cos)
        self._frequencies = frequencies
        self._amplitude = amplitude

    @property
    def width(self) -> int:
        """Elements of a head that are rotated, its first ones."""
        return 2 * self.cos.shape[1]

    def __str__(self) -> str:
        return f"rope[{', '.join(map(str, self.cos.shape))}]"

    @classmethod
    def build(cls, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> RotaryTable:
        """A table of positions `[0, max_positions)`: none is known yet on a CPU, all are elsewhere."""
        frequencies = rope.inverse_frequencies(head_dim)
        cos, sin = (torch.empty(max_positions, len(frequencies), device=device) for _ in range(2))
        if device == torch.device("meta"):  # planned, not loaded
            return cls(cos, sin)
        table = cls(cos, sin, frequencies, rope.amplitude)
        if device.type != "cpu":
            table.reach(max_positions)
        return table

    def nbytes(self, positions: int) -> int:
        """Memory that the table takes once so many positions are known."""
        pages = -(-positions // _PAGE)
        return 2 * min(pages * _PAGE, len(self.cos)) * self.cos.shape[1] * self.cos.itemsize

    @torch.inference_mode()
    def reach(self, positions: int) -> None:
        """Make the first `positions` known, or all that there are if these are fewer."""
        wanted = min(positions, len(self.cos))
        while self._frequencies is not None and self.known < wanted:
            first = self.known
            last = min(first + _PAGE, len(self.cos))
            page = torch.arange(first, first + _PAGE, dtype=torch.float32)  # whole, also at the end: always alike
            angles = page[:, None] * self._frequencies  # [page, R/2]
            self.cos[first:last] = (angles.cos() * self._amplitude)[: last - first]
            self.sin[first:last] = (angles.sin() * self._amplitude)[: last - first]
            self.known = last

    def make_known(self, positions: Tensor) -> None:
        """Make `positions` `[T]` known, those of them that there are."""
        if self.known < len(self.cos) and len(positions):
            self.reach(int(positions.max()) + 1)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` `[T]` int64, `[T, R/2]` each."""
        self.make_known(positions)
        return self.cos[positions], self.sin[positions]
