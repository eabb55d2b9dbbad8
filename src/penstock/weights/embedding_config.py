"""A model's embedding settings: a directory's `modules.json` and pooling config, or a GGUF file's pooling type.

Decides how hidden states become one vector if a request does not say. A model without these files uses the mean of all
positions, scaled to length 1. A module that is not implemented is refused, because the vectors would be wrong without
it. So is any order other than transformer, pooling, any `Dense`, and finally `Normalize`.
Sources: https://sbert.net/docs/package_reference/sentence_transformer/models.html; `llama_pooling_type` in llama.cpp's
`include/llama.h`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_header import GgufHeader
from penstock.weights.safetensors_files import load_json_object

__all__ = ["POOLING_TYPES", "EmbeddingModules", "embeds", "read_embedding", "read_modules"]

_MODULES = "modules.json"
_MODES = {
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
}
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_FLAG = "pooling_mode_"

POOLING_TYPES = {Pooling.MEAN: 1, Pooling.CLS: 2, Pooling.LAST: 3}
"""The values of GGUF's `pooling_type` key."""


@dataclass(frozen=True, slots=True)
class EmbeddingModules:
    """The contents of `modules.json`.

    Attributes:
        spec: how hidden states become a vector.
        dense: the directories of the `Dense` modules applied to that vector, in order.
    """

    spec: EmbeddingSpec
    dense: tuple[Path, ...] = ()


def embeds(header: GgufHeader) -> bool:
    """Whether a GGUF file declares an embedding model."""
    return _pooling_type(header) in POOLING_TYPES.values()


def _pooling_type(header: GgufHeader) -> Any:
    return header.metadata.get(f"{header.metadata.get('general.architecture')}.pooling_type")


def read_embedding(model: Path, header: GgufHeader | None = None) -> EmbeddingSpec | None:
    """The embedding settings in a model's files; None if there are none.

    Args:
        model: the model's directory or file.
        header: header of a GGUF file, whose vectors are scaled to length 1, as in llama.cpp.

    Raises:
        ModelFileError: a module or a pooling is not implemented, or a file cannot be read.
    """
    if header is not None:
        kinds = {number: pooling for pooling, number in POOLING_TYPES.items()}
        return EmbeddingSpec(kinds[_pooling_type(header)]) if embeds(header) else None
    modules = read_modules(model)
    return None if modules is None else modules.spec


def read_modules(model: Path) -> EmbeddingModules | None:
    """The modules of a directory; None if it has no `modules.json`, or is a file. Raises as `read_embedding`."""
    file = model / _MODULES
    if not model.is_dir() or not file.is_file():
        return None
    spec, dense, before = EmbeddingSpec(normalize=False), [], 0
    for module in _modules(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _ORDER:
            raise ModelFileError(str(file), "type", f"{kind!r} is not implemented; {', '.join(_ORDER)} are")
        if _ORDER.index(kind) < before:
            raise ModelFileError(str(file), "type", f"{kind!r} after {_ORDER[before]!r} is not implemented")
        before, directory = _ORDER.index(kind), _inside(model, module, file)
        if kind == "Pooling":
            spec = replace(spec, pooling=_pooling(directory / "config.json"))
        elif kind == "Dense":
            dense.append(directory)
        elif kind == "Normalize":
            spec = replace(spec, normalize=True)
    return EmbeddingModules(spec, tuple(dense))


def _inside(model: Path, module: dict[str, Any], file: Path) -> Path:
    """The directory of a module; must be inside the model's directory."""
    path = PurePosixPath(str(module.get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise ModelFileError(str(file), "path", f"{str(path)!r} lies outside of the model's directory")
    return model / path


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(str(file), "", f"is not readable JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(str(file), "", "must hold a list of modules")
    return modules


def _pooling(file: Path) -> Pooling:
    """The pooling mode that is enabled: most files have a flag for each mode, newer ones have a name."""
    config = load_json_object(file)
    if config.get("include_prompt") is False:
        raise ModelFileError(str(file), "include_prompt", "false is not implemented: all positions are pooled")
    chosen = [key.removeprefix(_FLAG) for key, value in config.items() if key.startswith(_FLAG) and value is True]
    if isinstance(config.get("pooling_mode"), str):
        chosen.append(config["pooling_mode"])
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ModelFileError(
            str(file),
            "pooling_mode",
            f"{' and '.join(chosen) or 'none'} is not implemented; one of {', '.join(_MODES)} is",
        )
    return _MODES[chosen[0]]
