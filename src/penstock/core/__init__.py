"""Decisions: block pool, sequences, policies, scheduler, trace codec. Standard library only, no clock, no I/O."""

from penstock.core.block_pool import BlockPool, Lease
from penstock.core.cache_log import CacheLog
from penstock.core.replaying import ReplayReport, replay
from penstock.core.scheduler import Scheduler

__all__ = ["BlockPool", "CacheLog", "Lease", "ReplayReport", "Scheduler", "replay"]
