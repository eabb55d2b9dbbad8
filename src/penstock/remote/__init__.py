"""A runner in a process of its own: what is said to it, and what happens when it ends. Knows the contract alone."""

from penstock.remote.child import Build, ClosableRunner, serve_orders
from penstock.remote.connection import Connection
from penstock.remote.profiler import ProcessProfiler
from penstock.remote.runner import ProcessRunner

__all__ = ["Build", "ClosableRunner", "Connection", "ProcessProfiler", "ProcessRunner", "serve_orders"]
