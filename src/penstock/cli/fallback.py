"""What commands without a start report say where torch computes instead of compiled kernels."""

from __future__ import annotations

import os

import click

__all__ = ["tell_torch_computes"]


def tell_torch_computes(device: str) -> None:
    """One line on standard error where a CPU has no compiled kernels, whatever becomes of the command's output.

    Args:
        device: the option of that name.

    Raises:
        ConfigError: there is no such device, or PENSTOCK_ISA names kernels that cannot run here.
    """
    from penstock.exec.device import open_backend, resolve_device  # brings torch in: not for --help

    where = resolve_device(device)
    reason = open_backend(where, 1, os.environ.get("PENSTOCK_ISA", "")).why_torch()
    if reason is not None and where.type == "cpu":
        click.echo(f"penstock: {reason}: torch kernels compute, slower, and exact up to rounding only", err=True)
