"""Where a model's recommended generation settings come from: `generation_config.json`, or the catalogue.

Decides which file `--generation-config` means. Knows no sampling parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.weights.catalogue import CATALOGUE
from penstock.weights.safetensors_files import load_json_object

__all__ = ["GenerationConfig", "read_generation_config"]

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a publisher recommends.

    Attributes:
        values: under the keys of Hugging Face's `generation_config.json`; empty if there is no recommendation.
        origin: the file, or `the catalogue`.
    """

    values: Mapping[str, Any]
    origin: str


_NOTHING = GenerationConfig({}, "")


def read_generation_config(choice: str, model: Path) -> GenerationConfig:
    """The generation settings recommended for a model.

    Args:
        choice: `auto`, `none`, or the path of a `generation_config.json` or of the directory that holds one.
        model: the model's file or directory.

    Raises:
        ConfigError: `choice` is a path, and there is no such file.
        ModelFileError: the file is not a JSON object.
    """
    match choice:
        case "none":
            return _NOTHING
        case "auto":
            return _of_model(model)
    path = Path(choice).expanduser()
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            "generation_config", f"{file} is no file; give auto, none, a file, or a directory with {_FILE}"
        )
    return GenerationConfig(load_json_object(file), str(file))


def _of_model(model: Path) -> GenerationConfig:
    file = model / _FILE
    if file.is_file():
        return GenerationConfig(load_json_object(file), str(file))
    for entry in CATALOGUE.values():
        if entry.file_name == model.name:
            return GenerationConfig(entry.generation_config, "the catalogue")
    return _NOTHING
