"""Makes requests that use all that an answer depends on: greedy, seeded, choices, forms, stops, penalties, tools.

A random request has a seed, so that its answer is known beforehand: it is what the same request said when nothing went
wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CHAT", "COMPLETIONS", "KINDS", "Request", "mixed_requests", "random_request"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_OPENINGS = (
    "Once upon a time", "The sea was", "In the beginning", "A list of", "Nobody knew why", "The recipe needs",
    "On Monday the", "Three names:", "It is said that", "Under the bridge", "The first law", "When the train",
)  # fmt: skip
_WORDS = (
    "river", "stone", "lamp", "garden", "letter", "window", "clock", "harbour", "silence", "engine", "paper", "winter",
)  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "set_alarm",
        "description": "Set an alarm.",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"type": "integer", "maximum": 23}, "label": {"type": "string", "maxLength": 60}},
            "required": ["hour", "label"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        kind: one of `KINDS`.
    """

    kind: str
    path: str
    body: dict[str, Any]

    def streamed(self) -> dict[str, Any]:
        """Return the body for a streamed answer, with the usage last."""
        return self.body | {"stream": True, "stream_options": {"include_usage": True}}


KINDS = (
    "greedy", "seeded", "choices", "regex", "schema", "stop", "penalties", "tools", "logprobs", "chat",
)  # fmt: skip


def mixed_requests(count: int, new_tokens: int, seed: int = 0, kinds: Sequence[str] = KINDS) -> list[Request]:
    """Make `count` requests, of all kinds in turn, no two alike."""
    chance = random.Random(seed)
    return [_request(kinds[index % len(kinds)], chance, new_tokens) for index in range(count)]


def random_request(chance: random.Random, most_tokens: int, kinds: Sequence[str] = KINDS) -> Request:
    """Make a request of any kind, with up to `most_tokens` new tokens."""
    return _request(chance.choice(kinds), chance, chance.randint(2, most_tokens))


def _request(kind: str, chance: random.Random, new_tokens: int) -> Request:
    prompt = f"{chance.choice(_OPENINGS)} {' '.join(chance.choices(_WORDS, k=chance.randint(1, 24)))}"
    drawn: dict[str, Any] = {
        "temperature": chance.choice([0.7, 1.0, 1.3]),
        "top_p": 0.95,
        "seed": chance.randrange(1 << 31),
    }
    plain: dict[str, Any] = {"prompt": prompt, "max_tokens": new_tokens}
    said: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": new_tokens}
    match kind:
        case "greedy":
            return Request(kind, COMPLETIONS, plain | {"temperature": 0, "ignore_eos": True})
        case "seeded":
            return Request(kind, COMPLETIONS, plain | drawn | {"ignore_eos": True})
        case "choices":
            fewer = {"n": chance.randint(2, 3), "max_tokens": max(2, new_tokens // 2)}
            return Request(kind, COMPLETIONS, plain | drawn | fewer | {"ignore_eos": True})
        case "regex":
            words = chance.randint(2, max(2, new_tokens // 4))
            choices = {"regex": f"(yes|no|perhaps)(, (yes|no|perhaps)){{{words}}}"}
            return Request(
                kind, COMPLETIONS, plain | drawn | {"structured_outputs": choices, "max_tokens": 6 * words + 24}
            )
        case "schema":
            form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
            return Request(kind, CHAT, said | drawn | {"response_format": form, "max_completion_tokens": 200})
        case "stop":
            stops = chance.sample([" the", "e ", "and then", "\n\n", " of a"], 2)
            late = {"stop": stops, "min_tokens": new_tokens // 2}
            return Request(kind, COMPLETIONS, plain | drawn | late | {"ignore_eos": True})
        case "penalties":
            weights = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
            return Request(kind, COMPLETIONS, plain | drawn | weights | {"ignore_eos": True})
        case "tools":
            forced = {"tools": [_TOOL], "tool_choice": "required", "max_completion_tokens": 200}
            return Request(kind, CHAT, said | drawn | forced)
        case "logprobs":
            return Request(kind, COMPLETIONS, plain | {"temperature": 0, "logprobs": 3, "ignore_eos": True})
        case _:
            return Request(kind, CHAT, said | drawn | {"logprobs": True, "top_logprobs": 2})
