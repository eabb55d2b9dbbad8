"""`python bench/quality.py`: what each variant of Penstock and each format of llama.cpp costs in quality.

Like `penstock bench quality`, but also scores llama.cpp against the same float32 on the same tokens (see
`peers.perplexity`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peers.install import install_peer
from penstock.bench.machine import provenance
from penstock.cli import run
from penstock.cli.bench_quality import cut_text, progress, quality_options, quality_record
from penstock.cli.bench_report import report
from penstock.cli.options import build_configs
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault

if TYPE_CHECKING:
    from penstock.bench.quality import Quality, Reference, Steps

__all__ = ["command"]


@click.command("quality", cls=SectionedCommand)
@click.option(
    "--peer",
    "peer_names",
    multiple=True,
    help="llama.cpp (on the same file), or llama.cpp:Q8_0 and the like, which convert it first. May be given several"
    " times; by default, if it is installed, the file, F32, Q8_0 and Q4_0.",
)
@click.option(
    "--peers-dir", type=click.Path(path_type=Path, file_okay=False), help="Where peers are; by default in the cache."
)
@click.option("--install", is_flag=True, help="Install llama.cpp first if it is missing (pip and cmake).")
@quality_options
@click.pass_context
def command(
    context: click.Context,
    /,
    peer_names: tuple[str, ...],
    peers_dir: Path | None,
    install: bool,
    names: tuple[str, ...],
    tokens: int | None,
    context_tokens: int,
    text_file: Path | None,
    target: Path | None,
    **_: object,
) -> None:
    """Measure what each variant of MODEL's weights costs, ours and llama.cpp's, beside one float32."""
    (config,) = build_configs(context, EngineConfig)
    head = provenance()
    from penstock.bench import quality
    from penstock.loading import find_model  # imports torch, which --help does not need
    from penstock.weights.locate import default_cache_dir

    files = find_model(config)
    variants = quality.possible_variants(config, files, names)
    folder = peers_dir or default_cache_dir(os.environ) / "peers"
    models, absent = _find_peers(peer_names, folder, files.path, install)
    chunks, text_name = cut_text(files, text_file, context_tokens, tokens)
    passes = 1 + len(variants) + (1 + len(models) if models else 0)
    with progress(len(chunks.tokens) * passes) as steps:
        reference, rows = quality.measure(config, files, variants, chunks, steps)
        rows += _measure_peers(models, folder, config.threads, reference, absent, steps)
    record = head | quality_record(config, files, text_name, chunks, rows) | {"absent": absent}
    lines = [quality.quality_table(rows), *_float32_check(rows)]
    report("\n".join([*lines, *(f"{name}: {reason}" for name, reason in absent.items())]), record, target)


def _find_peers(
    names: tuple[str, ...], folder: Path, model: Path, install: bool
) -> tuple[dict[str, Path], dict[str, str]]:
    """The files to score llama.cpp on, by name, and why others are absent; whatever was asked for must be there."""
    from peers.perplexity import DEFAULT_PEERS, find_peer_model

    if install:
        install_peer("llama.cpp", folder, _say)
    found: dict[str, Path] = {}
    for name in dict.fromkeys(names or DEFAULT_PEERS):
        each = find_peer_model(name, folder, model)
        if isinstance(each, Path):
            found[name] = each
        elif names:
            raise ConfigError("peer", f"{each.name} {each.reason}")
        else:
            return found, {each.name: each.reason}  # one reason for all
    return found, {}


def _measure_peers(
    models: dict[str, Path],
    folder: Path,
    threads: int,
    reference: Reference,
    absent: dict[str, str],
    steps: Steps,
) -> list[Quality]:
    """Score every peer that can be scored; a peer that fails is added to `absent`, with its reason."""
    from peers.perplexity import score_peer, write_base
    from penstock.exec.device import compute_threads

    rows: list[Quality] = []
    if not models:
        return rows
    chunks = reference.chunks
    with tempfile.TemporaryDirectory(prefix="base-logits-", dir=folder) as work:
        base = Path(work) / "base"
        steps.name("base logits")
        perplexity = write_base(reference, base, steps)
        for name, model in models.items():
            steps.name(name)
            try:
                rows.append(score_peer(name, folder, model, base, perplexity, chunks, compute_threads(threads)))
            except EngineFault as fault:
                absent[name] = str(fault)
            steps(len(chunks.tokens))
    return rows


def _float32_check(rows: Sequence[Quality]) -> list[str]:
    """Lines that show whether both engines mean the same by float32 of these weights, if llama.cpp's was measured."""
    return [
        f"float32 of the same weights: perplexity {row.reference_perplexity:.4f} by Penstock,"
        f" {row.perplexity:.4f} by llama.cpp"
        for row in rows
        if row.name == "llama.cpp:F32"
    ]


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    run(command, "python bench/quality.py")
