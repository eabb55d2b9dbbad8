"""The contract of a loaded model's answers: what their bits depend on besides the request, as named values.

Names concrete classes of several rooms, as `loading` and `building` do.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from penstock.contract.answer_contract import AnswerContract
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.loading import LoadedModel, resolve_choices
from penstock.version import __version__
from penstock.weights.packing import WeightFormat

__all__ = ["KV_CONTRACT", "answer_contract", "compiled_code", "config_for", "torch_arithmetic", "why_not_certified"]

KV_CONTRACT = 1
"""Increment this if the code computes other bits than before although neither the version nor the compiled code has
changed."""

_QUANTIZATIONS = {
    WeightFormat.F32.value: "none",
    WeightFormat.BF16.value: "none",
    WeightFormat.INT8.value: "int8",
    WeightFormat.INT4.value: "int4",
    WeightFormat.STORED.value: "file",
}
"""The form in a contract -> the value of the option `quantization` that gives it."""


def why_not_certified(loaded: LoadedModel) -> str:
    """Why answers of this model cannot be certified; "" if they can."""
    if not loaded.backend.exact:
        return "it needs the compiled CPU kernels, whose bits do not depend on what else is computed"
    if loaded.ranks is not None:
        return "several ranks divide the model, and the last bits depend on how many"
    if loaded.program.looks_ahead:
        return "the model only embeds"
    return ""


def answer_contract(config: EngineConfig, loaded: LoadedModel) -> AnswerContract:
    """The contract of a model's answers, except for its tokenizer."""
    return AnswerContract(
        model=loaded.files.digest.hex(),
        form=resolve_choices(config, loaded.files, loaded.backend).weight_format.value,
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_cache_dtype=str(loaded.kv_dtype).removeprefix("torch."),
        max_model_len=config.max_model_len,
        tokenizer="",
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        instruction_set=loaded.isa,
        kernels=compiled_code(),
        penstock=f"{__version__}, {KV_CONTRACT}",
        torch=torch_arithmetic(),
    )


def config_for(contract: AnswerContract, config: EngineConfig) -> EngineConfig:
    """The options with which a model is computed as a contract says; the other options are as in `config`.

    Raises:
        ConfigError: no options give the contract's form: it is not of this release, or was never valid.
    """
    quantization = _QUANTIZATIONS.get(contract.form)
    if quantization is None:
        raise ConfigError("certificate", f"its form is {contract.form!r}, which no options of this release give")
    return replace(
        config,
        dtype=contract.dtype,
        quantization=quantization,
        kv_cache_dtype="int8" if contract.kv_cache_dtype == "int8" else "auto",
        max_model_len=contract.max_model_len,
        tool_call_parser=contract.tool_call_parser,
        reasoning_parser=contract.reasoning_parser,
    )


def torch_arithmetic() -> str:
    """The version of torch, and the instruction set that it uses on this machine."""
    return f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def compiled_code() -> str:
    """A digest of the compiled kernels, which changes with their source code and with the compiler."""
    found = importlib.util.find_spec("penstock._native")
    if found is None or not found.origin:
        return "none"
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:32]
