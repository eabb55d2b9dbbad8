"""Checks that the documents are true to the tree: links lead somewhere, and code that they name exists.

In a document, code is named as a link whose text is a name and whose target is a Python file:
[`Scheduler.plan`](../src/penstock/core/scheduler.py). The name must be defined in that file. Run by `make check` and by
the tests; standard library only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def defined_names(source: Path) -> set[str]:
    """Names that a Python file defines: functions, classes, assignments, and the members of its classes, dotted."""
    return set(_names(ast.parse(source.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name, body=members):
                yield prefix + name
                yield from _names(members, f"{prefix}{name}.")
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def problems(document: Path) -> Iterator[str]:
    """What is wrong with one document, a line each."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = match["target"].partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            continue
        place = (document.parent / target).resolve()
        name = match["text"].strip("`").removesuffix("()")
        if not place.exists():
            yield f"{document.relative_to(ROOT)}: the link to {target} leads nowhere"
        elif names_code(match["text"], place) and name not in defined_names(place):
            yield f"{document.relative_to(ROOT)}: {target} defines no {name}"


def names_code(text: str, place: Path) -> bool:
    """Whether a link's text is the name of something in a Python file, rather than the file's own."""
    return place.suffix == ".py" and text.startswith("`") and "/" not in text and not text.endswith(".py`")


def main() -> int:
    """Print every problem; the exit code says whether there is one."""
    found = [problem for document in documents() for problem in problems(document)]
    for problem in found:
        sys.stderr.write(problem + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
