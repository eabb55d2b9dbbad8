"""`penstock fleet`: one model on several engines, with Ray."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import click

from penstock.cli.interrupts import interrupts_taken
from penstock.cli.options import build_configs, config_options
from penstock.cli.running_servers import listed
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.fleet_config import FleetConfig
from penstock.contract.server_config import ServerConfig
from penstock.imports import lasting_imports

__all__ = ["command"]


@click.command(
    "fleet",
    cls=SectionedCommand,
    help="Serve MODEL over HTTP from several engines, which Ray starts, watches and replaces. Answers are the same as"
    " from `penstock serve`, whichever engine computes them; a stream that loses its engine continues on another.",
)
@config_options(FleetConfig, EngineConfig, ServerConfig)
@click.pass_context
def command(context: click.Context, /, **_: object) -> None:
    """Start the replicas and serve until interrupted."""
    engine_config, server_config, fleet = build_configs(context, EngineConfig, ServerConfig, FleetConfig)
    if not engine_config.kv_store:
        engine_config = replace(engine_config, kv_store=os.environ.get("PENSTOCK_KV_STORE") or "auto")
    with lasting_imports():
        from penstock.fleet_server import serve_fleet
        from penstock.weights.locate import default_cache_dir, locate_local

        cache_dir = default_cache_dir(os.environ)
    with ExitStack() as while_serving:

        def ready(url: str, model: str) -> None:
            path = locate_local(engine_config.model, cache_dir)
            paths = () if path is None else (path,)
            while_serving.enter_context(listed(cache_dir, url, model, paths))
            while_serving.enter_context(interrupts_taken())

        serve_fleet(engine_config, server_config, fleet, cache_dir, announce=click.echo, on_ready=ready)
