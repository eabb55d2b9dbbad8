"""The HTTP side: OpenAI's endpoints, server-sent events, errors, limits, health.

    body -> strict_json -> fields, parameters -> chat | completions | generate -> exchange -> delivery
                                                (a body becomes an Exchange)     (outputs become an answer)

`application` puts these on routes, `run` on a socket. Nothing here knows more of the engine than `EngineClient`.
Three laws: no field is silently ignored; every error is an OpenAI error object; a client that leaves ends its work.
"""

from __future__ import annotations

from penstock.server.access import open_access
from penstock.server.application import create_app
from penstock.server.request_log import configure_logging, log_request
from penstock.server.run import run
from penstock.server.spans import open_spans

__all__ = ["configure_logging", "create_app", "log_request", "open_access", "open_spans", "run"]
