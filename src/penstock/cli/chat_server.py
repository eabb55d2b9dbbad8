"""A running server as the partner of a conversation, through OpenAI's streamed chat completions.

Works with any server that offers them. Uses the load test's event reader.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from penstock.bench.event_stream import EventReader
from penstock.cli.api_client import SHOWN_ERROR, ApiClient, Refused, error_message, reason_of
from penstock.cli.chat_partner import Piece
from penstock.contract.errors import ConfigError, EngineFault
from penstock.contract.request import Message

__all__ = ["ServerPartner"]

INVALID = (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY)


class ServerPartner:
    """A server, which is first asked for its models.

    Args:
        base_url: the URL up to and including `/v1`, which may be left out.
        model: a name that the server serves; "" for the first one that it lists.
        api_key: sent as a bearer token, if not empty.

    Raises:
        ConfigError: no server answers there, it does not list its models as OpenAI's API does, it does not serve
            `model`, or it does not accept the key.
    """

    def __init__(self, base_url: str, model: str = "", api_key: str = "") -> None:
        self._client = ApiClient(base_url, api_key)
        served = self._client.models()
        chosen = next((each for each in served if model in ("", each.get("id"))), None)
        if chosen is None:
            there = ", ".join(str(each.get("id")) for each in served) or "none"
            raise ConfigError("model", f"{model!r} is not served at {base_url}; there: {there}")
        self.name = str(chosen.get("id"))
        context = chosen.get("max_model_len")
        self.context = context if isinstance(context, int) else 0
        self._counts_each_piece: bool | None = None  # not known before the first answer

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[Piece]:
        """See `Partner.stream`."""
        body = {
            "model": self.name,
            "messages": [{"role": each.role, "content": each.content} for each in messages],
            "stream": True,
            **{name: value for name, value in params.items() if value is not None},
        }
        reader, ended = EventReader(), False
        connection = self._client.connect()
        try:
            answer = self._ask(connection, body)
            while bytes_ := answer.read1(65536):
                for data in reader.push(bytes_):
                    if data == "[DONE]":
                        ended = True
                        continue
                    piece = _piece(data)
                    ended = ended or bool(piece.finish_reason)
                    yield piece
            if not ended:
                raise EngineFault("the answer broke off: the server ended the connection")
        except (OSError, http.client.HTTPException) as error:
            raise EngineFault(f"the connection broke: {reason_of(error)}") from error
        finally:
            connection.close()  # ends an answer that is still being written

    def _ask(self, connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        """Ask for an answer with the token counts in every piece, because a stopped answer never gets its last piece.

        OpenAI's API reports usage only at the end: if a server refuses the request and has never given counts in every
        piece, it is asked once more without them.
        """
        if self._counts_each_piece is not False:
            try:
                answer = self._post(connection, body, {"include_usage": True, "continuous_usage_stats": True})
            except Refused as error:
                if self._counts_each_piece or error.status not in INVALID:
                    raise
                connection.close()  # the next request reopens it
            else:
                self._counts_each_piece = True
                return answer
        answer = self._post(connection, body, {"include_usage": True})
        self._counts_each_piece = False
        return answer

    def _post(
        self, connection: http.client.HTTPConnection, body: Mapping[str, Any], stream_options: Mapping[str, bool]
    ) -> http.client.HTTPResponse:
        return self._client.post(connection, "/chat/completions", {**body, "stream_options": stream_options})


def _piece(data: str) -> Piece:
    """Parse one event of the stream.

    Raises:
        EngineFault: the event is an error, or not a chunk of an answer.
    """
    try:
        event = json.loads(data)
        if "error" in event:
            raise EngineFault(error_message(data.encode()))
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        delta, usage = choice.get("delta") or {}, event.get("usage") or {}
        return Piece(
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
            prompt_tokens=usage.get("prompt_tokens", 0),
            tokens=usage.get("completion_tokens", 0),
            finish_reason=choice.get("finish_reason") or "",
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise EngineFault(f"the server sent what is no chunk of an answer: {data[:SHOWN_ERROR]}") from error
