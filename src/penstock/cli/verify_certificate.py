"""`penstock verify --certificate FILE`: whether certified answers are what this machine computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from penstock.certificates import BadCertificate, Certificate, contract_differences, read
from penstock.contract.answer_contract import ARITHMETIC
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.imports import lasting_imports

__all__ = ["CERTIFIED_OPTIONS", "UNDECIDED", "verify_certificates"]

REFUTED = 1
UNDECIDED = 3
"""Exit code if nothing is refuted, but something was computed by other instructions, kernels or releases than here."""

CERTIFIED_OPTIONS = ("dtype", "quantization", "kv_cache_dtype")
"""Engine options that a certificate gives."""


def verify_certificates(path: Path, config: EngineConfig) -> None:
    """Print for each certificate of a file whether it holds, or where it first differs; exit unless all hold.

    Raises:
        ConfigError: the file cannot be read, or is of another model than the operator's.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError("--certificate", f"{path} cannot be read: {error.strerror}") from error
    lines = content.removesuffix(b"\n").split(b"\n")
    places = [str(path) if len(lines) == 1 else f"{path}:{number}" for number in range(1, len(lines) + 1)]
    refuted = undecided = 0
    certificates: list[tuple[str, Certificate]] = []
    for place, line in zip(places, lines, strict=True):
        try:
            certificates.append((place, read(line)))
        except BadCertificate as error:
            refuted += 1
            click.echo(f"{place}: differs: {error}")
    if certificates:
        more = _compute(certificates, config)
        refuted, undecided = refuted + more[0], undecided + more[1]
    equal = len(lines) - refuted - undecided
    click.echo(f"{equal} of {len(lines)} certified answers confirmed, {refuted} refuted, {undecided} undecided")
    if refuted or undecided:
        raise SystemExit(REFUTED if refuted else UNDECIDED)


def _compute(certificates: Sequence[tuple[str, Certificate]], config: EngineConfig) -> tuple[int, int]:
    """Compute certified answers again; returns how many are refuted, and how many undecided."""
    place, first = certificates[0]
    for other, certificate in certificates[1:]:
        differing = {name for name, *_ in contract_differences(certificate.contract, first.contract)}
        if differing - set(ARITHMETIC):
            raise ConfigError("--certificate", f"{other} is of another model, or another form, than {place}")
    with lasting_imports():
        from penstock.verify import open_recomputing  # imports torch: too slow for --help

    refuted = undecided = 0
    with open_recomputing(config, first.contract) as recomputing:
        for place, certificate in certificates:
            found = recomputing.recompute(certificate)
            refuted += found.refuted
            undecided += not found.refuted and not found.confirmed
            tokens = sum(len(choice.tokens) for choice in certificate.answer)
            click.echo(f"{place}: {found.explain()} ({len(certificate.answer)} choices, {tokens} tokens)")
    return refuted, undecided
