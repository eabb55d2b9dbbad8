"""Checks the documents against the tree: links and anchors lead somewhere, and what they name exists.

A document names code by a link whose text is a name and whose target is a Python file:
[`Scheduler.plan`](../src/penstock/core/scheduler.py). The name must be defined in that file. Code spans that look like
a path of the project (`docs/check.py`) or a target of make (`make check`) must be one, and the site's navigation must
hold every page. Run by `make check` and by the tests; standard library only, so that it takes no time.
"""

from __future__ import annotations

import ast
import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from notebooks import prose

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(?P<ticks>```+).*?^(?P=ticks)$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
PATH_SPAN = re.compile(r"`((?:src|docs|tests|bench|examples|native|release|reliability)/[\w./-]*)`")
MAKE_SPAN = re.compile(r"`make ([a-z-]+)[ `]")
NAV_PAGE = re.compile(r"^ *- .*?([\w./-]+\.(?:md|ipynb))$", re.MULTILINE)


def documents() -> list[Path]:
    """Return every Markdown file of the project, and every notebook."""
    patterns = ("*.md", "docs/**/*.md", "docs/*.ipynb", "bench/*.md", "reliability/*.md")
    return sorted(page for pattern in patterns for page in ROOT.glob(pattern))


def text_of(document: Path) -> str:
    """Return a document's text without its code blocks."""
    text = prose(document) if document.suffix == ".ipynb" else document.read_text(encoding="utf-8")
    return FENCE.sub("", text)


@cache
def defined_names(source: Path) -> dict[str, int]:
    """Return the names that a Python file defines, with lines: functions, classes, assignments, and members, dotted."""
    return dict(_names(ast.parse(source.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name, node.lineno
            case ast.ClassDef(name=name, body=members):
                yield prefix + name, node.lineno
                yield from _names(members, f"{prefix}{name}.")
            case ast.Assign(targets=targets):
                yield from ((prefix + target.id, node.lineno) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, node.lineno


@cache
def anchors(document: Path) -> frozenset[str]:
    """Return what can follow the `#` of a link to a document: its headings as slugs."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(text_of(document)):
        slug = _slug(LINK.sub(r"\g<text>", heading).replace("`", ""))
        found[slug] = found.get(slug, 0) + 1
    return frozenset([*found, *(f"{slug}_{number}" for slug, count in found.items() for number in range(1, count))])


def _slug(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def problems(document: Path) -> Iterator[str]:
    """Yield what is wrong with one document, a line for each problem."""
    text = text_of(document)
    for match in LINK.finditer(text):
        if not re.match(r"[a-z]+:", match["target"]):
            yield from (f"{document.relative_to(ROOT)}: {problem}" for problem in _link_problems(document, match))
    for path in PATH_SPAN.findall(text):
        if not (ROOT / path).exists():
            yield f"{document.relative_to(ROOT)}: there is no {path}"
    for target in MAKE_SPAN.findall(text):
        if target not in make_targets():
            yield f"{document.relative_to(ROOT)}: the Makefile has no target {target}"


def _link_problems(document: Path, match: re.Match[str]) -> Iterator[str]:
    target, _, anchor = match["target"].partition("#")
    place = (document.parent / target).resolve() if target else document
    name = code_name(match["text"])
    if not place.exists():
        yield f"the link to {target} leads nowhere"
    elif anchor and place.suffix in (".md", ".ipynb") and anchor not in anchors(place):
        yield f"{place.name} has no heading #{anchor}"
    elif names_code(match["text"], place) and name not in defined_names(place):
        yield f"{target} defines no {name}"


def names_code(text: str, place: Path) -> bool:
    """Whether a link's text names something in a Python file, rather than the file itself."""
    own = text.endswith(".py`") or code_name(text) == place.stem
    return place.suffix == ".py" and text.startswith("`") and "/" not in text and not own


def code_name(text: str) -> str:
    """Return the name that a link's text spells."""
    return text.strip("`").removesuffix("()")


@cache
def make_targets() -> frozenset[str]:
    """Return the targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def navigation_problems() -> Iterator[str]:
    """Yield pages that the site's navigation does not show, and entries without a page."""
    shown = set(NAV_PAGE.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in documents() if page.is_relative_to(ROOT / "docs")}
    decisions = {page for page in pages if page.startswith("adr/")}  # put there by the site's hook
    yield from (f"mkdocs.yml: the navigation does not show {page}" for page in sorted(pages - shown - decisions))
    yield from (f"mkdocs.yml: there is no docs/{page}" for page in sorted(shown - pages))


def main() -> int:
    """Print every problem; the exit code says whether there is one."""
    found = [problem for document in documents() for problem in problems(document)]
    found += navigation_problems()
    for problem in found:
        sys.stderr.write(problem + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
