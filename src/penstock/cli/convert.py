"""`penstock convert`: a GPT-2 in a `.pt` file becomes a model directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from penstock.contract.errors import ConfigError

__all__ = ["command"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="IN.pt")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), metavar="OUT_DIR")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory with a tokenizer.json, to copy beside the model.",
)
def command(source: Path, directory: Path, tokenizer: Path | None) -> None:
    """Convert the GPT-2 in IN.pt, a dictionary with `config` and `model`, to config.json and model.safetensors.

    The pickle is not needed after that. Only tensors and plain values are read from it; anything else is refused.
    """
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError("--tokenizer", f"{tokenizer} has no tokenizer.json")
    from penstock.weights.pt_checkpoint import read_pt  # imports torch: too slow for --help
    from penstock.weights.safetensors_writer import write_model_directory

    checkpoint = read_pt(source)
    write_model_directory(directory, checkpoint.config, checkpoint.tensors)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, directory / name)
    if checkpoint.left_out:
        click.echo(f"left out: {', '.join(checkpoint.left_out)}, which only a training needs", err=True)
    click.echo(str(directory))
