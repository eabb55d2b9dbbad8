"""Draws the result of `penstock plan`: what clients see at rates around the limit, beside the goals.

matplotlib is optional (extra `bench`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["draw_plan"]

_SHOWN = {"ttft": "to the first token", "itl": "between tokens", "e2e": "end to end"}
_COLOURS = ("#2a78d6", "#8a8a85")


def draw_plan(record: Mapping[str, Any], target: Path, pyplot: ModuleType) -> None:
    """Draw the record of a plan into the file `target`, with a panel for each goal."""
    goals, curve = record["goals_ms"], record["curve"]
    rates = [each["rate"] for each in curve]
    figure, panels = pyplot.subplots(
        1, len(goals), figsize=(4.2 * len(goals), 3.2), layout="constrained", squeeze=False
    )
    names = ("p50", f"p{record['quantile']:g}")
    for panel, (goal, bound) in zip(panels[0], goals.items(), strict=True):
        for name, colour in zip(names, reversed(_COLOURS), strict=True):
            of_name = [each["latencies_ms"][goal][name] for each in curve]
            values, lows, highs = zip(*of_name, strict=True)
            panel.plot(rates, values, color=colour, marker="o", markersize=3, label=name)
            panel.fill_between(rates, lows, highs, color=colour, alpha=0.2, linewidth=0)
        panel.axhline(bound, color="#d0443e", linewidth=1, linestyle="--", label=f"goal, {bound:g} ms")
        panel.axvspan(record["limit"]["rate"][1], record["limit"]["rate"][2], color="#2a9d63", alpha=0.15, linewidth=0)
        panel.axvline(record["limit"]["rate"][0], color="#2a9d63", linewidth=1, label="limit")
        panel.set_title(_SHOWN[goal])
        panel.set_xlabel("requests a second")
        panel.set_ylabel("milliseconds")
        panel.set_ylim(0, 3 * bound)
        panel.legend(fontsize="small")
    figure.savefig(target)
    pyplot.close(figure)
