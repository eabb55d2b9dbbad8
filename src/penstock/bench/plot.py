"""A comparison as a picture: output tokens a second over streams, a line for each engine, bars from worst to best.

The library that draws is optional (extra `bench`) and looked up by name when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.contract.errors import ConfigError

__all__ = ["draw", "plotting"]


def plotting() -> ModuleType:
    """matplotlib, drawing into files only; asked for before anything is measured.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        matplotlib = import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plot", "needs matplotlib; run: pip install 'penstock[bench]'") from error
    matplotlib.use("agg")
    return import_module("matplotlib.pyplot")


def draw(record: Mapping[str, Any], target: Path, pyplot: ModuleType) -> None:
    """Draw the record of a comparison into `target`; its suffix decides the format."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for contender in record["contenders"]:
        streams, medians, errors = curve(contender["rows"])
        axes.errorbar(streams, medians, yerr=errors, marker="o", capsize=3, label=contender["name"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(record["streams"], [str(each) for each in record["streams"]])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams")
    axes.set_ylabel("output tokens a second")
    sizes = f"{record['prompt_tokens']} prompt tokens, {record['new_tokens']} new, {record['threads']} threads"
    axes.set_title(f"{record['model']}: {sizes}")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def curve(rows: list[dict[str, Any]]) -> tuple[list[int], list[float], tuple[list[float], list[float]]]:
    """Streams, medians, and how far the bars reach down and up from them."""
    ordered = sorted(rows, key=lambda row: int(row["streams"]))
    down = [row["output_tok_s"] - row["output_tok_s_lowest"] for row in ordered]
    up = [row["output_tok_s_highest"] - row["output_tok_s"] for row in ordered]
    return [row["streams"] for row in ordered], [row["output_tok_s"] for row in ordered], (down, up)
