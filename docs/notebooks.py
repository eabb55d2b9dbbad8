"""Reads a notebook of the documentation: its prose and code, and what its code printed when it was last run.

A notebook is a JSON file (nbformat 4). Ours have two kinds of cells, and three kinds of outputs: printed text, a value
as text, and a picture; anything else is refused. Standard library only: the checks read notebooks too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Cell", "cells", "markdown", "pictures", "prose"]

PICTURE = "image/png"


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        source: Markdown or Python.
        code: whether the source is Python.
        said: what the cell printed, and the value of its last line, in order.
        pictures: PNG files that the cell drew.
    """

    source: str
    code: bool
    said: str = ""
    pictures: tuple[bytes, ...] = ()


def cells(notebook: Path) -> list[Cell]:
    """Return all cells, in order.

    Raises:
        ValueError: a cell or output is of a kind that is not shown, or the cell's last run ended in an error.
    """
    return [_cell(notebook, each) for each in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]


def _cell(notebook: Path, cell: dict[str, Any]) -> Cell:
    kind, source = cell["cell_type"], "".join(cell["source"])
    if kind == "markdown":
        return Cell(source, code=False)
    if kind != "code":
        raise ValueError(f"{notebook.name}: a cell of the kind {kind!r} is not shown on the site")
    said, drawn = "", []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output["output_type"] == "stream":
            said += "".join(output["text"])
        elif PICTURE in data:
            drawn.append(base64.b64decode("".join(data[PICTURE])))
        elif "text/plain" in data:
            said += "".join(data["text/plain"]) + "\n"
        else:
            raise ValueError(
                f"{notebook.name}: an output of the kind {output['output_type']!r} is not shown on the site"
            )
    return Cell(source, code=True, said=said, pictures=tuple(drawn))


def prose(notebook: Path) -> str:
    """Return the text of a notebook as one Markdown document, without its code."""
    return "\n\n".join(cell.source for cell in cells(notebook) if not cell.code)


def markdown(notebook: Path) -> str:
    """Return a notebook as a page: its text, its code, and below each what it printed and drew (see `pictures`)."""
    names = iter(pictures(notebook))
    return "\n\n".join(part for cell in cells(notebook) for part in _parts(cell, names)) + "\n"


def _parts(cell: Cell, names: Iterator[str]) -> Iterator[str]:
    if not cell.code:
        yield cell.source
        return
    yield f"```python\n{cell.source}\n```"
    if cell.said:
        yield f"```text\n{cell.said.rstrip()}\n```"
    for _ in cell.pictures:
        yield f"![What the code above draws]({next(names)})"


def pictures(notebook: Path) -> dict[str, bytes]:
    """Return a notebook's pictures by the file names that they have beside its page."""
    drawn = (picture for cell in cells(notebook) for picture in cell.pictures)
    return {f"{notebook.stem}-{number}.png": picture for number, picture in enumerate(drawn, start=1)}
