"""`--normalize-prompts`: take lines that change from request to request out of the start of a conversation.

Agents write a counter, a date or an id into their system prompt, so everything after it misses the prefix cache. A line
that means nothing to a model is dropped; a line that may mean something is moved to the end of the message. Decides
which lines these are (docs/changing-lines.md lists them, and a test checks the list): few, and only whole lines of a
known form. Only the first message is considered, and only if it is a system message.
"""

from __future__ import annotations

import re
from dataclasses import replace

from penstock.contract.request import ChatPrompt, Message

__all__ = ["DROPPED", "MOVED", "normalized"]

_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_NUMBER = r"\d[\d:/.+\-tz]*(?:st|nd|rd|th|[ap]m)?"
_ZONE = r"(?:utc|gmt|[a-z]{1,4}t)(?:[+\-]\d[\d:]*)?|[+\-]\d[\d:]*|[a-z]+/[a-z_]+"
_PIECE = rf"(?:{_NUMBER}|{_DAY}|{_MONTH}|[ap]\.?m\.?|at|of|{_ZONE})"
_TIME = rf"{_PIECE}(?:[ ,()]+{_PIECE})*[).]*"
_WHAT = r"(?:date|time|datetime|date and time|date/time|date & time)"
_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,64}"

DROPPED = {
    "billing-header": re.compile(
        r"\A\s*x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\n]*(?:;|(?=\n|\Z)))+[ \t]*(?:\n+|\Z)?", re.IGNORECASE
    ),
}
"""Name -> pattern of what is dropped, only at the beginning of the message."""

MOVED = {
    "date": re.compile(
        rf"(?:[-*][ ]+)?(?:(?:the )?current|today['\u2019]s) {_WHAT}(?: is)?:?[ ]+{_TIME}", re.IGNORECASE
    ),
    "request-id": re.compile(
        rf"(?:[-*][ ]+)?(?:x-)?(?:request|session|conversation|trace)[ _-]?id(?: is)?[ ]*[:=]?[ ]*(?:{_ID})",
        re.IGNORECASE,
    ),
}
"""Name -> pattern of a whole line, without surrounding spaces, that is moved to the end of the message."""


def normalized(prompt: ChatPrompt) -> tuple[ChatPrompt, tuple[str, ...]]:
    """The conversation with changing lines dropped or moved, and what was done, such as `moved date`."""
    if not prompt.messages or prompt.messages[0].role != "system":
        return prompt, ()
    first = prompt.messages[0]
    content, done = _normalized_text(first.content)
    if not done:
        return prompt, ()
    others = prompt.messages[1:]
    kept: tuple[Message, ...] = (replace(first, content=content),) if content or not others else ()
    return replace(prompt, messages=(*kept, *others)), done


def _normalized_text(text: str) -> tuple[str, tuple[str, ...]]:
    done = []
    for name, pattern in DROPPED.items():
        rest = pattern.sub("", text, count=1)
        if rest != text:
            done.append(f"dropped {name}")
            text = rest
    stay: list[str] = []
    move: list[str] = []
    names: dict[str, None] = {}  # in order, each once
    for line in text.split("\n"):
        found = next((name for name, pattern in MOVED.items() if pattern.fullmatch(line.strip())), "")
        (move if found else stay).append(line)
        if found:
            names[f"moved {found}"] = None
    moved = "\n".join([*stay, *move])
    if moved != text:  # else they are at the end already
        done += names
    return moved, tuple(done)
