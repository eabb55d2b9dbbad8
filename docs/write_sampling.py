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
    """Return docs/sampling.md."""
    shaping = sorted((each for each in PARAMETERS if each.stages), key=lambda each: each.stages[0].order)
    rest = [each for each in PARAMETERS if not each.stages]
    parts = [INTRODUCTION.replace("FIRST_ANSWERS", _first_answers())]
    parts += _section("What can be chosen, in the order in which it is applied", STAGES, shaping)
    parts += _section("Details of these", "", (each for each in rest if each.home is Home.SPEC))
    parts += _section("When an answer ends", "", (each for each in rest if each.home is Home.STOP_RULES))
    parts += _section("How many answers, of what form", "", (each for each in rest if each.home is Home.REQUEST))
    return "".join(parts)


def _first_answers() -> str:
    rows = (f"| {question} | {before} | {after} |" for question, before, after in FIRST_ANSWERS)
    return "\n".join(["| question | `--generation-config none` | by default |", "|---|---|---|", *rows])


def _section(title: str, text: str, parameters: Iterable[Parameter]) -> list[str]:
    head = f"\n## {title}\n\n{text}| parameter | values | default | meaning |\n|---|---|---|---|\n"
    rows = (f"| `{p.name}` | {_values(p)} | `{json.dumps(p.default)}` | {_cell(p.doc)} |\n" for p in parameters)
    return [head, *rows]


def _values(parameter: Parameter) -> str:
    said = _described(dict(parameter.kind.schema()))
    return f"{said}, or null" if parameter.nullable else said


def _described(schema: dict[str, Any]) -> str:
    """Describe a schema's values in words."""
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
"""A bound that only the format needs; it is not shown."""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


FIRST_ANSWERS = (
    (
        "What is the capital of France?",
        "Madame Elinche René à Bâtrix famously named Saint-Denis, where she worked alongside Colette Béurier ...",
        "The capital of France is Paris.",
    ),
    ("What is 2 + 2?", "The answer is 4. Subtracting 2 + 2 is simply 2.", "The answer is 4."),
    (
        "Why is the sky blue?",
        "The essence of this spherical beauty lies in its unique spectrum, composed of a multitude of colors: ...",
        "The sky is blue because of a process called Rayleigh Scattering, which occurs when light encounters ...",
    ),
    (
        "Name three primary colours.",
        "The primary colours are: Blue, Red, and Green.",
        "The primary colours are: Red, Blue, and Yellow.",
    ),
    (
        "Write one sentence about the sea.",
        "The sea is the unending bluescreen of old, containing wonders and horrors that remain undefiled.",
        "The sea is a vast and mysterious realm, teeming with life and unending in its own way.",
    ),
)
"""Question, answer with the general defaults, answer with the publisher's; long ones are cut."""

STAGES = """\
Each parameter changes the distribution that the parameters before it left. At temperature 0 the most likely token is
taken, and parameters that matter only to a random choice are ignored.

"""

INTRODUCTION = """\
# Sampling parameters

Written by `docs/write_sampling.py` from the files in `src/penstock/sampling/parameters`, one for each parameter; a test
checks that they agree. Names and defaults are vLLM's where vLLM has the parameter. A parameter means the same
everywhere: in requests over HTTP ([which endpoint takes which](api-fields.md)), in `SamplingParams`, in the lines of
`penstock generate --input`, and, with dashes, as an option on the command line. One default differs for chats, as
it does at OpenAI: `max_tokens` is the rest of the context.

```python
from penstock import LLM, SamplingParams

with LLM() as llm:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=20)
    print(llm.generate("Once upon a time", params)[0].outputs[0].text)
```

## Defaults of the model

Publishers recommend values for their models. If a request, a command or the page does not give its own, these are
the defaults. They are read from the model's `generation_config.json`; for the models of the catalogue, they are what
the publisher's model card says. A request's own value always wins. `SamplingParams(...)` keeps the defaults listed
below; `LLM.generate` and `LLM.chat` without parameters take `llm.get_default_sampling_params()`. Penstock reads
`temperature`, `top_p`, `top_k`, `min_p`, `typical_p` and `repetition_penalty`, and `do_sample: false`, which makes the
choice greedy; it does not read lengths such as `max_new_tokens`. The start report and `/v1/models` show what was read.
`--generation-config none` (in the library `LLM(generation_config="none")`) ignores these values; with a directory or a
file they are read from there.

Five plain questions to the default model, whose publisher recommends temperature 0.2 and top_p 0.9
(`penstock chat --seed 1 --max-tokens 60`, on the compiled kernels of a CPU with AVX-512; other machines may draw
other words):

FIRST_ANSWERS

## With other clients

With the official `openai` client, parameters that OpenAI does not have go into `extra_body`:
`create(..., extra_body={"top_k": 40, "min_p": 0.05})`.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
