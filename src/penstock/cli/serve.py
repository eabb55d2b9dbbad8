"""`penstock serve`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import click

from penstock.cli.imports import lasting_imports
from penstock.cli.interrupts import interrupts_taken
from penstock.cli.options import build_configs, config_options
from penstock.cli.running_servers import listed
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig, ServerConfig

__all__ = ["command"]


@click.command(
    "serve",
    cls=SectionedCommand,
    help="Serve MODEL over HTTP, compatible with OpenAI's API; by default the small default model.",
)
@click.option("--checkpoint-path", help="Another way to write MODEL, as RoseInfer's server has it.", metavar="PATH")
@config_options(EngineConfig, ServerConfig)
@click.pass_context
def command(context: click.Context, /, checkpoint_path: str | None, **_: object) -> None:
    """Assemble the engine and serve until interrupted."""
    if checkpoint_path is not None:
        context.params["model"] = checkpoint_path
    engine_config, server_config = build_configs(context, EngineConfig, ServerConfig)
    if not engine_config.kv_store:
        engine_config = replace(engine_config, kv_store=os.environ.get("PENSTOCK_KV_STORE") or "auto")
    with lasting_imports():
        from penstock.app import serve
        from penstock.computing import start_computing
        from penstock.weights.locate import default_cache_dir, locate_local

        cache_dir = default_cache_dir(os.environ)
        starting = start_computing(engine_config, cache_dir, serves=True)  # another process imports in the meantime
        import penstock.server  # noqa: F401 - which `serve` imports when it is called

    with ExitStack() as while_serving:

        def ready(url: str, model: str) -> None:
            path = locate_local(engine_config.model, cache_dir)
            while_serving.enter_context(listed(cache_dir, url, model, path))
            while_serving.enter_context(interrupts_taken())  # from now on the server shuts down gracefully

        serve(engine_config, server_config, cache_dir, announce=click.echo, on_ready=ready, starting=starting)
