"""Writes docs/python-api.md from the source: `.venv/bin/python docs/write_python_api.py`.

Reads the source rather than importing it: signatures come out as they were written, and no tensor library is loaded.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import penstock
from penstock.contract.config import EngineConfig
from penstock.contract.options import Front

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "python-api.md"
WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef
SECTION = re.compile(r"^(Args|Attributes|Raises|Example|Returns|Yields):$", re.MULTILINE)
ENTRY = re.compile(r"^(?:    )?(\w+): ", re.MULTILINE)


def page() -> str:
    """Return docs/python-api.md."""
    classes = [name for name in ("LLM", "AsyncLLM", "SamplingParams", "RequestOutput") if name in penstock.__all__]
    classes += [name for name in penstock.__all__ if name not in classes and not name.startswith("__")]
    return "".join([INTRODUCTION, *(_class(name) for name in classes), _config()])


def _class(name: str) -> str:
    module = penstock._PUBLIC[name]
    source = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    made = "\n".join(_fields(node)) or next(
        _signature(each, name) for each in _functions(node) if each.name == "__init__"
    )
    parts = [f"\n## {name}\n\n", _code(made), _docstring(node)]
    for method in _functions(node):
        if not method.name.startswith("_") and (_decorators(method) & {"classmethod"} or not _fields(node)):
            parts += [f"\n### {name}.{method.name}\n\n", _code(_signature(method, method.name)), _docstring(method)]
    return "".join(parts)


def _functions(node: ast.ClassDef) -> list[Function]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass, a line each; none for any other class."""
    dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    return [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign) and dataclass]


def _decorators(method: Function) -> set[str]:
    return {ast.unparse(each) for each in method.decorator_list}


def _signature(method: Function, name: str) -> str:
    """Return a signature as people write it, on several lines if it is long."""
    returns = f" -> {ast.unparse(method.returns)}" if method.returns and name == method.name else ""
    if "property" in _decorators(method):
        return f"{name}{returns.replace(' ->', ':')}"
    start = ("async " if isinstance(method, ast.AsyncFunctionDef) else "") + name
    line = f"{start}({', '.join(_arguments(method))}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{start}(", *(f"    {argument}," for argument in _arguments(method)), f"){returns}"])


def _arguments(method: Function) -> list[str]:
    """Return each argument except the first, with its type and default."""
    given = method.args
    places = [*zip(given.args, [None] * (len(given.args) - len(given.defaults)) + given.defaults, strict=True)][1:]
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parts = [_argument(*place) for place in places]
    parts += ["*"] * bool(given.kwonlyargs) + [_argument(*place) for place in named]
    return parts + ([f"**{_argument(given.kwarg, None)}"] if given.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _code(text: str) -> str:
    quoted = text.replace("'", '"')  # as the project's formatter writes strings
    return f"```py\n{quoted}\n```\n\n"


def _docstring(node: ast.ClassDef | Function) -> str:
    """Write a Google-style docstring as Markdown: sections become lists, examples become code."""
    head, *sections = SECTION.split(inspect.cleandoc(ast.get_docstring(node) or ""))
    parts = [head.strip() + "\n"]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        body = inspect.cleandoc(text)
        parts.append(f"\n{_example(body)}" if title == "Example" else f"\n{title}:\n\n{''.join(_entries(body))}")
    return "".join(parts)


def _example(text: str) -> str:
    lines = (line.removeprefix(">>> ").removeprefix("... ") for line in text.splitlines())
    return _code("\n".join(lines)).removesuffix("\n")


def _entries(text: str) -> Iterator[str]:
    """Yield each `name: what it is`, with its continuation lines, as a list item."""
    for entry in re.split(r"\n(?=\w+: )", text):
        yield "- " + ENTRY.sub(r"`\1`: ", " ".join(entry.split()), count=1) + "\n"


def _config() -> str:
    parts = [CONFIG, "| option | default | values and meaning |\n|---|---|---|\n"]
    for field in fields(EngineConfig):
        if field.metadata["front"] > Front.QUEUE:
            continue
        choices = " or ".join(f"`{choice}`" for choice in field.metadata["choices"])
        said = f"{choices}. {field.metadata['help']}" if choices else field.metadata["help"]
        if field.metadata["front"] == Front.QUEUE:
            said += " `AsyncLLM` alone" + (", which raises `Overloaded` then." if "429" in said else ".")
        said = said.replace("<", "&lt;")
        parts.append(f"| `{field.name}` | `{field.default!r}` | {said} |\n")
    return "".join(parts)


CONFIG = """
## EngineConfig

The options that `LLM(...)` and `AsyncLLM(...)` take by name, and `penstock serve` as flags, with some of its own. Which
to set: [Tuning](tuning.md). Sizes in bytes may be text, as on the command line: `LLM(kv_cache_memory="2GB")`.

"""

INTRODUCTION = """\
# Python API

Written by `docs/write_python_api.py` from the source; a test holds the two equal. All of it but `EngineConfig` is
imported from `penstock`, which is quick: no tensor library is loaded before a model is opened.

```python
from penstock import LLM, SamplingParams

with LLM() as llm:
    params = SamplingParams(temperature=0, max_tokens=16)
    [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    print(answer.outputs[0].text)  # The capital of France is Paris.
```

Several callers at once, each with a stream of its own, on an event loop:

```python
import asyncio

from penstock import AsyncLLM, SamplingParams


async def tell(llm: AsyncLLM, prompt: str) -> str:
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16)):
        text = output.outputs[0].text  # the whole text so far
    return text


async def main() -> None:
    async with AsyncLLM() as llm:
        print(await asyncio.gather(tell(llm, "Once upon a time"), tell(llm, "The sea is")))


asyncio.run(main())
```

A wrong request raises `penstock.contract.errors.RequestError`, which names the field; a model or an option that cannot
be used raises `SetupError`, which names the file or the option ([the whole tree](../src/penstock/contract/errors.py)).
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
