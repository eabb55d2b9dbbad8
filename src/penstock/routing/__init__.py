"""Decides which replica of a fleet gets a request: one that holds a prefix of its prompt, unless others are freer.

Pure: no clock, no network, no thread, no prompt text. The code that carries requests tells the router what replicas
report, what it sent and what ended. Uses the standard library alone.
"""

from __future__ import annotations

from penstock.routing.load import ReplicaLoad
from penstock.routing.router import Router

__all__ = ["ReplicaLoad", "Router"]
