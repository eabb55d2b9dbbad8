"""The replicas that Ray has in service, as its router last said, for the client in the same process.

A module of its own, because Ray pickles the router's module by value: names in that one would be another copy's.
"""

from __future__ import annotations

__all__ = ["in_service"]

in_service: set[str] = set()
"""Names of replicas; changed by the thread of Ray's router, read by others."""
