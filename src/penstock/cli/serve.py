"""`penstock serve`."""

from __future__ import annotations

import os

import click

from penstock.cli.imports import lasting_imports
from penstock.cli.options import build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig, ServerConfig

__all__ = ["command"]


@click.command(
    "serve",
    cls=SectionedCommand,
    help="Serve MODEL over HTTP, compatible with OpenAI's API; by default the small default model.",
)
@click.option("--checkpoint-path", help="Another way to write MODEL, as RoseInfer's server has it.", metavar="MODEL")
@config_options(EngineConfig, ServerConfig)
@click.pass_context
def command(context: click.Context, /, checkpoint_path: str | None, **_: object) -> None:
    """Assemble the engine and serve until interrupted."""
    if checkpoint_path is not None:
        context.params["model"] = checkpoint_path
    engine_config, server_config = build_configs(context, EngineConfig, ServerConfig)
    with lasting_imports():
        import penstock.server  # noqa: F401 - which `serve` imports when it is called
        from penstock.app import serve
        from penstock.weights.locate import default_cache_dir

    serve(engine_config, server_config, default_cache_dir(os.environ), announce=click.echo)
