"""LoRA adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them.

Metadata: `general.type` is `adapter`, `adapter.type` is `lora`, `adapter.lora.alpha` is alpha; the update of a module
is scaled by alpha divided by its rank, or not at all if alpha is 0. A weight of the model, `blk.0.attn_q.weight`, has
the factors `blk.0.attn_q.weight.lora_a` `[r, K]` and `blk.0.attn_q.weight.lora_b` `[N, r]`. Names and the order of rows
follow the family's dialect, so the rows of B are put in Hugging Face order like the rows of the weight.
"""

from __future__ import annotations

import reprlib
from pathlib import Path

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.contract.model import ModelShape
from penstock.weights.adapter_files import AdapterFiles, Factors, check_shapes, digest_of
from penstock.weights.gguf_dialect import Arrangement, FindDialect, GgufDialect, HuggingFaceTensor
from penstock.weights.gguf_file import interleaved_rows, read_numbers
from penstock.weights.gguf_header import GgufHeader, GgufTensor
from penstock.weights.gguf_split import read_gguf

__all__ = ["open_gguf_adapter"]

_DOWN, _UP, _WEIGHT = ".lora_a", ".lora_b", ".weight"
_BY_HEADS = (Arrangement.INTERLEAVED_QUERY, Arrangement.INTERLEAVED_KEY)
_IN_ORDER = (Arrangement.SAME, Arrangement.TRANSPOSED)  # factors of a transposed weight are stored like any others
_KNOWN = frozenset({"adapter.type", "adapter.lora.alpha", "adapter.lora.task_name", "adapter.lora.prompt_prefix"})


def open_gguf_adapter(path: Path, dialects: FindDialect, shape: ModelShape) -> AdapterFiles:
    """Open an adapter without reading its tensors, beyond hashing them.

    Args:
        path: the file.
        dialects: finds the dialect of the file's architecture.
        shape: the model's sizes; the numbers of heads determine the order of rows.

    Raises:
        ModelFileError: the file is malformed, or needs something that is not implemented; names the key or tensor.
    """
    header = read_gguf(path)
    file = str(path)
    alpha = _alpha(header, file)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(file, "general.architecture", f"must be a name, got {reprlib.repr(architecture)}")
    dialect = dialects(architecture, file)
    factors, orders = {}, {}
    for name in sorted(header.tensors):
        stored = _stored_weight(name, header, file)
        if not name.endswith(_DOWN):
            continue
        known = _module(stored, dialect, file)
        down, up = header.tensors[name], header.tensors[stored + _UP]
        check_shapes(file, stored, down.shape, up.shape)
        scale = alpha / down.shape[0] if alpha else 1.0
        module = known.name.removesuffix(_WEIGHT)
        factors[module] = Factors(module, name, up.name, (down.shape, up.shape), scale)
        if known.arrangement in _BY_HEADS:
            heads = shape.num_heads if known.arrangement is Arrangement.INTERLEAVED_QUERY else shape.num_kv_heads
            orders[up.name] = _row_order(up, heads, file)
    if not factors:
        raise ModelFileError(file, "", "holds no low-rank factors")

    def read_tensor(name: str, out: Tensor) -> None:
        if name not in orders:
            read_numbers(header.tensors[name], out.view(-1))
            return
        rows = torch.empty_like(out)
        read_numbers(header.tensors[name], rows.view(-1))
        out[orders[name]] = rows

    return AdapterFiles(path, file, factors, digest_of(header.parts), read_tensor)


def _alpha(header: GgufHeader, file: str) -> float:
    """Check that the file is a LoRA adapter that can be read; returns its alpha."""
    wanted = {"general.type": "adapter", "adapter.type": "lora"}
    for key, value in wanted.items():
        if header.metadata.get(key) != value:
            found = reprlib.repr(header.metadata.get(key))
            raise ModelFileError(file, key, f"must be {value!r} for a LoRA adapter, got {found}")
    for key, value in header.metadata.items():
        if key.startswith("adapter.") and key not in _KNOWN and value not in ("", ()):
            raise ModelFileError(file, key, "is not implemented")
    alpha = header.metadata.get("adapter.lora.alpha")
    if type(alpha) not in (int, float) or alpha != alpha or abs(alpha) == float("inf"):
        raise ModelFileError(file, "adapter.lora.alpha", f"must be a number, got {reprlib.repr(alpha)}")
    return float(alpha)


def _stored_weight(name: str, header: GgufHeader, file: str) -> str:
    """The name, in the model's file, of the weight that a factor belongs to; both factors must be present."""
    for ending, other in ((_DOWN, _UP), (_UP, _DOWN)):
        if name.endswith(ending):
            stored = name.removesuffix(ending)
            if stored + other not in header.tensors:
                raise ModelFileError(file, name, f"has no {stored + other} beside it")
            return stored
    raise ModelFileError(file, name, "is no factor of a weight (….lora_a, ….lora_b)")


def _module(stored: str, dialect: GgufDialect, file: str) -> HuggingFaceTensor:
    known = dialect.hugging_face_tensor(stored)
    if known is None or not known.name.endswith(_WEIGHT):
        raise ModelFileError(file, stored, f"no weight of a {dialect.architecture} model has this name")
    if known.arrangement not in (*_IN_ORDER, *_BY_HEADS):
        raise ModelFileError(file, stored, "updates of weights that lie in another order are not implemented")
    return known


def _row_order(up: GgufTensor, heads: int, file: str) -> Tensor:
    if up.shape[0] % (2 * heads):
        raise ModelFileError(file, up.name, f"has {up.shape[0]} rows, which are not those of {heads} heads")
    return interleaved_rows(up.shape[0], heads)
