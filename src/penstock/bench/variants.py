"""Variants of Penstock in a measurement, by name: a weight format, and a dtype of the KV cache.

A name is a value of `quantization`, alone or with `:int8-kv` for keys and values in int8: `file`, `none:int8-kv`. All
other options stay as the operator chose them. Does not know whether a model and a machine allow a variant.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.config import QUANTIZATIONS, EngineConfig

__all__ = ["VARIANTS", "variant_name", "with_variant"]

_INT8_KV = ":int8-kv"

VARIANTS = (*QUANTIZATIONS, *(f"{each}{_INT8_KV}" for each in QUANTIZATIONS))
"""Every name."""


def with_variant(config: EngineConfig, name: str) -> EngineConfig:
    """`config` with the options that a variant's name stands for.

    Raises:
        ConfigError: there is no such quantization.
    """
    kept_in = "int8" if name.endswith(_INT8_KV) else config.kv_cache_dtype
    return replace(config, quantization=name.removesuffix(_INT8_KV), kv_cache_dtype=kept_in)


def variant_name(config: EngineConfig, plain: str = "none") -> str:
    """The name of a configuration's variant; `plain` names weights that are not quantised."""
    weights = plain if config.quantization == "none" else config.quantization
    return weights + (_INT8_KV if config.kv_cache_dtype == "int8" else "")
