"""Writes docs/sampling.md from the files of the sampling parameters: `.venv/bin/python docs/write_sampling.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.sampling import PARAMETERS, Parameter
from penstock.sampling.parameter import Home

PAGE = Path(__file__).parent / "sampling.md"


def page() -> str:
    """docs/sampling.md."""
    shaping = sorted((each for each in PARAMETERS if each.stages), key=lambda each: each.stages[0].order)
    rest = [each for each in PARAMETERS if not each.stages]
    parts = [INTRODUCTION]
    parts += _section("What can be chosen, in the order in which it is applied", STAGES, shaping)
    parts += _section("Details of these", "", (each for each in rest if each.home is Home.SPEC))
    parts += _section("When an answer ends", "", (each for each in rest if each.home is Home.STOP_RULES))
    parts += _section("How many answers, of what form", "", (each for each in rest if each.home is Home.REQUEST))
    return "".join(parts)


def _section(title: str, text: str, parameters: Iterable[Parameter]) -> list[str]:
    head = f"\n## {title}\n\n{text}| parameter | values | default | meaning |\n|---|---|---|---|\n"
    rows = (f"| `{p.name}` | {_values(p)} | `{json.dumps(p.default)}` | {_cell(p.doc)} |\n" for p in parameters)
    return [head, *rows]


def _values(parameter: Parameter) -> str:
    said = _described(dict(parameter.kind.schema()))
    return f"{said}, or null" if parameter.nullable else said


def _described(schema: dict[str, Any]) -> str:
    """A schema's values in words."""
    if "anyOf" in schema:
        return " or ".join(_described(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{word}`" for word in schema["enum"])
    match schema["type"]:
        case "number" | "integer":
            return f"{schema['type']}{_bounds(schema)}"
        case "string":
            return f"text of at most {schema['maxLength']:,} characters"
        case "array":
            return f"list of at most {schema['maxItems']:,}: {_described(schema['items'])}"
        case "object":
            return f"object of {', '.join(f'`{name}`' for name in schema.get('properties', ()))}".removesuffix(" of ")
        case kind:
            return str(kind)


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
    above = "above " if "exclusiveMinimum" in schema else ""
    if low <= -MANY and high >= MANY:
        return ""
    if high >= MANY:
        return f", {above or 'from '}{low:g}"
    return f", {above}{low:g} to {high:g}"


MANY = 2**31 - 1
"""A bound that is there for the format's sake."""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


STAGES = """\
Each changes the distribution that the ones before it left. At temperature 0 the most likely token is taken, and what
matters to a random choice alone is passed over.

"""

INTRODUCTION = """\
# Sampling parameters

Written by `docs/write_sampling.py` from the files in `src/penstock/sampling/parameters`, one for each parameter; a test
holds the two equal. Names and defaults are vLLM's where vLLM has the parameter. A parameter means the same everywhere:
in requests over HTTP ([which endpoint takes which](api-fields.md)), in `SamplingParams`, in the lines of
`penstock generate --input`, and, with dashes, as an option on the command line. One default differs, as it does at
OpenAI: a chat's `max_tokens` is the rest of the context.

```python
from penstock import LLM, SamplingParams

with LLM() as llm:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=20)
    print(llm.generate("Once upon a time", params)[0].outputs[0].text)
```

With the official `openai` client, parameters that OpenAI does not have go into `extra_body`:
`create(..., extra_body={"top_k": 40, "min_p": 0.05})`.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
