"""Split GGUF files: the parts `NAME-00001-of-00003.gguf` and so on, read as one header.

Decides which files belong together, by their names and their metadata (`split.no`, `split.count`, as llama.cpp's
gguf-split writes them). Settings and vocabulary come from the first part, tensors from all parts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_header import GgufHeader, read_gguf_header
from penstock.weights.locate import SPLIT_NAME

__all__ = ["read_gguf"]


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a GGUF file; given any part of a split file, the headers of all parts merged.

    Raises:
        ModelFileError: a part is missing or does not match its name; or as `read_gguf_header`.
    """
    header = read_gguf_header(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1) and type(count) is int:
        return header
    parts = [header if part == path else read_gguf_header(part) for part in _paths(path, count)]
    for number, part in enumerate(parts):
        said = part.metadata.get("split.no"), part.metadata.get("split.count")
        if said != (number, count):
            raise ModelFileError(
                str(part.path), "split.no", f"its name says part {number + 1} of {count}, but it is {_named(said)}"
            )
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    total = sum(len(part.tensors) for part in parts)
    if len(tensors) != total:
        twice = next(name for name in tensors if sum(name in part.tensors for part in parts) > 1)
        raise ModelFileError(str(path), twice, "is in more than one part")
    wanted = parts[0].metadata.get("split.tensors.count", total)
    if wanted != total:
        raise ModelFileError(str(path), "split.tensors.count", f"its parts have {total} tensors, not {wanted!r:.20}")
    return replace(parts[0], tensors=tensors, parts=tuple(part.path for part in parts))


def _paths(path: Path, count: object) -> list[Path]:
    """The paths of all parts, in order."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ModelFileError(
            str(path), "split.count", f"is one of {count!r:.20} parts, so it must be named NAME-00001-of-0000N.gguf"
        )
    paths = [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{found[4]}") for number in range(1, int(found[3]) + 1)
    ]
    for part in paths:
        if not part.is_file():
            raise ModelFileError(str(part), "", f"is missing; {path.name} is one of {count} parts, and all are needed")
    return paths


def _named(said: tuple[object, object]) -> str:
    number, count = said
    return f"part {number + 1} of {count!r:.20}" if type(number) is int else "none"
