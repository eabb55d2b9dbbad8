"""The proof of exactness: every request alone, then all of them together in many ways, compared bit by bit."""

from penstock.verify.budget import SMALL, Budget
from penstock.verify.proof import open_target, profile, verify
from penstock.verify.report import Report
from penstock.verify.run import ScheduleCrashed
from penstock.verify.target import Target

__all__ = ["SMALL", "Budget", "Report", "ScheduleCrashed", "Target", "open_target", "profile", "verify"]
