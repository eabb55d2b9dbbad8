"""Other engines beside Penstock: installing them, running them, and comparing rates and quality on one model.

Not part of the wheel: `bench/compare.py` and `bench/quality.py` run it from a checkout. Penstock's own measurements are
in `penstock.bench`.
"""

from __future__ import annotations

__all__: list[str] = []
