"""How a layer's attention treats scores: `AttentionSpec`.

Decides the vocabulary that models, references and compiled kernels share. Holds no tensor: sinks, which are weights,
are passed alongside a spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AttentionSpec"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer turns query-key products into attention weights.

    Attributes:
        scale: factor applied to the products.
        softcap: if given, scaled scores become `softcap * tanh(score / softcap)` before positions are masked (Riviere
            et al., "Gemma 2", 2024, section 2).
        window: if given, a token sees the last `window` positions, its own included; else all up to its own
            (`sliding_window` in Hugging Face configs; Beltagy et al., "Longformer", 2020).
        ahead: number of positions after its own that a token sees; None for the rest of its sequence, 0 if causal.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    ahead: int | None = 0

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} of attention must be positive and finite, got {value}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window of attention must be at least 1, got {self.window}")
        if self.ahead is not None and self.ahead < 0:
            raise ValueError(f"ahead of attention must not be negative, got {self.ahead}")

    @property
    def looks_ahead(self) -> bool:
        """Whether a token sees any position after its own."""
        return self.ahead != 0

    def window_start(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def window_end(self, position: int, length: int) -> int:
        """One past the last position that the token at `position` sees in a sequence of `length`."""
        return length if self.ahead is None else min(length, position + 1 + self.ahead)
