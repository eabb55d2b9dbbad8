"""A runner in a separate process: the messages to it, and what happens when it ends."""

from penstock.remote.child import Build, ClosableRunner, ending_with, serve_orders
from penstock.remote.connection import Closed, Connection
from penstock.remote.profiler import ProcessProfiler
from penstock.remote.runner import ProcessRunner
from penstock.remote.zygote import Nursery, can_fork

__all__ = [
    "Build",
    "ClosableRunner",
    "Closed",
    "Connection",
    "Nursery",
    "ProcessProfiler",
    "ProcessRunner",
    "can_fork",
    "ending_with",
    "serve_orders",
]
