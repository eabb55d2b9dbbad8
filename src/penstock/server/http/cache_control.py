"""What a caller wants of the answer cache: the request header `cache-control` (RFC 9111, section 5.2.1).

Directives that this server does not act on are ignored, as the standard requires.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.contract.request import AnswerCaching

__all__ = ["answer_caching"]


def answer_caching(headers: Mapping[str, str]) -> AnswerCaching:
    """What the header allows; everything if there is none. A malformed age counts as 0."""
    most_age, keep = float("inf"), True
    for directive in headers.get("cache-control", "").split(","):
        name, _, value = directive.strip().lower().partition("=")
        if name == "no-store":
            keep = False
        elif name == "no-cache":
            most_age = -1.0
        elif name == "max-age":
            age = value.strip('"')
            most_age = min(most_age, float(age) if age.isascii() and age.isdigit() else 0.0)
    return AnswerCaching(most_age, keep)
