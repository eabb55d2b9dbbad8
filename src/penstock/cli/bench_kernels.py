"""`penstock bench kernels`: the compiled kernels one by one, against the machine's limits."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click
from tqdm import tqdm

from penstock.bench.limits import limits_line
from penstock.bench.machine import load_average, provenance
from penstock.cli.bench_report import json_only, json_option, report
from penstock.contract.errors import ConfigError

__all__ = ["command"]

NAMES = ("linear", "residual", "gated", "lookup", "attention", "rope", "norm", "activation", "sampler", "decoder")
"""The names in `bench.kernels.KERNELS`, which imports torch: too slow for --help."""


@click.command("kernels")
@click.option(
    "--kernel",
    "names",
    multiple=True,
    type=click.Choice(NAMES),
    help="Kernel to measure; by default all. May be given several times.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Compute threads; 0 takes one per physical core.",
)
@click.option(
    "--isa",
    default="",
    help="Instruction set, such as avx2; by default the value of PENSTOCK_ISA, else the best that this processor has.",
)
@json_option
def command(names: tuple[str, ...], threads: int, isa: str, target: Path | None) -> None:
    """Measure each compiled kernel in bytes and operations a second, against the machine's own limits."""
    head = provenance()
    from penstock.bench import kernels
    from penstock.exec.device import compute_threads, open_backend, resolve_device, set_torch_threads
    from penstock.kernels.cpu_backend import CpuBackend

    named = (isa, "isa") if isa else (os.environ.get("PENSTOCK_ISA", ""), "PENSTOCK_ISA")
    count = compute_threads(threads)
    backend = open_backend(resolve_device("cpu"), count, *named)
    if not isinstance(backend, CpuBackend):
        raise ConfigError("kernels", "this installation has none: a C++ compiler or Python's headers were missing")
    set_torch_threads(count, packed=True)
    limits = kernels.measure_limits(backend)
    with tqdm(desc="Measuring", unit="kernel", leave=False, disable=None) as bar:
        timed = []
        for row in kernels.kernel_rows(backend, names or NAMES, bar.set_postfix_str):
            timed.append(row)
            bar.update()
    limits = limits.or_better(kernels.measure_limits(backend))
    rows = [kernels.with_shares(row, limits) for row in timed]
    click.echo(limits_line(limits), err=json_only(target))
    record = head | {"kind": "kernels", "limits": asdict(limits), "rows": rows, "load_average_after": load_average()}
    report(kernels.kernel_table(rows), record, target)
