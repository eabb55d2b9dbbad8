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
    "End the answer with its certificate, as text; `penstock verify --certificate` can check it anywhere.",
)
CERTIFICATE_HEADER = "x-penstock-certificate"


def check_certified(prompts: int, *, prompt_only: bool) -> None:
    """Refuse a request whose answer cannot have a certificate.

    Raises:
        InvalidParameter: the request has several prompts, or generates nothing.
    """
    if prompts > 1:
        raise InvalidParameter(
            "certificate", f"certificate is of one prompt, and this has {prompts}; send them singly."
        )
    if prompt_only:
        raise InvalidParameter("certificate", "certificate is of generated tokens, and max_tokens is 0.")


def check_unasked_by_header(headers: Mapping[str, str]) -> None:
    """Refuse a request that asks for a certificate with the header in which answers carry its digest.

    Raises:
        InvalidParameter: the request has that header.
    """
    if CERTIFICATE_HEADER in headers:
        message = f'{CERTIFICATE_HEADER} is a header of answers; ask with "certificate": true in the body.'
        raise InvalidParameter(CERTIFICATE_HEADER, message, code="unsupported_parameter")


def certificate_field(certificate: str, *, wanted: bool) -> JsonObject:
    """The answer's `certificate` field, null if it has no certificate; no field at all unless `wanted`."""
    return {"certificate": certificate or None} if wanted else {}


def certificate_headers(certificate: str) -> dict[str, str]:
    """The headers of a complete answer with this certificate; none if it is ""."""
    return {CERTIFICATE_HEADER: f"sha256:{json.loads(certificate)['digest']}"} if certificate else {}
