"""A reader of server-sent events, written from the standard: WHATWG HTML, sections 9.2.5 and 9.2.6.

It knows nothing of our server. One leading BOM is dropped; lines end with CR, LF or CRLF; a line that begins with a
colon is a comment; `data` lines are joined with LF; a blank line dispatches; what is not dispatched at the end is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    data: str
    type: str = "message"
    id: str = ""


def read_events(stream: bytes) -> list[Event]:
    text = stream.decode("utf-8", errors="replace").removeprefix("\ufeff")
    events: list[Event] = []
    data: list[str] = []
    kind, last_id = "", ""
    lines = re.split(r"\r\n|\r|\n", text)
    for line in lines[:-1]:  # what follows the last line ending is no line yet
        if not line:
            if data:
                events.append(Event("\n".join(data), kind or "message", last_id))
            data, kind = [], ""
            continue
        if line.startswith(":"):
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last_id = value
    return events
