"""`penstock serve`: one model, or several behind one port."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import click

from penstock.cli.hosted_models import choose_models
from penstock.cli.interrupts import interrupts_taken
from penstock.cli.options import build_configs, config_options
from penstock.cli.running_servers import listed
from penstock.cli.sections import SectionedCommand, complete_model
from penstock.contract.config import EngineConfig
from penstock.contract.hosting import HostedModel, ModelChoice
from penstock.contract.server_config import HostingConfig, ServerConfig
from penstock.imports import lasting_imports

__all__ = ["command"]


@click.command(
    "serve",
    cls=SectionedCommand,
    help="Serve MODEL over HTTP, compatible with OpenAI's API; without MODEL, the small default model. Several models"
    " share one port, and each is loaded when a request first names it.",
)
@click.option("--checkpoint-path", help="Another way to give MODEL, as in RoseInfer's server.", metavar="PATH")
@config_options(EngineConfig, ServerConfig, HostingConfig)
@click.argument("more", nargs=-1, metavar="[MODEL]...", shell_complete=complete_model)
@click.pass_context
def command(context: click.Context, /, checkpoint_path: str | None, more: tuple[str, ...], **_: object) -> None:
    """Assemble the engine and serve until interrupted."""
    if checkpoint_path is not None:
        context.params["model"] = checkpoint_path
    engine_config, server_config, hosting = build_configs(context, EngineConfig, ServerConfig, HostingConfig)
    if not engine_config.kv_store:
        engine_config = replace(engine_config, kv_store=os.environ.get("PENSTOCK_KV_STORE") or "auto")
    given = context.get_parameter_source("model") is not click.core.ParameterSource.DEFAULT or checkpoint_path
    models = (engine_config.model, *more) if given else ()
    choices = choose_models(context, engine_config, hosting, models)
    if choices:
        _serve_several(choices, server_config, hosting)
    else:
        _serve_one(engine_config, server_config)


def _serve_one(engine_config: EngineConfig, server_config: ServerConfig) -> None:
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
            while_serving.enter_context(_listening(cache_dir, url, model, () if path is None else (path,)))

        serve(engine_config, server_config, cache_dir, announce=click.echo, on_ready=ready, starting=starting)


def _serve_several(choices: Sequence[ModelChoice], server_config: ServerConfig, hosting: HostingConfig) -> None:
    with lasting_imports():
        from penstock.hosting_server import serve_models
        from penstock.weights.locate import default_cache_dir

        cache_dir = default_cache_dir(os.environ)

    with ExitStack() as while_serving:

        def ready(url: str, models: Sequence[HostedModel]) -> None:
            names, paths = ", ".join(each.names[0] for each in models), [each.path for each in models]
            while_serving.enter_context(_listening(cache_dir, url, names, paths))

        serve_models(choices, hosting, server_config, cache_dir, announce=click.echo, on_ready=ready)


@contextmanager
def _listening(cache_dir: Path, url: str, model: str, paths: Sequence[Path]) -> Iterator[None]:
    """Inside, `penstock ps` lists this server, and the first interrupt shuts it down gracefully."""
    with listed(cache_dir, url, model, paths), interrupts_taken():
        yield
