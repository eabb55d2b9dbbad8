"""The servers that run on this machine: each keeps a file in the cache directory while it listens.

    servers/<pid>.json      what `penstock ps` shows; only its owner may read it

Listing removes files whose process is gone (it was killed), and skips servers that do not answer.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click

from penstock.contract.errors import ConfigError

__all__ = ["RunningServer", "listed", "only_server", "running_servers"]

PATIENCE_SECONDS = 2.0
ACCESS = 0o600


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One server; `started` in seconds since 1970; `paths` are where its models are."""

    pid: int
    url: str
    model: str
    started: float
    paths: tuple[str, ...] = ()


@contextmanager
def listed(cache_dir: Path, url: str, model: str, paths: Sequence[Path] = ()) -> Iterator[None]:
    """Inside, `running_servers` finds this process. A failure to list it is reported, but does not prevent serving."""
    file = cache_dir / "servers" / f"{os.getpid()}.json"
    where = tuple(str(path.resolve()) for path in paths)
    text = json.dumps(asdict(RunningServer(os.getpid(), url, model, time.time(), where)))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, ACCESS), "w", encoding="utf-8") as writer:
            writer.write(text)
    except OSError as error:
        click.echo(f"penstock: penstock ps will not list this server: {file}: {error.strerror}", err=True)
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def running_servers(cache_dir: Path) -> list[RunningServer]:
    """The servers that answer, the oldest first."""
    found = []
    for file in (cache_dir / "servers").glob("*.json"):
        try:
            server = RunningServer(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # the server is ending, or has just started
            continue
        if not _is_alive(server.pid):
            file.unlink(missing_ok=True)
        elif _answers(server.url):
            found.append(server)
    return sorted(found, key=lambda server: server.started)


def only_server() -> str:
    """The URL of the server that runs on this machine.

    Raises:
        ConfigError: there is none, or there are several.
    """
    from penstock.weights.locate import default_cache_dir

    urls = [server.url for server in running_servers(default_cache_dir(os.environ))]
    if len(urls) != 1:
        there = f"several servers run here ({', '.join(urls)})" if urls else "no server runs here"
        raise ConfigError("base_url", f"is needed: {there}")
    return urls[0]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _answers(url: str) -> bool:
    """Whether an HTTP server answers there, with any status: the process id may have been reused."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
