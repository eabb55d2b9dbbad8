"""What an embedding request wants: a vector in place of text.

The runner turns hidden states into the vector; the intake checks who may request what.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["EmbeddingSpec", "Pooling", "vector_floats"]


class Pooling(StrEnum):
    """How the hidden states of a prompt, after the model's last norm, become one vector."""

    MEAN = "mean"
    """The mean of all positions'."""
    LAST = "last"
    """The last position's: in a causal model, only this one has seen the whole prompt."""
    CLS = "cls"
    """The first position's: that of the token `[CLS]`, which encoders put in front. In a causal model it has seen no
    other token."""

    @property
    def takes_cached(self) -> bool:
        """Whether a cached prefix can be used: the states of its positions, which are not cached, are not needed."""
        return self is Pooling.LAST


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """One vector for one prompt.

    Attributes:
        pooling: see `Pooling`.
        normalize: whether the vector is scaled to length 1 after it was cut; a vector of zeros stays as it is.
        dimensions: how many of its first values are kept; 0 for all.
    """

    pooling: Pooling = Pooling.MEAN
    normalize: bool = True
    dimensions: int = 0


def vector_floats(vector: bytes) -> list[float]:
    """The numbers of a vector as results carry it: float32, little-endian."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
