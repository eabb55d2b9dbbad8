"""Measurements that anyone can repeat: rates offline and served, single kernels, and what quantisation costs.

Decides how each is made and what its record holds. Knows no command line. `kernels` and `quality` measure tensors; the
rest meets an engine from outside, by stepping it or over HTTP. Comparisons with other engines are not in the wheel: see
the repository's `bench/`.
"""

from __future__ import annotations

__all__: list[str] = []
