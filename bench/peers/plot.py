"""Draws a comparison: bars side by side for prefill and decode, a group for each number of streams.

Penstock has one hue and each other engine has its own; variants of one engine differ in shade. The picture has a
transparent background and can be read on white and on black. Whiskers go from the worst round to the best. matplotlib
is optional (extra `bench`) and imported when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["bars", "colours", "draw"]

INK = "#808890"  # grey enough for white and for black
OURS = (0.85, 0.33, 0.10)
HUES = ((0.20, 0.47, 0.75), (0.10, 0.60, 0.50), (0.55, 0.40, 0.75), (0.75, 0.60, 0.15), (0.45, 0.50, 0.55))
"""Red, green and blue of each engine among the peers, in order of appearance."""

PHASES = (("prefill", "prompt tokens a second"), ("decode", "new tokens a second"))


def draw(record: Mapping[str, Any], target: Path, pyplot: ModuleType) -> None:
    """Draw the record of a comparison into `target`; its suffix decides the format."""
    contenders, groups = record["contenders"], len(record["streams"])
    height = 1.2 + 0.24 * len(contenders) * groups
    figure, panels = pyplot.subplots(1, len(PHASES), figsize=(11, height), sharey=True, layout="constrained")
    fills = colours(contenders)
    for panel, (phase, unit) in zip(panels, PHASES, strict=True):
        for contender, fill, (places, medians, reach) in zip(contenders, fills, bars(record, phase), strict=True):
            drawn = panel.barh(places, medians, xerr=reach, color=fill, ecolor=INK, label=contender["name"])
            panel.bar_label(drawn, labels=[_figure(each) for each in medians], padding=3, fontsize=7, color=INK)
        panel.set_title(f"{phase}: {unit}", fontsize=10, color=INK)
        panel.margins(x=0.14, y=0.01)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(INK)
        panel.tick_params(colors=INK, labelsize=8, left=False)
    _name_groups(panels[0], record)
    figure.suptitle(_title(record), fontsize=10, color=INK)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(4, len(contenders)),
        fontsize=8,
        frameon=False,
        labelcolor=INK,
    )
    figure.savefig(target, dpi=150, transparent=True)
    pyplot.close(figure)


def bars(
    record: Mapping[str, Any], phase: str
) -> list[tuple[list[float], list[float], tuple[list[float], list[float]]]]:
    """Return, for each contender: the places of its bars, the medians, and the whiskers down to worst and up to best.

    Groups of streams stand below one another, each with the contenders in their order.
    """
    size, found = len(record["contenders"]), []
    for index, contender in enumerate(record["contenders"]):
        rows = {row["streams"]: row for row in contender["rows"]}
        ordered = [rows[streams] for streams in record["streams"]]
        places = [-float(group * (size + 1) + index) for group in range(len(ordered))]
        rates = [row[f"{phase}_tok_s"] for row in ordered]
        down = [row[f"{phase}_tok_s"] - row[f"{phase}_tok_s_lowest"] for row in ordered]
        up = [row[f"{phase}_tok_s_highest"] - row[f"{phase}_tok_s"] for row in ordered]
        found.append((places, rates, (down, up)))
    return found


def colours(contenders: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """Choose a colour for each contender: a hue for each engine, lighter from one variant to the next."""
    engines = [_engine(each) for each in contenders]
    peers = list(dict.fromkeys(engine for engine in engines if engine))
    found = []
    for index, engine in enumerate(engines):
        red, green, blue = HUES[peers.index(engine) % len(HUES)] if engine else OURS
        light = 0.55 * engines[:index].count(engine) / max(1, engines.count(engine))
        found.append((red + (1 - red) * light, green + (1 - green) * light, blue + (1 - blue) * light))
    return found


def _engine(contender: Mapping[str, Any]) -> str:
    """Return a peer's name without its width; "" for a contender of ours."""
    return "" if contender["ours"] else str(contender["name"]).partition(":")[0]


def _name_groups(panel: Any, record: Mapping[str, Any]) -> None:
    size, streams = len(record["contenders"]), record["streams"]
    middles = [-(group * (size + 1) + (size - 1) / 2) for group in range(len(streams))]
    panel.set_yticks(middles, [f"{each} stream{'' if each == 1 else 's'}" for each in streams])


def _title(record: Mapping[str, Any]) -> str:
    sizes = f"{record['prompt_tokens']} prompt tokens, {record['new_tokens']} new, {record['threads']} threads"
    return f"{record['model']}: {sizes}"


def _figure(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
