"""The tasks for measuring guesses: five, from answers that repeat their prompt to answers that repeat nothing.

Each varies with the stream's number, so that streams have different prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["TASKS", "Task"]

_CODE = """def read_table(path):
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line:
                continue
            parts = line.split(",")
            rows.append(parts)
    return rows


def column(rows, index):
    values = []
    for row in rows:
        values.append(row[index])
    return values


def total(values):
    result = 0
    for value in values:
        result += float(value)
    return result


def mean(values):
    return total(values) / len(values)


def report(path):
    rows = read_table(path)
    for index in range(len(rows[0])):
        values = column(rows, index)
        print(index, total(values), mean(values))
"""

_TEXT = (
    "The harbour of Eastwick was built in 1834 by the engineer Thomas Brand. It was made of granite from the quarries"
    " of the north coast, and took eleven years to complete. In the winter of 1871 a storm broke the outer wall in"
    " three places, and forty ships were lost. The town rebuilt the wall in concrete, one of the first uses of the"
    " material in the country. Today the harbour is home to a fleet of twelve fishing boats and a museum of the sea,"
    " which is visited by thirty thousand people each year."
)

_PEOPLE = (
    "Anna Miller, 34, lives in Hamburg. Her brother Tom Miller is 29 and lives in Berlin. Their friend Paula Novak, 41,"
    " has moved to Prague. Her colleague James Smith, who is 52, comes from London. Maria Rossi from Rome is 38, and"
    " her neighbour Luca Bianchi, 45, lives in Rome too. Erik Larsen, 27, studies in Oslo, where Ingrid Berg, 31,"
    " teaches."
)
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_RECORDS = {"type": "array", "items": _PERSON, "minItems": 8, "maxItems": 8}

_NAMES = ("total", "column", "mean", "report", "read_table", "values", "rows", "index")
_PLACES = ("Paris", "Rome", "Lisbon", "Vienna", "Prague", "Oslo", "Athens", "Dublin")
_RANDOM_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of work.

    Attributes:
        ask: (stream number, vocabulary size) -> the stream's input: a message, or a prompt of token ids.
        max_tokens: most tokens of an answer.
        sampling: the other sampling parameters.
        schema: JSON Schema of the answer; None for free text.
    """

    name: str
    ask: Callable[[int, int], str | list[int]]
    max_tokens: int
    sampling: dict[str, Any]
    schema: dict[str, Any] | None = None


def _edit(stream: int, _: int) -> str:
    name = _NAMES[stream % len(_NAMES)]
    return (
        f"Here is a Python file:\n\n```python\n{_CODE}```\n\nRewrite the whole file. Rename `{name}` to `new_{name}`."
        " Change nothing else. Answer with the file only."
    )


def _summary(stream: int, _: int) -> str:
    return f"Summarise text {stream + 1}, quoting its most important sentences word for word.\n\n{_TEXT}"


def _extraction(stream: int, _: int) -> str:
    return f"Extract all people from text {stream + 1} as JSON: a list of objects with name, age and city.\n\n{_PEOPLE}"


def _chat(stream: int, _: int) -> str:
    return f"What should I see in {_PLACES[stream % len(_PLACES)]} in three days? Explain why."


def _noise(stream: int, vocab_size: int) -> list[int]:
    draw = random.Random(stream)  # noqa: S311 - a workload, not a secret
    return [draw.randrange(vocab_size) for _ in range(_RANDOM_PROMPT)]


_GREEDY: dict[str, Any] = {"temperature": 0}

TASKS = (
    Task("code edit", _edit, 300, _GREEDY),
    Task("JSON extraction", _extraction, 300, _GREEDY, _RECORDS),
    Task("summary with quotes", _summary, 160, _GREEDY),
    Task("chat", _chat, 200, {"temperature": 0.8, "seed": 7}),
    Task("random tokens", _noise, 200, {"temperature": 1.0, "seed": 7, "ignore_eos": True}),
)
