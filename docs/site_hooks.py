"""Adds source pages to the site's documents, so that a link into the tree leads to the line it names.

A hook of mkdocs (mkdocs.yml names it). The documents link to files beside `docs/` by relative paths, which editors and
code hosts follow; here every such file becomes a page below `source/`, or is copied if it is not text to read. A
notebook becomes a page of its text, its code and the code's output. Also puts the decision records into the navigation,
so that a new one needs no second entry.
"""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import Any

from check import FENCE, LINK, ROOT, code_name, defined_names, documents, names_code, text_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import markdown, pictures

DOCS = ROOT / "docs"
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", "": "make"}
DECISIONS = "adr/"
SOURCE_SETTINGS = "search:\n  exclude: true\nhide:\n  - toc\n"
NOTEBOOK_LINK = re.compile(r"(?<=\]\()([\w./-]+)\.ipynb(?=[#)])")
BAR = r"\|"
BARRED_CODE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the decision records where the navigation says `adr/`, and pages in place of notebooks."""
    records = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / DECISIONS).glob("[0-9]*.md"))
    pages: dict[str, Any] = {each.name: f"{each.stem}.md" for each in DOCS.glob("*.ipynb")}
    config.nav = _expanded(config.nav, pages | {DECISIONS: ["adr/README.md", *records]})
    return config


def _expanded(nav: Any, entries: dict[str, Any]) -> Any:
    match nav:
        case dict():
            return {title: _expanded(entry, entries) for title, entry in nav.items()}
        case list():
            return [_expanded(entry, entries) for entry in nav]
        case _:
            return entries.get(nav, nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file of the tree that a document links to, and put a page in place of every notebook."""
    for notebook in DOCS.glob("*.ipynb"):
        if (copied := files.get_file_from_path(notebook.name)) is not None:
            files.remove(copied)
        files.append(File.generated(config, f"{notebook.stem}.md", content=markdown(notebook)))
        for name, picture in pictures(notebook).items():
            files.append(File.generated(config, name, content=picture))
    for place in sorted(_linked_files()):
        address = _address(place)
        if place.suffix in LANGUAGES:
            files.append(File.generated(config, address, content=_source_page(place)))
        else:
            files.append(File.generated(config, address, abs_src_path=str(place)))
    return files


def _linked_files() -> set[Path]:
    found = set()
    for document in documents():
        if document.is_relative_to(DOCS):
            for match in LINK.finditer(text_of(document)):
                place = _place(document, match["target"])
                if place is not None:
                    found.add(place)
    return found


def _place(document: Path, target: str) -> Path | None:
    """Return the file of the tree outside `docs/` that a link leads to; None if it leads elsewhere."""
    if re.match(r"[a-z]+:|#", target):
        return None
    place = (document.parent / target.partition("#")[0]).resolve()
    return place if place.is_file() and not place.is_relative_to(DOCS) else None


def _address(place: Path) -> str:
    """Return the path of a file of the tree on the site."""
    address = f"source/{place.relative_to(ROOT).as_posix()}"
    return f"{address}.md" if place.suffix in LANGUAGES else address


def _source_page(place: Path) -> str:
    text = place.read_text(encoding="utf-8")
    ticks = "`" * max(3, 1 + max(map(len, re.findall(r"`{3,}", text)), default=0))
    opening = f'{ticks} {{ .{LANGUAGES[place.suffix]} linenums="1" }}'
    title = place.relative_to(ROOT).as_posix()
    return f"---\n{SOURCE_SETTINGS}---\n\n# {title}\n\n{opening}\n{text.rstrip()}\n{ticks}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (mkdocs' own)
    """Point links into the tree at their pages, at the line of what they name; and show bars in tables as bars."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    markdown = BARRED_CODE.sub(_barred, markdown)
    document = DOCS / page.file.src_uri
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_relinked(markdown[end : fence.start()], document), fence[0]]
        end = fence.end()
    return "".join([*parts, _relinked(markdown[end:], document)])


def _barred(match: re.Match[str]) -> str:
    """Write code with bars as markup: a code host wants bars escaped in a table, Python-Markdown shows the escape."""
    return f"<code>{escape(match[1].replace(BAR, '|')).replace('|', '&#124;')}</code>"


def _relinked(text: str, document: Path) -> str:
    text = NOTEBOOK_LINK.sub(r"\1.md", text)
    return LINK.sub(lambda match: _link(match, document), text)


def _link(match: re.Match[str], document: Path) -> str:
    place = _place(document, match["target"])
    if place is None:
        return match[0]
    target = os.path.relpath(DOCS / _address(place), document.parent)
    line = defined_names(place)[code_name(match["text"])] if names_code(match["text"], place) else 0
    return f"[{match['text']}]({target}{f'#__codelineno-0-{line}' if line else ''})"
