"""A running server as its clients see it: requests, keys and errors of OpenAI's API.

Uses the standard library's HTTP client, because one request at a time needs no pool.
"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from penstock.bench.event_stream import Target
from penstock.contract.errors import ConfigError, EngineFault

__all__ = ["SHOWN_ERROR", "ApiClient", "Refused", "error_message", "reason_of"]

PATIENCE_SECONDS = 600.0
"""How long to wait for the next piece of an answer: a long prompt on a busy server takes time, as does loading."""

SHOWN_ERROR = 400
_NOT_LET_IN = (http.client.UNAUTHORIZED, http.client.FORBIDDEN)


class Refused(EngineFault):
    """The server answered with a status other than 200.

    Attributes:
        status: the HTTP status code.
        message: what the server said.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class ApiClient:
    """One server.

    Args:
        base_url: the URL up to and including `/v1`, which may be left out.
        api_key: sent as a bearer token, if not empty.

    Raises:
        ConfigError: the URL or the key is not valid.
    """

    def __init__(self, base_url: str, api_key: str = "") -> None:
        target = Target.parse(base_url)
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key", "holds characters that a header cannot")
        self._base_url, self._target = base_url, target
        self._path = target.path or "/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[dict[str, Any]]:
        """What `GET /v1/models` lists.

        Raises:
            ConfigError: no server answers there, it does not list its models as OpenAI's API does, or it does not
                accept the key.
        """
        try:
            listed = self.ask("GET", f"{self._path}/models")
            return [each for each in listed["data"] if isinstance(each, dict)]
        except (KeyError, TypeError, EngineFault) as error:
            message = f"{self._base_url} does not list its models as OpenAI's API does: {error}"
            raise ConfigError("base_url", message) from error

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request, and parse the JSON of its answer.

        Args:
            method: the HTTP method.
            path: the full path on the server, with `/v1` where it has that.
            body: sent as JSON; None for no body.

        Raises:
            ConfigError: no server answers there, or it does not accept the key.
            Refused: it answered with an error.
            EngineFault: its answer is not JSON.
        """
        connection = self.connect()
        try:
            answer = self.send(connection, method, path, None if body is None else json.dumps(body).encode())
            return json.loads(answer.read())
        except Refused as error:
            if error.status in _NOT_LET_IN:
                message = f"{self._base_url} wants one that it knows ({error}); give it here or in PENSTOCK_API_KEY"
                raise ConfigError("api_key", message) from error
            raise
        except ValueError as error:
            raise EngineFault(f"{path} is answered with what is no JSON: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError("base_url", f"no server answers at {self._base_url}: {reason_of(error)}") from error
        finally:
            connection.close()

    def connect(self) -> http.client.HTTPConnection:
        """A new connection, which opens with its first request."""
        target = self._target
        if target.secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(target.host, target.port, timeout=PATIENCE_SECONDS, context=context)
        return http.client.HTTPConnection(target.host, target.port, timeout=PATIENCE_SECONDS)

    def post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> http.client.HTTPResponse:
        """Send a request to `path` below `/v1`; the caller reads the answer. Raises what `send` raises."""
        return self.send(connection, "POST", self._path + path, json.dumps(body).encode())

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Send a request; the caller reads the answer.

        Raises:
            Refused: it answered with an error.
            OSError, http.client.HTTPException: the connection broke.
        """
        connection.request(method, path, body, self._headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise Refused(answer.status, error_message(answer.read(65536)))
        return answer


def error_message(body: bytes) -> str:
    """The message of an error's body, or the beginning of the body."""
    text = body.decode("utf-8", errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:SHOWN_ERROR]


def reason_of(error: BaseException) -> str:
    """Why a connection broke, in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
