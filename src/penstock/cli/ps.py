"""`penstock ps`."""

from __future__ import annotations

import os
import time

import click

__all__ = ["command"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@click.command("ps")
def command() -> None:
    """List the servers running on this machine: process id, model, running time and URL."""
    from penstock.cli.running_servers import running_servers
    from penstock.weights.locate import default_cache_dir

    servers = running_servers(default_cache_dir(os.environ))
    if not servers:
        click.echo("no server runs here; start one with: penstock serve", err=True)
        return
    width = max(len("MODEL"), *(len(server.model) for server in servers))
    click.echo(f"{'PID':>7}  {'MODEL':{width}}  {'FOR':>8}  URL")
    for server in servers:
        click.echo(f"{server.pid:7}  {server.model:{width}}  {age(time.time() - server.started):>8}  {server.url}")


def age(seconds: float) -> str:
    """A duration in its two largest units: `42 s`, `7 min`, `3 h 5 m`, `2 d 1 h`."""
    whole = max(0, int(seconds))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} m"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"
