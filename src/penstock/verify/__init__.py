"""The proof of exactness: runs every request alone, then all together in many ways, and compares bit by bit."""

from penstock.verify.budget import SMALL, Budget
from penstock.verify.proof import open_target, profile, verify
from penstock.verify.recomputing import Recomputed, Recomputing, open_recomputing
from penstock.verify.report import Report
from penstock.verify.run import ScheduleCrashed
from penstock.verify.target import Target

__all__ = [
    "SMALL",
    "Budget",
    "Recomputed",
    "Recomputing",
    "Report",
    "ScheduleCrashed",
    "Target",
    "open_target",
    "open_recomputing",
    "profile",
    "verify",
]
