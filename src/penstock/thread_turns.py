"""How long a thread of Python may go on while others wait for their turn."""

from __future__ import annotations

import sys

__all__ = ["take_short_turns"]

_TURN_SECONDS = 0.001


def take_short_turns() -> None:
    """Let threads of this process take turns of a millisecond, in place of Python's five.

    For a process that computes steps and does other work beside them: a step has many moments at which it waits for its
    turn, at each of them for the turns of others.
    """
    sys.setswitchinterval(_TURN_SECONDS)
