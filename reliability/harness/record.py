"""Reads records of runs, and makes the table from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.row import Outcome, Row

__all__ = ["BEGIN", "END", "newest", "published", "read_records", "table"]

BEGIN, END = "<!-- reliability -->\n", "<!-- end of reliability -->"
"""The marks around a page's table."""

BUSY = 0.15
"""Largest share of the processors' time in use before a row; above it, the row's times count as preliminary."""

Record = dict[str, Any]


def read_records(folder: Path) -> list[Record]:
    """Read every record of a folder, oldest first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(found, key=lambda record: str(record["taken"]))


def newest(records: Iterable[Record]) -> dict[str, Record]:
    """Return each row's newest entry, with the record's depth, date and commit; a deep one wins over a quick one."""
    found: dict[str, Record] = {}
    for record in records:
        about = {name: record[name] for name in ("depth", "taken", "commit")}
        for entry in record["rows"]:
            before = found.get(entry["id"])
            if before is None or before["depth"] == "quick" or record["depth"] == "deep":
                found[entry["id"]] = entry | about
    return found


def table(rows: Sequence[Row], entries: Mapping[str, Record]) -> str:
    """Return the table in Markdown."""
    lines = ["| | what is tried | target | measured | elsewhere |", "|---|---|---|---|---|"]
    lines += [_line(row, entries.get(row.id)) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row, entry: Record | None) -> str:
    cells = (row.id, row.title, row.target, _measured(row, entry), row.peers)
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def _measured(row: Row, entry: Record | None) -> str:
    if entry is None or entry["outcome"] == Outcome.NOT_MEASURED:
        return row.instead or ("not measured yet on an idle machine" if row.timed and row.run else "not measured")
    where = f"{entry['depth']}, {entry['taken'][:10]}, `{entry['commit'][:12]}`"
    if entry["outcome"] == Outcome.FAILED:
        return f"**the row itself failed**: {entry['figure']} ({where})"
    verdict = "reached" if entry["outcome"] == Outcome.REACHED else "**missed**"
    if row.timed and entry["busy"] > BUSY:
        verdict = f"{verdict}, preliminary: the machine was busy"
    said = f"{verdict}: {entry['figure']} ({where})"
    return said + "".join(f"; {miss}" for miss in entry["misses"][:2] if entry["outcome"] == Outcome.MISSED)


def published(page: str, text: str) -> str:
    """Return `page` with `text` in place of its table.

    Raises:
        ValueError: the page has no place for a table.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for a table: {BEGIN.strip()} ... {END}")
    return before + begin + text + end + after
