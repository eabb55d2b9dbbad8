"""Draws a plan: what clients see at rates around the limit, beside the goals.

matplotlib is optional (extra `bench`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.contract.errors import ConfigError

__all__ = ["check_target", "draw_plan", "plotting"]

SUFFIXES = (".svg", ".png", ".pdf")
_SHOWN = {"ttft": "to the first token", "itl": "between tokens", "e2e": "end to end"}
_COLOURS = ("#2a78d6", "#8a8a85")


def check_target(target: Path) -> None:
    """Make sure that a plot can be written in the format that a file's name asks for.

    Raises:
        ConfigError: it cannot.
    """
    if target.suffix not in SUFFIXES:
        raise ConfigError("plot", f"{target} must end in one of {', '.join(SUFFIXES)}")


def plotting() -> ModuleType:
    """matplotlib, drawing into files only; asked for before anything is simulated.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        matplotlib = import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plot", "needs matplotlib; run: pip install 'penstock[bench]'") from error
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif"})
    return import_module("matplotlib.pyplot")


def draw_plan(record: Mapping[str, Any], target: Path, pyplot: ModuleType) -> None:
    """Draw the record of a plan into `target`: a panel for each goal."""
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
