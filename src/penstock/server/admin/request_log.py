"""The log: one line for each request, written as text or as JSON.

A line has ids, route, status, counts and times. Apart from a checked request id, it contains no text from the caller:
no prompt, no completion, no name. So a log is no more sensitive than a metric.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, TextIO

from penstock.api_fields.strict_json import JsonObject
from penstock.server.delivery.observation import RequestRecord
from penstock.server.http.unread import silence

__all__ = ["FORMATS", "JsonLines", "TextLines", "configure_logging", "log_request", "request_fields"]

logger = logging.getLogger("penstock.request")

LEVELS = {"penstock": logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.WARNING}
"""Logger -> its minimum level. The start report covers what uvicorn would log at INFO."""

QUIET = ("/health", "/metrics")
"""Routes that monitoring polls; logged only when they fail."""

WRONG = 400


def log_request(record: RequestRecord) -> None:
    """An observer that logs one line per request, except successful monitoring polls."""
    if record.method == "GET" and record.route.startswith(QUIET) and record.status < WRONG:
        return
    logger.info("request", extra={"fields": request_fields(record)})


def request_fields(record: RequestRecord) -> JsonObject:
    """The fields of a request's log line."""
    fields: JsonObject = {
        "id": record.id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "complete": record.complete,
        "ms": _ms(record.seconds),
    }
    if record.parsed is None or record.outputs is None:
        return fields
    outputs, usage, timings = record.outputs, record.outputs.usage, record.outputs.timings
    fields |= {
        "answer": record.parsed.id,
        "stream": record.parsed.stream,
        "prompts": len(record.parsed.requests),
        "choices": record.parsed.num_choices,
        "sent_tokens": outputs.sent_tokens,
        "finish_reasons": ",".join(sorted(outputs.finish_reasons)),
    }
    if outputs.usage.prompt_tokens:  # the engine reported usage: it does not if the client has left
        fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue_ms": _ms(timings.queue),
            "prefill_ms": _ms(timings.prefill),
            "decode_ms": _ms(timings.decode),
        }
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class JsonLines(logging.Formatter):
    """Each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger and message, then the record's own fields."""
        line: JsonObject = {
            "time": _instant(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """Each record as words and `name=value` pairs; line breaks and other control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The same fields as `JsonLines`, for people."""
        pairs = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        head = f"{_instant(record.created)} {record.levelname:<7} {record.name}: "
        line = head + _printable(record.getMessage()) + pairs
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


class _Lines(logging.StreamHandler[TextIO]):
    """Writes to standard error as long as somebody reads it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Silence the stream if its reader has gone; otherwise report the error."""
        if isinstance(sys.exception(), BrokenPipeError):
            silence(self.stream)
        else:
            super().handleError(record)


def configure_logging(log_format: str) -> logging.Handler:
    """Send the log to standard error in one of `FORMATS`, replacing the handler of an earlier call."""
    handler = _Lines()
    handler.setFormatter(FORMATS[log_format]())
    for name, level in LEVELS.items():
        root = logging.getLogger(name)
        root.handlers[:] = [handler]
        root.setLevel(level)
    return handler


def _fields(record: logging.LogRecord) -> JsonObject:
    fields: JsonObject = getattr(record, "fields", {})
    return fields


def _instant(seconds: float) -> str:
    """RFC 3339 time in UTC, with milliseconds."""
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _printable(str(value)) or "-"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
