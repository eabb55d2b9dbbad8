"""`penstock replay`: a recorded run on today's scheduler, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from tqdm import tqdm

from penstock.core.replaying import replay
from penstock.foresight.files import names_file, read_lines

__all__ = ["command"]

DIFFERS = 1
"""The exit code where a plan differs."""


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def command(file: Path) -> None:
    """Replay a record of `penstock serve --record FILE` without its model: the same inputs, to today's scheduler.

    Every plan must come out as it was recorded, to the last block. The first that does not is shown, and the exit code
    is 1. FILE may be compressed with gzip; a record of another version is refused.
    """
    with _progress(file) as advance, names_file(file):
        replayed = replay(read_lines(file, advance))
    over = f" over {replayed.seconds:.0f} s" if replayed.seconds else ""
    click.echo(f"{replayed.requests} requests, {replayed.tokens} tokens drawn{over}")
    click.echo(replayed.explain())
    if not replayed.same:
        raise SystemExit(DIFFERS)


@contextmanager
def _progress(file: Path) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, if that is a terminal, and what advances it by bytes of the file."""
    whole = file.stat().st_size
    with tqdm(desc="Replaying", unit="B", unit_scale=True, total=whole, leave=False, disable=None) as bar:
        yield bar.update
