"""Writes a model as a Hugging Face directory: its projections as compressed-tensors integers, or as plain numbers.

Decides what goes into the directory: the tensors under their own names, `config.json` with its dtype and quantisation
entries updated, and every other small file unchanged, since these files hold tokenizer, template and pooling. A
repository's code is not copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import models
from penstock.contract.errors import ModelFileError
from penstock.quantizing.gguf import TWICE
from penstock.quantizing.uses import projections
from penstock.weights.compressed_encode import INTEGER_FORMS, IntegerForm
from penstock.weights.embedding_config import read_modules
from penstock.weights.files import ModelFiles, open_model
from penstock.weights.mxfp4_safetensors import Mxfp4Source
from penstock.weights.quantised_safetensors import QuantisedSource, read_part
from penstock.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, StoredTensor
from penstock.weights.safetensors_writer import OutTensors, write_safetensors
from penstock.weights.source import TensorSource
from penstock.weights.unfinished import check_room, whole_directory

__all__ = ["DIRECTORY_FORMS", "DirectoryPlan", "plan_directory", "write_directory"]

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_STORED = {**_FLOATS, "F64": torch.float64}
_COPIED = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken")
_NOTICES = ("LICENSE", "LICENCE", "NOTICE")
_MOST_COPIED_BYTES = 256 << 20

DIRECTORY_FORMS = (*INTEGER_FORMS, *_FLOATS)


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """A directory that can be written.

    Attributes:
        source: the directory that other files are copied from.
        config: the new `config.json`.
        tensors: the tensors of the single weights file.
        kinds: bytes by kind of tensor, largest first.
        remarks: messages about what the operator may not expect.
    """

    source: Path
    config: Mapping[str, Any]
    tensors: tuple[OutTensors, ...]
    kinds: Mapping[str, int]
    remarks: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Total size of all tensors."""
        return sum(self.kinds.values())


def plan_directory(files: ModelFiles, form: str) -> DirectoryPlan:
    """Decide what a directory in this form, one of `DIRECTORY_FORMS`, will hold.

    Raises:
        ModelFileError: the model is not a directory, has MXFP4 experts, or has nothing to quantise.
    """
    if not files.path.is_dir():
        raise ModelFileError(str(files.path), "", "safetensors are written from directories; a file can become GGUF")
    if any(name.endswith("_blocks") and files.source.stored_kind(name) for name in files.source.names()):
        raise ModelFileError(str(files.path), "", "its experts in MXFP4 have other names as plain numbers; use GGUF")
    integers = INTEGER_FORMS.get(form)
    chosen, left_out = projections(files, integers) if integers else (frozenset[str](), ())
    if integers and not chosen:
        raise ModelFileError(str(files.path), "", f"has no projection whose rows are whole groups of {form}")
    tensors = {
        name: _quantised(files.source, name, integers) if integers and name in chosen else _plain(files, name, form)
        for name in sorted(files.source.names())
    }
    kinds: dict[str, int] = {}
    for name, each in tensors.items():
        kind = form if name in chosen else str(next(iter(each.sizes.values()))[0]).removeprefix("torch.")
        kinds[kind] = kinds.get(kind, 0) + each.bytes
    again = [kind for kind in files.stored if kind not in _STORED and integers]
    return DirectoryPlan(
        source=files.path,
        config=_config(files, form, sorted(set(tensors) - chosen), left_out),
        tensors=tuple(tensors.values()),
        kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        remarks=(TWICE.format(again=", ".join(again)),) if again else (),
    )


def write_directory(plan: DirectoryPlan, target: Path, advance: Callable[[int], object]) -> None:
    """Write the directory; raises ConfigError if that fails, and ModelFileError if a number cannot be represented."""
    check_room(target.parent, plan.bytes)
    with whole_directory(target) as partial:
        for file in _beside(plan.source):
            (partial / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(plan.source / file, partial / file)
        (partial / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        write_safetensors(partial / SINGLE_FILE, plan.tensors, advance)
        open_model(partial, models.gguf_dialect)


def _quantised(source: TensorSource, name: str, form: IntegerForm) -> OutTensors:
    module = name.removesuffix(".weight")
    outputs, inputs = source.shape(name)

    def make() -> dict[str, Tensor]:
        try:
            parts = form.encode(source.read(name, torch.float32, "cpu"))
        except ValueError as error:
            raise ModelFileError("", name, str(error)) from error
        return {module + ending: part for ending, part in parts.items()}

    return OutTensors({module + ending: size for ending, size in form.parts(outputs, inputs).items()}, make)


def _plain(files: ModelFiles, name: str, form: str) -> OutTensors:
    """A tensor unquantised, in the requested dtype if there is one; tensors that are not weights keep their type."""
    source = files.source
    assert isinstance(source, QuantisedSource | Mxfp4Source), "of every directory"
    stored = source.stored[name]
    if stored.dtype not in _STORED and isinstance(stored, StoredTensor):
        raw = read_part(name, stored, ("I64", "I32", "I8", "U8"))
        return OutTensors({name: (raw.dtype, tuple(raw.shape))}, lambda: {name: raw})
    dtype = _FLOATS[form] if form in _FLOATS else _STORED.get(stored.dtype, torch.bfloat16)
    return OutTensors({name: (dtype, source.shape(name))}, lambda: {name: source.read(name, dtype, "cpu")})


def _config(files: ModelFiles, form: str, plain: list[str], left_out: tuple[str, ...]) -> dict[str, Any]:
    config = {key: value for key, value in files.config.items() if key != "quantization_config"}
    if form in _FLOATS:
        return _typed(config, str(_FLOATS[form]).removeprefix("torch."))
    integers = INTEGER_FORMS[form]
    return config | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": integers.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": integers.config_group | {"format": integers.format}},
            "ignore": _ignored(files.source, plain, left_out),
            "kv_cache_scheme": None,
        }
    }


def _typed(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with this dtype, in its sections too."""
    typed = {key: _typed(value, dtype) if key.endswith("_config") and value else value for key, value in config.items()}
    return typed | {key: dtype for key in ("dtype", "torch_dtype") if key in config}


def _ignored(source: TensorSource, plain: list[str], left_out: tuple[str, ...]) -> list[str]:
    """Modules that engines would otherwise treat as quantised, including a tied head, which has no tensor."""
    parts = {f"re:.*{part.removeprefix('model.').strip('.')}.*" for part in left_out}
    modules = {
        name.removesuffix(".weight")
        for name in plain
        if name.endswith(".weight") and len(source.shape(name)) == 2 and not name.startswith(left_out)
    }
    return sorted(modules | parts | {"lm_head"})


def _beside(source: Path) -> Iterator[Path]:
    """Files of a model directory and its folders, except weights and config, relative to `source`.

    Includes the weights of `Dense` modules, which are copied unchanged.
    """
    modules = read_modules(source)
    dense = () if modules is None else modules.dense
    for path in sorted(source.glob("*")) + sorted(source.glob("*/*")):
        wanted = path.suffix in _COPIED or path.name.startswith(_NOTICES)
        wanted = wanted or (path.suffix == ".safetensors" and path.parent in dense)
        if not wanted or path.name == INDEX_FILE or path.name.startswith(".") or path.parent.name.startswith("."):
            continue
        if path != source / "config.json" and path.is_file() and path.stat().st_size < _MOST_COPIED_BYTES:
            yield path.relative_to(source)
