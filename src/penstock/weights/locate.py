"""Where models are: resolves what the operator typed to a path on this machine.

Decides what a MODEL argument means: a catalogue name first (write `./name` for a directory of that name), then an
existing path, then `org/name` on the Hugging Face hub. Never fetches; that is `pull`. Reads no environment: the command
line passes it in.

Layout of the cache directory:

    models/<catalogue name>/<file>     verified catalogue files
    hub/<org>/<name>/                  complete Hugging Face directories
    partial/                           downloads in progress; nothing in it is ever served
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.errors import ModelUnavailable
from penstock.weights.catalogue import CATALOGUE, CatalogueModel

__all__ = [
    "SPLIT_NAME",
    "InstalledModel",
    "catalogue_path",
    "default_name",
    "default_cache_dir",
    "hub_path",
    "installed_models",
    "is_hub_name",
    "locate",
    "locate_local",
]

SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""One part of a split GGUF file: the model's name, the part's number, how many there are."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model in the cache directory.

    Attributes:
        name: what to type to use it.
        bytes: total size of its files.
    """

    name: str
    path: Path
    bytes: int
    description: str


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where models are kept by default: `PENSTOCK_CACHE`, or the platform's cache directory.

    Args:
        environ: the process's environment, passed by the command line.
        platform: as `sys.platform`.
    """
    if environ.get("PENSTOCK_CACHE"):
        return Path(environ["PENSTOCK_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "penstock"
    if platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "penstock"
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    if platform == "darwin":
        return home / "Library" / "Caches" / "penstock"
    return home / ".cache" / "penstock"


def catalogue_path(entry: CatalogueModel, cache_dir: Path) -> Path:
    """Where a catalogue model's verified file is once it is pulled."""
    return cache_dir / "models" / entry.name / entry.file_name


def hub_path(model: str, cache_dir: Path) -> Path:
    """Where the directory of the hub's `org/name` is once it is pulled."""
    return cache_dir / "hub" / model


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form `org/name`, which can never climb out of the cache directory."""
    return _HUB_NAME.fullmatch(model) is not None


def locate_local(model: str, cache_dir: Path) -> Path | None:
    """The path of a model that is on this machine, or None.

    A catalogue file counts only if its size is exact; its contents were verified before it was given its name.

    Raises:
        ModelUnavailable: `model` is a file in a format that cannot be read.
    """
    entry = CATALOGUE.get(model)
    if entry is not None:
        path = catalogue_path(entry, cache_dir)
        return path if path.is_file() and path.stat().st_size == entry.file_bytes else None
    if not model:
        return None
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() not in (".gguf", ".pt"):
        raise ModelUnavailable(
            f"{model}: is neither a .gguf nor a .pt file; for safetensors name the directory that holds them"
        )
    if path.is_dir() or path.is_file():
        return path
    if is_hub_name(model) and hub_path(model, cache_dir).is_dir():
        return hub_path(model, cache_dir)
    return None


def default_name(path: Path) -> str:
    """What clients call the model at `path` unless the operator says otherwise."""
    if path.is_dir():
        return path.resolve().name
    if path.suffix.lower() == ".pt":
        return path.stem.lower()
    names = [entry.name for entry in CATALOGUE.values() if entry.file_name == path.name]
    part = SPLIT_NAME.fullmatch(path.name)
    return names[0] if names else (part[1] if part else path.stem).lower()


def locate(model: str, cache_dir: Path) -> Path:
    """The path of a model: a `.gguf` or `.pt` file, or a directory in Hugging Face layout.

    Raises:
        ModelUnavailable: it is not on this machine; the message says what to run.
    """
    path = locate_local(model, cache_dir)
    if path is not None:
        return path
    if model in CATALOGUE:
        raise ModelUnavailable(f"{model}: not pulled yet; run: penstock pull {model}")
    if is_hub_name(model):
        raise ModelUnavailable(
            f"{model}: no such path, and not pulled from the Hugging Face hub yet; run: penstock pull {model}"
        )
    raise unknown_model(model)


def unknown_model(model: str) -> ModelUnavailable:
    """The error for a MODEL that is not on this machine and is not a name that can be pulled."""
    return ModelUnavailable(
        f"{model or repr(model)}: no such file or directory, and not a name of the catalogue ({', '.join(CATALOGUE)})"
        " or org/name on the Hugging Face hub"
    )


def installed_models(cache_dir: Path) -> tuple[InstalledModel, ...]:
    """The complete models in the cache directory: catalogue models first, then hub models by name."""
    found: list[InstalledModel] = []
    for entry in CATALOGUE.values():
        path = locate_local(entry.name, cache_dir)
        if path is not None:
            found.append(InstalledModel(entry.name, path, entry.file_bytes, entry.description))
    for path in sorted((cache_dir / "hub").glob("*/*")):
        if path.is_dir():
            name = f"{path.parent.name}/{path.name}"
            size = sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
            found.append(InstalledModel(name, path, size, "From the Hugging Face hub."))
    return tuple(found)
