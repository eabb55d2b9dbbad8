"""A runner in a separate process: the messages to it, and what happens when it ends."""

from penstock.remote.child import Build, ClosableRunner, serve_orders
from penstock.remote.connection import Connection
from penstock.remote.profiler import ProcessProfiler
from penstock.remote.runner import ProcessRunner

__all__ = ["Build", "ClosableRunner", "Connection", "ProcessProfiler", "ProcessRunner", "serve_orders"]
