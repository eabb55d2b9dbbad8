"""The certificate that a request may ask for: JSON text that says which model answered what."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.api_fields.fields import BOOLEAN, Field
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter

__all__ = [
    "CERTIFICATE",
    "CERTIFICATE_HEADER",
    "certificate_field",
    "certificate_headers",
    "check_certified",
    "check_unasked_by_header",
]

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


def check_unasked_by_header(headers: Mapping[str, str]) -> None:
    """Make sure that nobody asks for a certificate by the header that an answer has.

    Raises:
        InvalidParameter: a request has it.
    """
    if CERTIFICATE_HEADER in headers:
        message = f'{CERTIFICATE_HEADER} is a header of answers; ask with "certificate": true in the body.'
        raise InvalidParameter(CERTIFICATE_HEADER, message, code="unsupported_parameter")


def certificate_field(certificate: str, *, wanted: bool) -> JsonObject:
    """The field of an answer, null if it has no certificate; none if it is not wanted."""
    return {"certificate": certificate or None} if wanted else {}


def certificate_headers(certificate: str) -> dict[str, str]:
    """The headers of a complete answer with this certificate; none if it is ""."""
    return {CERTIFICATE_HEADER: f"sha256:{json.loads(certificate)['digest']}"} if certificate else {}
