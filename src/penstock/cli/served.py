"""`penstock served`: the models of a running server: lists, loads, unloads and pins them."""

from __future__ import annotations

import os
from typing import Any

import click

from penstock.contract.errors import ConfigError
from penstock.contract.memory import readable_bytes

__all__ = ["command"]

_URL = click.option(
    "--base-url",
    default="",
    help="URL of the server, such as http://127.0.0.1:8000; by default the only one that `penstock ps` lists.",
)
_KEY = click.option(
    "--api-key", default="", help="Admin key, if the server has keys; by default the value of PENSTOCK_API_KEY."
)


@click.group("served")
def command() -> None:
    """List, load, unload and pin the models of a running server."""


@command.command("list")
@_URL
@_KEY
def list_models(base_url: str, api_key: str) -> None:
    """List every model of the server, with its state and memory."""
    rows: list[tuple[str, ...]] = [("MODEL", "STATE", "PINNED", "REQUESTS", "MEMORY", "CONTEXT")]
    rows += [_row(each) for each in _client(base_url, api_key).models() if not each.get("parent")]  # else an adapter
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command.command("load")
@click.argument("model")
@_URL
@_KEY
def load(model: str, base_url: str, api_key: str) -> None:
    """Load MODEL, and wait until it is loaded."""
    _move("load", model, base_url, api_key)


@command.command("unload")
@click.argument("model")
@_URL
@_KEY
def unload(model: str, base_url: str, api_key: str) -> None:
    """Unload MODEL once it has answered its present requests. A pinned model is unpinned."""
    _move("unload", model, base_url, api_key)


@command.command("pin")
@click.argument("model")
@_URL
@_KEY
def pin(model: str, base_url: str, api_key: str) -> None:
    """Load MODEL, and never unload it to make room for others."""
    _move("pin", model, base_url, api_key)


@command.command("unpin")
@click.argument("model")
@_URL
@_KEY
def unpin(model: str, base_url: str, api_key: str) -> None:
    """Allow MODEL to be unloaded again to make room for others."""
    _move("unpin", model, base_url, api_key)


def _move(action: str, model: str, base_url: str, api_key: str) -> None:
    from penstock.cli.api_client import Refused

    client = _client(base_url, api_key)
    listed = {str(each.get("id")): each for each in client.models()}
    if model not in listed:
        raise ConfigError("MODEL", f"{model!r} is not served there; there: {', '.join(listed) or 'none'}")
    if "status" not in listed[model]:
        raise ConfigError("MODEL", f"{model} is the only model of its server, which loads and unloads none")
    try:
        moved = client.ask("POST", f"/models/{action}", {"model": model})
    except Refused as error:
        raise ConfigError("MODEL", f"{model}: {error.message}") from error
    click.echo("  ".join(cell for cell in _row(moved) if cell))


def _client(base_url: str, api_key: str) -> Any:
    from penstock.cli.api_client import ApiClient
    from penstock.cli.running_servers import only_server

    return ApiClient(base_url or only_server(), api_key or os.environ.get("PENSTOCK_API_KEY", ""))


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    """One model of `GET /v1/models`. A server of one model reports no status: the model is loaded, and stays."""
    status: dict[str, Any] = model.get("status") or {"value": "loaded", "pinned": True}
    context, held = model.get("max_model_len"), status.get("bytes")
    return (
        str(model.get("id")),
        str(status.get("value")),
        "pinned" if status.get("pinned") else "",
        str(status.get("requests", "")),
        readable_bytes(held) if held else "",
        str(context) if context else "",
    )
