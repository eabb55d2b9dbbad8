"""Progress display: a bar on a terminal, one line elsewhere.

Decides how long-running work is shown, not what the work is. Bars go to stderr; stdout belongs to the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["byte_bar"]


@contextmanager
def byte_bar(title: str, total: int, show: bool, *, delay: float = 0.0, announce: bool = True) -> Iterator[tqdm]:
    """A progress bar over `total` bytes.

    Args:
        title: what is going on, in a few words.
        total: number of bytes expected.
        show: False for silence.
        delay: seconds of work before the bar appears.
        announce: where stderr is not a terminal, write `title` on one line instead of drawing a bar.
    """
    terminal = sys.stderr.isatty()
    if show and announce and not terminal:
        sys.stderr.write(f"{title}\n")
        sys.stderr.flush()
    with tqdm(
        total=total,
        desc=title,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        disable=not (show and terminal),
        delay=delay,
        file=sys.stderr,
    ) as bar:
        yield bar
