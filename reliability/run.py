"""Tests what docs/reliability.md promises, row by row, and writes what it found.

    python reliability/run.py                                    # a tenth of everything
    python reliability/run.py --depth deep --only R7,R11 --json reliability/results/FILE.json
    python reliability/run.py --publish                          # docs/reliability.md, from the records of results/

Each row starts servers of its own on free ports of 127.0.0.1, with the default model (`penstock pull`) or a tiny random
model, and ends them. If a row misses its target, it says so and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness.processes import busy_share
from harness.record import newest, published, read_records, table
from harness.row import Depth, Measured, Outcome, Row
from penstock.bench.machine import provenance
from rows.table import ROWS, chosen

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"


class _Bar:
    """A progress bar; the row sets its length once the row knows it."""

    def __init__(self, title: str) -> None:
        self._bar = tqdm(total=0, desc=title, disable=None, leave=False)

    def expect(self, total: int) -> None:
        """See `harness.row.Progress`."""
        self._bar.reset(total)

    def update(self, count: int = 1) -> None:
        """See `harness.row.Progress`."""
        self._bar.update(count)

    def close(self) -> None:
        """Remove the bar from the screen."""
        self._bar.close()


def try_row(row: Row, depth: Depth) -> dict[str, Any]:
    """Run one row, and return its entry in the record."""
    entry: dict[str, Any] = {
        "id": row.id,
        "target": row.target,
        "outcome": Outcome.NOT_MEASURED.value,
        "figure": "",
        "misses": [],
    }
    if row.run is None:
        return entry
    bar, busy, began = _Bar(row.id), busy_share(), time.monotonic()
    try:
        measured = row.run(depth, bar)
    except Exception as error:
        traceback.print_exc()
        measured = Measured(f"{type(error).__name__}: {error}")
        entry["outcome"] = Outcome.FAILED.value
    else:
        entry["outcome"] = measured.outcome.value
    finally:
        bar.close()
    return entry | {
        "figure": measured.figure,
        "misses": list(measured.misses),
        "values": measured.values,
        "seconds": round(time.monotonic() - began, 1),
        "busy": round(busy, 3),
    }


def measure(rows: list[Row], depth: Depth) -> dict[str, Any]:
    """Run the rows, and return the record; prints each row as soon as it is done."""
    record: dict[str, Any] = {"kind": "reliability", **provenance(), "depth": depth.value, "rows": []}
    for row in rows:
        entry = try_row(row, depth)
        record["rows"].append(entry)
        tqdm.write(f"{row.id:7} {entry['outcome']:12} {entry['figure'] or row.instead}")
        for miss in entry["misses"]:
            tqdm.write(f"{'':20} - {miss}")
    return record


def main() -> None:
    """Parse the options, run the rows, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", choices=[each.value for each in Depth], default="quick")
    parser.add_argument("--only", default="", metavar="R7,R11", help="these rows")
    parser.add_argument("--json", type=Path, help="where the record is written")
    parser.add_argument("--markdown", type=Path, help="where the table of this run is written")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/reliability.md from reliability/results, and try nothing"
    )
    given = parser.parse_args()
    if given.publish:
        text = table(ROWS, newest(read_records(RESULTS)))
        PAGE.write_text(published(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
        return
    try:
        rows = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: leaves no server behind
    record = measure(rows, Depth(given.depth))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(table(rows, newest([record])), encoding="utf-8")
    if any(each["outcome"] in (Outcome.MISSED.value, Outcome.FAILED.value) for each in record["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
