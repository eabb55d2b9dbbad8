"""The rendering process: `python -m penstock.rendering.worker`, started by `Renderer`.

An order contains its template's source, so that any worker can carry out any order; the last few templates are kept
compiled. Compiling has a budget of its own, because a new worker has to do it again.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

from penstock.rendering.language import CannotCompile, CannotRender, Template
from penstock.rendering.renderer import COMPILE_SECONDS, MEMORY_BYTES
from penstock.workers.child import limit_time, serve_orders

__all__ = ["main"]

KEPT = 8
"""Templates that are kept compiled."""


def main() -> None:
    """Serve standard input until its end."""
    serve_orders(lambda _: _answer, MEMORY_BYTES)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    limit_time(COMPILE_SECONDS)
    try:
        template = _compiled(order["source"])
    except CannotCompile as error:
        return {"fault": str(error)}
    if "given" not in order:
        return {"declared": sorted(template.declared)}
    limit_time(order["seconds"])
    try:
        now = datetime.fromisoformat(order["now"])
        return {"text": template.render(order["given"], order["most_chars"], now)}
    except CannotRender as error:
        return {"refusal": str(error)}


@lru_cache(KEPT)
def _compiled(source: str) -> Template:
    return Template(source)


if __name__ == "__main__":
    main()
