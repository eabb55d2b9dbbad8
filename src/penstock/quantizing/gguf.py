"""Writes a model as a GGUF file in another form.

Decides what goes into the file. From a GGUF file: all its metadata, and its tensors in other block kinds. From a
directory: its settings and tokenizer in GGUF's keys, as far as GGUF can express them. This module does not guarantee
that nothing is lost; instead, before any weight is written, the model is built from the new file's header and compared
with the one that the directory builds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import models
from penstock.contract.errors import ModelFileError
from penstock.contract.model import HuggingFaceText
from penstock.nn.difference import difference
from penstock.nn.program import Program
from penstock.quantizing.blank import Blank
from penstock.quantizing.gguf_settings import file_settings
from penstock.quantizing.text_part import text_part
from penstock.text.gguf_vocabulary_writer import vocabulary_of
from penstock.weights.bind import Binder
from penstock.weights.embedding_config import POOLING_TYPES, read_modules
from penstock.weights.files import ModelFiles, open_model
from penstock.weights.gguf_blocks import decode
from penstock.weights.gguf_conversion import Converted, GgufWriting
from penstock.weights.gguf_encode import ENCODABLE, encode
from penstock.weights.gguf_file import GgufSource
from penstock.weights.gguf_from_huggingface import ARCHITECTURES, StoredTensor, tensors_of
from penstock.weights.gguf_header import GgufTensor
from penstock.weights.gguf_mixture import FORMS, ModelFacts, choose_kinds
from penstock.weights.gguf_writer import OutTensor, write_gguf
from penstock.weights.licence import licence_of
from penstock.weights.quantised_safetensors import QUANTISED_TYPES
from penstock.weights.source import PIECE_ELEMENTS, open_binary, read_bytes

__all__ = ["Plan", "plan_file", "write_file"]

_NO_CHANGES: Mapping[str, Any] = {}
_VERSION_OF_BLOCKS = 2
TWICE = "its weights are in {again} already, and the errors of both forms add up"
_NOT_SCALED = "its embeddings are not scaled to length 1 here, and will be from the file"
_COPIED_BYTES = 1 << 20
_PIECE_ELEMENTS = 1 << 17
"""Elements encoded at once: the dozen temporary tensors of a piece nearly fit a second-level cache."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A file that can be written.

    Attributes:
        metadata: the file's metadata.
        tensors: in file order.
        settings: names of tensors that are settings.
        remarks: messages about what the operator may not expect.
        program: the model that the file must build; None if the source is a GGUF file, whose settings are copied.
    """

    metadata: dict[str, Any]
    tensors: tuple[OutTensor, ...]
    settings: frozenset[str]
    remarks: tuple[str, ...]
    program: Program | None = None

    @property
    def bytes(self) -> int:
        """Total size of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by block kind, largest first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def plan_file(files: ModelFiles, form: str) -> Plan:
    """Decide what a file in this form, one of `FORMS`, will hold.

    Raises:
        ModelFileError: GGUF cannot express the model's settings or tokenizer.
    """
    if isinstance(files.source, GgufSource):
        return _plan_from_gguf(files.source, form)
    return _plan_from_directory(files, form)


def write_file(plan: Plan, target: Path, advance: Callable[[int], object]) -> None:
    """Write the file; raises as `write_gguf`, and ModelFileError if the file would build a different model."""

    def check(partial: Path) -> None:
        written = open_model(partial, models.gguf_dialect)
        if plan.program is None:
            return
        found = difference(plan.program, _build(written)[0])
        if found is not None:
            raise ModelFileError(
                str(target), "", f"cannot say all that the model's settings say: read from GGUF, {found}"
            )

    with _one_thread_a_piece():
        write_gguf(target, plan.metadata, plan.tensors, settings=plan.settings, check=check, advance=advance)


def _plan_from_gguf(source: GgufSource, form: str) -> Plan:
    header = source.header
    metadata = {key: value for key, value in header.metadata.items() if not key.startswith("split.")}
    metadata.pop("general.alignment", None)
    architecture = metadata["general.architecture"]
    counts = metadata.get(f"{architecture}.attention.head_count_kv", 0)
    heads = metadata.get(f"{architecture}.attention.head_count", 0)
    facts = ModelFacts(
        architecture=architecture,
        layers=metadata.get(f"{architecture}.block_count", 0),
        experts=metadata.get(f"{architecture}.expert_count", 0),
        shared_heads=isinstance(counts, int) and 0 < counts < heads,
    )
    kinds = choose_kinds(FORMS[form], {name: tensor.shape for name, tensor in header.tensors.items()}, facts)
    tensors = []
    for name, tensor in header.tensors.items():
        kind = kinds[name] or tensor.kind.name
        pieces = _copied(tensor) if kind == tensor.kind.name else _encoded(name, _decoded(tensor), kind)
        tensors.append(
            OutTensor(name, tensor.shape, tensor.kind if kind == tensor.kind.name else ENCODABLE[kind], pieces)
        )
    again = sorted({tensor.kind.name for tensor in header.tensors.values() if tensor.kind.elements > 1})
    remarks = [TWICE.format(again=", ".join(again))] if again else []
    return Plan(metadata | _form_keys(form), tuple(tensors), frozenset(), tuple(remarks))


def _form_keys(form: str) -> dict[str, Any]:
    return {"general.file_type": FORMS[form].number, "general.quantization_version": _VERSION_OF_BLOCKS}


def _copied(tensor: GgufTensor) -> Callable[[], Iterator[Tensor]]:
    return lambda: _raw_pieces(tensor, _COPIED_BYTES)


def _decoded(tensor: GgufTensor) -> Callable[[], Iterator[Tensor]]:
    row = tensor.shape[-1]
    row_bytes = row // tensor.kind.elements * tensor.kind.bytes
    step = max(1, PIECE_ELEMENTS // row) * row_bytes

    def rows() -> Iterator[Tensor]:
        for raw in _raw_pieces(tensor, step):
            yield decode(raw, tensor.kind).float().view(-1, row)

    return rows


def _raw_pieces(tensor: GgufTensor, step: int) -> Iterator[Tensor]:
    with open_binary(tensor.path) as stream:
        stream.seek(tensor.offset)
        for start in range(0, tensor.bytes, step):
            raw = torch.empty(min(step, tensor.bytes - start), dtype=torch.uint8)
            read_bytes(stream, tensor.path, tensor.name, raw)
            yield raw


def _encoded(name: str, rows: Callable[[], Iterator[Tensor]], kind: str) -> Callable[[], Iterator[Tensor]]:
    """Encode rows in this kind, piece by piece, with as many pieces at a time as torch has threads."""
    threads = torch.get_num_threads()

    def pieces() -> Iterator[Tensor]:
        waiting: deque[Future[Tensor]] = deque()
        pool = ThreadPoolExecutor(threads)
        try:
            for piece in _pieces(rows()):
                waiting.append(pool.submit(encode, piece, kind))
                if len(waiting) > 2 * threads:
                    yield _result(name, waiting.popleft())
            while waiting:
                yield _result(name, waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt, do not encode the remaining pieces

    return pieces


def _pieces(rows: Iterator[Tensor]) -> Iterator[Tensor]:
    for each in rows:
        for piece in each.split(max(1, _PIECE_ELEMENTS // each.shape[-1])):
            yield piece.contiguous()


def _result(name: str, encoded: Future[Tensor]) -> Tensor:
    try:
        return encoded.result()
    except ValueError as error:
        raise ModelFileError("", name, str(error)) from error


@contextmanager
def _one_thread_a_piece() -> Iterator[None]:
    """Make torch's operations single-threaded: each thread encodes whole pieces, which stay in its cache."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plan_from_directory(files: ModelFiles, form: str) -> Plan:
    file = str(files.path)
    config, renamed = text_part(files)
    family = str(config.get("model_type"))
    if family not in ARCHITECTURES:
        raise ModelFileError(
            file,
            "model_type",
            f"{family!r} cannot be written as GGUF from a directory; {', '.join(ARCHITECTURES)} can."
            " Another family's BF16 GGUF file, as llama.cpp's conversion writes it, can be quantised",
        )
    architecture = ARCHITECTURES[family]
    assert isinstance(files.text, HuggingFaceText)
    dialect = models.gguf_dialect(architecture, file)
    writing = dialect.writing or GgufWriting()
    program, left_out = _build(files, writing.order)
    if program.looks_ahead:
        raise ModelFileError(file, "", "a model that looks ahead cannot be written as GGUF: no such file is read")
    modules = read_modules(files.path)
    if modules is not None and modules.dense:
        raise ModelFileError(file, "modules.json", "'Dense' modules have no place in a GGUF file")
    source = Converted(files.source, writing.conversions(config), renamed=renamed, left_out=left_out)
    stored = tensors_of(source, dialect, config, file)
    embedding = None if modules is None else modules.spec
    written = vocabulary_of(files.text, program.shape.vocab_size, embeds=embedding is not None)
    settings, factors = file_settings(config, program, architecture)
    own = {f"{architecture}.{key}": value for key, value in writing.settings(config, source).items()}
    settings = {key: value for key, value in (settings | own).items() if value is not None}
    factors |= writing.vectors(config, source)
    if embedding is not None:
        settings[f"{architecture}.pooling_type"] = POOLING_TYPES[embedding.pooling]
    stored += [_vector(name, numbers) for name, numbers in factors.items()]
    experts = settings.get(f"{architecture}.expert_count", 0)
    shared = program.shape.num_kv_heads < program.shape.num_heads
    facts = ModelFacts(architecture, program.shape.num_layers, experts, shared)
    kinds = choose_kinds(FORMS[form], {tensor.name: tensor.shape for tensor in stored}, facts)
    remarks = [*written.left_out]
    if embedding is not None and not embedding.normalize:
        remarks.append(_NOT_SCALED)
    again = [kind for kind in files.stored if kind in QUANTISED_TYPES | {"MXFP4"}]
    if again and FORMS[form].kind not in ("F32", "F16", "BF16"):
        remarks.append(TWICE.format(again=", ".join(again)))
    if left_out:
        remarks.append(f"left out: {', '.join(part.strip('.') for part in left_out)}, which no text needs")
    general = {"general.architecture": architecture, "general.name": files.name, "general.type": "model"}
    general |= {"general.license": licence} if (licence := licence_of(files)) else {}
    return Plan(
        metadata=general | _form_keys(form) | settings | written.metadata,
        tensors=tuple(_out(tensor, kinds[tensor.name] or "F32") for tensor in stored),
        settings=frozenset(factors),
        remarks=tuple(remarks),
        program=program,
    )


def _out(tensor: StoredTensor, kind: str) -> OutTensor:
    return OutTensor(tensor.name, tensor.shape, ENCODABLE[kind], _encoded(tensor.name, tensor.rows, kind))


def _vector(name: str, numbers: Tensor) -> StoredTensor:
    return StoredTensor(name, tuple(numbers.shape), lambda: iter([numbers.view(1, -1)]))


def _build(files: ModelFiles, order: Mapping[str, Any] = _NO_CHANGES) -> tuple[Program, tuple[str, ...]]:
    """Build the model with real RoPE tables but uninitialised weights; also returns the parts that it leaves out."""
    config = {**files.config, **order}
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {**config["text_config"], **order}
    binder = Binder(Blank(files.source), torch.bfloat16, "cpu", str(files.path))
    return models.load(config, binder, str(files.path), None), tuple(binder.left_out)
