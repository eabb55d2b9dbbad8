"""Measurements that anyone can repeat: offline rates, a served model under load, and peers on the same weights.

Decides how things are measured and what a record of it holds. Knows no tensors and no command line; engines are met
through their public doors only (stepping, HTTP, a process of their own), so that all are measured by one rule.
"""

from __future__ import annotations

__all__: list[str] = []
