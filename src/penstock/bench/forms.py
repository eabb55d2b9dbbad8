"""The forms in which Penstock takes part in a measurement, by name: how weights are kept, and keys and values.

A name is a value of `quantization`, alone or with `:int8-kv` for keys and values in int8: `file`, `none:int8-kv`. What
it does not say stays as the operator chose it.

Decides names only. Whether a form can be had is not known here.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.config import QUANTIZATIONS, EngineConfig

__all__ = ["FORMS", "form_name", "in_form"]

_INT8_KV = ":int8-kv"

FORMS = (*QUANTIZATIONS, *(f"{each}{_INT8_KV}" for each in QUANTIZATIONS))
"""Every name."""


def in_form(config: EngineConfig, name: str) -> EngineConfig:
    """`config` with what the name of a form says.

    Raises:
        ConfigError: there is no such quantization.
    """
    kept_in = "int8" if name.endswith(_INT8_KV) else config.kv_cache_dtype
    return replace(config, quantization=name.removesuffix(_INT8_KV), kv_cache_dtype=kept_in)


def form_name(config: EngineConfig, plain: str = "none") -> str:
    """The name of a configuration's form; `plain` is what weights are called that are not quantised."""
    weights = plain if config.quantization == "none" else config.quantization
    return weights + (_INT8_KV if config.kv_cache_dtype == "int8" else "")
