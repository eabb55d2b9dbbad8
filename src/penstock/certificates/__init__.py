"""Certificates of answers: what was asked of which model, what it answered, and how to check that claim.

A certificate is a plain value with one spelling. Nothing here computes an answer, reads a file or knows an engine.
"""

from __future__ import annotations

from penstock.certificates.certificate import (
    VERSION,
    BadCertificate,
    Certificate,
    CertifiedChoice,
    CertifiedGrammar,
    CertifiedReply,
    CertifiedRequest,
    read,
    seal,
    write,
)
from penstock.certificates.comparison import Difference, contract_differences, first_difference
from penstock.certificates.trail import MARK_CHARS, Trail

__all__ = [
    "MARK_CHARS",
    "VERSION",
    "BadCertificate",
    "Certificate",
    "CertifiedChoice",
    "CertifiedGrammar",
    "CertifiedReply",
    "CertifiedRequest",
    "Difference",
    "Trail",
    "contract_differences",
    "first_difference",
    "read",
    "seal",
    "write",
]
