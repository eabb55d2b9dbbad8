"""What an embedding is, as a model's files say: a directory's `modules.json` and pooling, or a GGUF file's pooling.

Decides how hidden states become one vector where a request does not say. A model without these files has the mean of
all positions, scaled to length 1. A module that is not implemented is refused: without it, vectors would be others.
Sources: https://sbert.net/docs/package_reference/sentence_transformer/models.html; `llama_pooling_type` in llama.cpp's
`include/llama.h`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_header import GgufHeader
from penstock.weights.safetensors_files import load_json_object

__all__ = ["POOLING_TYPES", "embeds", "read_embedding"]

_MODULES = "modules.json"
_MODES = {"mean": Pooling.MEAN, "mean_tokens": Pooling.MEAN, "lasttoken": Pooling.LAST}
_FLAG = "pooling_mode_"

POOLING_TYPES = {Pooling.MEAN: 1, Pooling.LAST: 3}
"""The numbers of GGUF's key `pooling_type`."""


def embeds(header: GgufHeader) -> bool:
    """Whether a GGUF file says that its model is for embeddings."""
    return _pooling_type(header) in POOLING_TYPES.values()


def _pooling_type(header: GgufHeader) -> Any:
    return header.metadata.get(f"{header.metadata.get('general.architecture')}.pooling_type")


def read_embedding(model: Path, header: GgufHeader | None = None) -> EmbeddingSpec | None:
    """What the files of a model say of its embeddings; None if they say nothing.

    Args:
        model: the model's directory or file.
        header: of a GGUF file. Its vectors are scaled to length 1, as llama.cpp scales them.

    Raises:
        ModelFileError: a module or a pooling is not implemented, or a file cannot be read.
    """
    if header is not None:
        kinds = {number: pooling for pooling, number in POOLING_TYPES.items()}
        return EmbeddingSpec(kinds[_pooling_type(header)]) if embeds(header) else None
    file = model / _MODULES
    if not model.is_dir() or not file.is_file():
        return None
    spec = EmbeddingSpec(normalize=False)
    for module in _modules(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(model / str(module.get("path", "")) / "config.json")
            spec = EmbeddingSpec(pooling, spec.normalize)
        elif kind == "Normalize":
            spec = EmbeddingSpec(spec.pooling, normalize=True)
        elif kind != "Transformer":
            raise ModelFileError(
                str(file), "type", f"{kind!r} is not implemented; Transformer, Pooling and Normalize are"
            )
    return spec


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(str(file), "", f"is not readable JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(str(file), "", "must hold a list of modules")
    return modules


def _pooling(file: Path) -> Pooling:
    """The one way of pooling that is on: a flag for each in most files, a name in newer ones."""
    config = load_json_object(file)
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
