"""Opens a path as everything that an engine needs of a model: settings, tensors, text files, a name and a fingerprint.

Decides which format a path is in, and the model's name if the operator does not give one. Knows no model family. Reads
no weights, only headers and, for the fingerprint, samples.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.contract.errors import ModelFileError
from penstock.contract.model import HuggingFaceText, TextFiles
from penstock.weights.gguf_dialect import FindDialect
from penstock.weights.gguf_file import open_gguf
from penstock.weights.gguf_header import BLOCK_TYPES
from penstock.weights.gguf_vocabulary import read_vocabulary
from penstock.weights.locate import default_name
from penstock.weights.pt_checkpoint import PtSource, read_pt
from penstock.weights.quantisation_config import read_quantisation
from penstock.weights.quantised_formats import open_quantised
from penstock.weights.quantised_safetensors import QUANTISED_TYPES
from penstock.weights.safetensors_files import load_json_object, open_safetensors
from penstock.weights.source import TensorSource, open_binary

__all__ = ["ModelFiles", "open_model"]

_DTYPE_NAMES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_PT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model.

    Attributes:
        path: the `.gguf` or `.pt` file, or the directory.
        name: what clients call it unless the operator says otherwise.
        config: settings under the keys of Hugging Face's `config.json`.
        source: its tensors.
        text: where its tokenizer and chat template come from.
        stored_dtype: the type of most weights on disk: `float32`, `bfloat16`, `float16` or `quantised`.
        num_weights: number of elements in all tensors.
        num_bytes: size of all tensors on disk.
        stored: bytes on disk by tensor type.
        digest: 32 bytes that identify the model in cache keys: a hash of the settings, of every tensor's name, shape
            and stored type, and of each weight file's size and contents, sampled at 256 evenly spaced places. The same
            files give the same digest anywhere; an edit that keeps sizes and misses the samples goes unnoticed.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    source: TensorSource
    text: TextFiles
    stored_dtype: str
    num_weights: int
    num_bytes: int
    stored: Mapping[str, int]
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor, independent of the file format."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    bytes: int


def open_model(path: Path, dialects: FindDialect) -> ModelFiles:
    """Open a model without reading its weights.

    Args:
        path: a `.gguf` file, a `.pt` file with a GPT-2, or a directory in Hugging Face layout.
        dialects: finds a family's GGUF conventions (`models.gguf_dialect`).

    Raises:
        ModelFileError: a file is missing, malformed, or uses something that is not supported.
    """
    if path.is_dir():
        return _open_directory(path)
    return _open_pt_file(path) if path.suffix.lower() == ".pt" else _open_gguf_file(path, dialects)


def _open_gguf_file(path: Path, dialects: FindDialect) -> ModelFiles:
    source = open_gguf(path, dialects)
    stored = [
        _Stored(name, tensor.shape, tensor.kind.name, tensor.elements, tensor.bytes)
        for name, tensor in source.stored.items()
    ]
    text = read_vocabulary(source.header, source.config["vocab_size"])
    return _model_files(path, source.config, source, text, stored, source.header.parts)


def _open_pt_file(path: Path) -> ModelFiles:
    checkpoint = read_pt(path)
    stored = [
        _Stored(
            name,
            tuple(tensor.shape),
            _PT_NAMES.get(tensor.dtype, ""),
            tensor.numel(),
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in checkpoint.tensors.items()
    ]
    source, text = PtSource(checkpoint.tensors, path), HuggingFaceText(str(path.parent))
    return _model_files(path, checkpoint.config, source, text, stored, [path])


def _open_directory(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        advice = "; to use a .gguf file in it, name the file" if any(path.glob("*.gguf")) else ""
        raise ModelFileError(str(path / "config.json"), "", f"is missing; a model directory must have it{advice}")
    file = str(path / "config.json")
    config = load_json_object(path / "config.json")
    scheme = read_quantisation(config, file)
    plain = open_safetensors(path)
    source = open_quantised(plain, scheme, file)
    stored = [
        _Stored(name, tensor.shape, tensor.dtype, tensor.elements, tensor.bytes)
        for name, tensor in source.stored.items()
    ]
    files = sorted({tensor.path for tensor in plain.stored.values()})
    text = HuggingFaceText(str(path))
    return _model_files(path, config, source, text, stored, files)


def _model_files(
    path: Path,
    config: Mapping[str, Any],
    source: TensorSource,
    text: TextFiles,
    stored: list[_Stored],
    files: Iterable[Path],
) -> ModelFiles:
    return ModelFiles(
        path=path,
        name=default_name(path),
        config=config,
        source=source,
        text=text,
        stored_dtype=_stored_dtype(path, stored),
        num_weights=sum(tensor.elements for tensor in stored),
        num_bytes=sum(tensor.bytes for tensor in stored),
        stored=_bytes_by_type(stored),
        digest=_digest(config, stored, files),
    )


def _bytes_by_type(stored: list[_Stored]) -> Mapping[str, int]:
    sizes: Counter[str] = Counter()
    for tensor in stored:
        sizes[tensor.dtype] += tensor.bytes
    return dict(sizes)


def _stored_dtype(path: Path, stored: list[_Stored]) -> str:
    """The type of most weights; tensors that are not weights (integer buffers) do not count.

    A directory with any quantised matrix is `quantised`: embeddings, which stay unquantised, can be most of a small
    model.
    """
    counts: Counter[str] = Counter()
    for tensor in stored:
        if tensor.dtype in _DTYPE_NAMES:
            counts[_DTYPE_NAMES[tensor.dtype]] += tensor.elements
        elif tensor.dtype in QUANTISED_TYPES:
            return "quantised"
        elif tensor.dtype in BLOCK_TYPES:
            counts["quantised"] += tensor.elements
    if not counts:
        raise ModelFileError(str(path), "", "holds no tensor of a type that weights can have")
    return counts.most_common(1)[0][0]


def _digest(config: Mapping[str, Any], stored: list[_Stored], files: Iterable[Path]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    table = sorted((tensor.name, list(tensor.shape), tensor.dtype) for tensor in stored)
    digest.update(json.dumps([config, table], sort_keys=True).encode())
    for path in files:
        with open_binary(path) as stream:
            size = stream.seek(0, 2)
            digest.update(size.to_bytes(8, "little"))
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
