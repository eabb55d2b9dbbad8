"""The start report: which kernels compute, in which dtype, how exact that is, and how weights are stored.

Decides only the wording: `device` and `weights` make the choices, and `MemoryReport` says where memory goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from penstock.kernels.backend import Backend
from penstock.kernels.native import MAX_HEAD_DIM

__all__ = [
    "computing_line",
    "embeds_only_line",
    "left_out_line",
    "mixed_line",
    "rounded_line",
    "unheeded_line",
    "weight_formats",
    "wide_heads_line",
]

_NUMBERS = ("float32", "bfloat16", "float16", "int8", "int4")
"""Names of the weight formats that are not block formats from a file."""
_NAMED = 3
_HOST = torch.device("cpu")


def computing_line(backend: Backend, dtype: torch.dtype, threads: int) -> str:
    """Where the model runs, with which kernels, and how exact that is; if the kernels are torch's, why.

    Torch's matrix products choose their order of summation by shape, so batch and chunks may change the last bits.
    """
    said = f"compiled {backend.isa} kernels, exact bit for bit" if backend.exact else _uncompiled_kernels(backend)
    return f"runs on          {backend.device}, {_name(dtype)}, {threads} threads, {said}"


def _uncompiled_kernels(backend: Backend) -> str:
    if backend.name == "cuda":
        return "Triton kernels between torch's products"
    if backend.device != _HOST:
        return f"{backend.why_torch()}: torch kernels, slower"
    return f"{backend.why_torch()}: torch kernels, slower, exact up to rounding"


def wide_heads_line(head_dim: int) -> str:
    """Says that torch computes attention because the heads are too wide for the compiled kernel."""
    widest = MAX_HEAD_DIM
    return (
        f"attention        torch: heads of {head_dim} are wider than {widest}, so answers are exact up to rounding only"
    )


def embeds_only_line(longest: int) -> str:
    """Says that a model looks ahead, and what follows; `longest` is the longest prompt in tokens."""
    return (
        f"embeds only      tokens see later ones: a prompt is computed whole, up to {longest} tokens, and not cached,"
        " and nothing is generated"
    )


def weight_formats(formats: Collection[str], stored: str, dtype: torch.dtype) -> str:
    """How weights are stored, in words.

    Args:
        formats: as `weights.bind.Binder` lists them.
        stored: the checkpoint's format, as in `ModelFiles.stored_dtype`.
        dtype: of the activations.
    """
    blocks = sorted(name for name in formats if name not in _NUMBERS)
    said = [f"{', '.join(blocks)} as in the file"] if blocks else []
    said += [name for name in formats if name in _NUMBERS]
    if dtype == torch.bfloat16 and "bfloat16" in formats and stored in ("float16", "float32"):
        said[-1] += f", rounded from the file's {stored} (--dtype float32 keeps its numbers)"
    return "; ".join(said)


def mixed_line(mixed: Collection[str]) -> str:
    """Says that experts' weights were rounded to bfloat16, because the file mixes kinds of blocks within a layer."""
    names = ", ".join(list(mixed)[:_NAMED])
    more = f" and {len(mixed) - _NAMED} more" if len(mixed) > _NAMED else ""
    return (
        f"rounded          experts of {len(mixed)} layers to bfloat16, being of different kinds from one to the next:"
        f" {names}{more}"
    )


def rounded_line(rounded: Mapping[str, int]) -> str:
    """Which parts of a quantised file no weight format can hold: in words, and how many tensors."""
    named = ", ".join(f"{what} ({count} tensors)" for what, count in rounded.items())
    return f"rounded          {named}: as near as this form comes (--dtype float32 keeps all numbers)"


def unheeded_line(settings: Sequence[str]) -> str:
    """Which settings of a quantised file are ignored because they concern activations, keys or values."""
    return f"not rounded      as the file would round activations, keys or values: {', '.join(settings)}"


def left_out_line(parts: Mapping[str, int]) -> str:
    """Which parts of the checkpoint are not computed: the prefix of their names, and their number of tensors."""
    named = ", ".join(f"{part}* ({count} tensors)" for part, count in parts.items())
    return f"not computed     {named}: text alone is read and written"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
