"""The proof of exactness: the same requests alone and in many company, compared bit by bit."""

from penstock.verify.episode import ScheduleCrashed
from penstock.verify.extent import SMALL, Extent
from penstock.verify.proof import open_subject, profile, verify
from penstock.verify.report import Report
from penstock.verify.subject import Subject

__all__ = ["SMALL", "Extent", "Report", "ScheduleCrashed", "Subject", "open_subject", "profile", "verify"]
