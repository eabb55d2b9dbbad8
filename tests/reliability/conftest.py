"""The harness is no part of the wheel: its folder goes on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "reliability"))
