"""The caller's own time limit for a request: the header `x-request-timeout`.

The timeout headers of the official clients (`x-stainless-read-timeout`, `x-stainless-timeout`) are not read: they limit
each wait and not a whole response, and a client that gives up disconnects, which ends its request anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.contract.errors import InvalidParameter

__all__ = ["TIMEOUT_HEADER", "own_timeout"]

TIMEOUT_HEADER = "x-request-timeout"
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def own_timeout(headers: Mapping[str, str], most: float) -> float:
    """The caller's time limit in seconds, capped at `most` (0 for no cap); 0.0 without the header.

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
