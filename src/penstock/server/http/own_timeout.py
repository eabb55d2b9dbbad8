"""How long a caller lets its request take: the header `x-request-timeout`.

What the official clients say of their own patience (`x-stainless-read-timeout`, `x-stainless-timeout`) is not read: it
is for each wait and not for an answer, and a client that gives up disconnects, which ends its request anyhow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.contract.errors import InvalidParameter

__all__ = ["TIMEOUT_HEADER", "own_timeout"]

TIMEOUT_HEADER = "x-request-timeout"
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def own_timeout(headers: Mapping[str, str], most: float) -> float:
    """Seconds that a request may take by its caller's word, at most `most` (0: any); 0.0 where it says nothing.

    Raises:
        InvalidParameter: the header does not hold a number of seconds above 0.
    """
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return 0.0
    seconds = float(given) if SECONDS.fullmatch(given) else 0.0
    if not seconds:
        raise InvalidParameter(TIMEOUT_HEADER, f"{TIMEOUT_HEADER} must be a number of seconds above 0, such as 30.")
    return min(seconds, most) if most else seconds
