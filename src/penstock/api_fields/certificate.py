"""The certificate that a request may ask for: JSON text that says which model answered what."""

from __future__ import annotations

import json

from penstock.api_fields.fields import BOOLEAN, Field
from penstock.contract.errors import InvalidParameter

__all__ = ["CERTIFICATE", "CERTIFICATE_HEADER", "certificate_headers", "check_certified"]

CERTIFICATE = Field(
    "certificate",
    BOOLEAN,
    "Whether the answer ends with its certificate, as text, which `penstock verify --certificate` checks anywhere.",
)
CERTIFICATE_HEADER = "x-penstock-certificate"


def check_certified(prompts: int, *, prompt_only: bool) -> None:
    """Make sure that an answer is of the kind that has a certificate.

    Raises:
        InvalidParameter: it has several prompts, or generates nothing.
    """
    if prompts > 1:
        raise InvalidParameter(
            "certificate", f"certificate is of one prompt, and this has {prompts}; send them singly."
        )
    if prompt_only:
        raise InvalidParameter("certificate", "certificate is of generated tokens, and max_tokens is 0.")


def certificate_headers(certificate: str) -> dict[str, str]:
    """The headers of a complete answer with this certificate; none if it is ""."""
    return {CERTIFICATE_HEADER: f"sha256:{json.loads(certificate)['digest']}"} if certificate else {}
