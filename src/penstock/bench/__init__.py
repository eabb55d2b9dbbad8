"""Measurements that anyone can repeat: offline rates, a server under load, single kernels, what quantisation costs.

Decides how each measurement is made and what its record holds. Does not know the command line. `kernels` and `quality`
measure tensors; the rest drives an engine from outside, by stepping it or over HTTP. Comparisons with other engines are
not in the wheel: see the repository's `bench/`.
"""

from __future__ import annotations

__all__: list[str] = []
