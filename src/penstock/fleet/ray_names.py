"""The replicas that Ray has in service, as its router last reported, for the client in the same process.

A separate module, because Ray pickles the router's module by value: a set in that module would exist in two copies.
"""

from __future__ import annotations

__all__ = ["in_service"]

in_service: set[str] = set()
"""Names of replicas; the thread of Ray's router changes it, other threads read it."""
