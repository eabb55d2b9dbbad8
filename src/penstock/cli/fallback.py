"""The notice that torch computes instead of compiled kernels, for commands without a start report."""

from __future__ import annotations

import os

import click

__all__ = ["tell_torch_computes"]


def tell_torch_computes(device: str) -> None:
    """Print a line to standard error if a CPU has no compiled kernels; standard output stays the command's own.

    Args:
        device: the option `--device`.

    Raises:
        ConfigError: there is no such device, or PENSTOCK_ISA names kernels that cannot run here.
    """
    from penstock.exec.device import open_backend, resolve_device  # imports torch: too slow for --help

    where = resolve_device(device)
    reason = open_backend(where, 1, os.environ.get("PENSTOCK_ISA", "")).why_torch()
    if reason is not None and where.type == "cpu":
        click.echo(f"penstock: {reason}: torch kernels compute, slower, and exact up to rounding only", err=True)
