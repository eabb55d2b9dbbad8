"""`penstock tokenizer`: a model's tokenizer as a directory that transformers reads."""

from __future__ import annotations

import os
from pathlib import Path

import click

from penstock.cli.sections import complete_model
from penstock.contract.config import EngineConfig

__all__ = ["command"]


@click.command("tokenizer")
@click.argument("model", metavar="MODEL", shell_complete=complete_model)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
def command(model: str, directory: Path) -> None:
    """Write MODEL's tokenizer and chat template into DIR, as transformers' AutoTokenizer reads them.

    For programs that count or render prompts themselves, such as load generators. The files are generated from a GGUF
    file, or copied from a model directory. DIR must be new or empty.
    """
    from penstock.loading import find_model  # imports torch: too slow for --help
    from penstock.text.huggingface_writer import write_tokenizer
    from penstock.weights.locate import default_cache_dir

    write_tokenizer(find_model(EngineConfig(model=model), default_cache_dir(os.environ)).text, directory)
    click.echo(str(directory))
