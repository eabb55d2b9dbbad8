"""The real clock."""

from __future__ import annotations

import time

__all__ = ["SystemClock"]


class SystemClock:
    """The monotone clock of the system: seconds since an arbitrary start. See `ports.Clock`."""

    now = staticmethod(time.monotonic)
