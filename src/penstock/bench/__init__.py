"""Measurements that anyone can repeat: rates offline and served, kernels, peers on the same weights, their quality.

Decides how things are measured and what a record of it holds. Knows no command line, and tensors only where they are
what is measured (`kernels`, `quality`); otherwise engines are met through their public doors only (stepping, HTTP, a
process of their own), so that all are measured by one rule.
"""

from __future__ import annotations

__all__: list[str] = []
