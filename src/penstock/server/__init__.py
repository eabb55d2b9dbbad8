"""The HTTP server: OpenAI's and Anthropic's endpoints, streaming, errors, limits, health, metrics, and a web page.

    openai | anthropic | tokens | admin | page    endpoints: each package lists its own as `Route` values
    delivery                                      a parsed request, through the engine, to the bytes of its answer
    http                                          what any HTTP API needs

    hosting                                       several models behind one port

`application` puts every route on its path, `http.run` puts the application on a socket. `penstock.api_fields` reads the
fields of requests; the engine is known only as `EngineClient`. Invariants: no field is silently ignored; every error is
an error object of the endpoint's API; the work for a client ends when the client disconnects.
"""

from __future__ import annotations

from penstock.server.admin.request_log import configure_logging, log_request
from penstock.server.admin.spans import open_spans
from penstock.server.application import create_app
from penstock.server.hosting import create_hosting_app
from penstock.server.http.access import open_access
from penstock.server.http.end import End, LastResort
from penstock.server.http.run import run
from penstock.server.http.systemd import open_notifier
from penstock.server.http.unread import unread_is_fine

__all__ = [
    "End",
    "LastResort",
    "configure_logging",
    "create_app",
    "create_hosting_app",
    "log_request",
    "open_access",
    "open_notifier",
    "open_spans",
    "run",
    "unread_is_fine",
]
