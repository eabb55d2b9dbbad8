"""Runs work that may have to be killed: processes answer orders within a budget, and threads take turns to use them.

A worker's program calls `child.serve_orders`; its clients use a `WorkerPool`. Knows neither grammars nor templates.
"""

from __future__ import annotations

from penstock.workers.pool import WorkerPool
from penstock.workers.process import Budget, Exceeded, Lost, WorkerProcess
from penstock.workers.turns import Turns

__all__ = ["Budget", "Exceeded", "Lost", "Turns", "WorkerPool", "WorkerProcess"]
