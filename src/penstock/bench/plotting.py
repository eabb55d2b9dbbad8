"""Access to matplotlib, to draw a record into a file. It is optional (extra `bench`), and imported on first use."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from penstock.contract.errors import ConfigError

__all__ = ["SUFFIXES", "check_suffix", "plotting"]

SUFFIXES = (".pdf", ".png", ".svg")


def check_suffix(target: Path) -> None:
    """Make sure that the suffix of `target` is one of `SUFFIXES`: it selects the format of the drawing.

    Raises:
        ConfigError: it is not.
    """
    if target.suffix not in SUFFIXES:
        raise ConfigError("plot", f"{target} must end in one of {', '.join(SUFFIXES)}")


def plotting() -> ModuleType:
    """Matplotlib's pyplot, drawing into files only; call this before measuring, to fail early.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        matplotlib = import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plot", "needs matplotlib; run: pip install 'penstock[bench]'") from error
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif"})
    return import_module("matplotlib.pyplot")
