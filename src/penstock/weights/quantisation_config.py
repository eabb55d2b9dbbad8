"""Reads `quantization_config` in `config.json`: how weights are stored, and whether they can be read.

Decides which schemes are supported, and refuses the others by naming the key at fault. Does not decide which modules
are quantised: their tensors show it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import ModelFileError

__all__ = ["Quantisation", "read_quantisation"]

_KEY = "quantization_config"
_INSTEAD = "use the model's original weights, or a GGUF file"
_MAX_GROUP = 1 << 16


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a checkpoint's matrices are stored.

    Attributes:
        method: the file's `quant_method`.
        bits: bits per code; 0 where tensors determine it.
        group: inputs that share a scale; 0 for a whole row, or where tensors determine it.
        centred: whether every zero point is half the code range.
        ordered: whether the inputs of a group need not be neighbours (act-order).
        zeros_less_one: whether zero points are stored minus one (GPTQ's first format).
        block: rows and inputs that share an FP8 scale; None for whole rows or the whole matrix.
        unheeded: keys that ask for rounding activations, keys or values, which is not implemented.
    """

    method: str
    bits: int = 0
    group: int = 0
    centred: bool = False
    ordered: bool = False
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    unheeded: tuple[str, ...] = ()


class _Section:
    """A JSON object of the config with checked look-ups; treats null like a missing key."""

    def __init__(self, values: Any, file: str, path: str) -> None:
        self._file, self._path = file, path
        if not isinstance(values, Mapping):
            raise ModelFileError(file, path, f"must be an object, got {reprlib.repr(values)}")
        self.values = values

    def refuse(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(self._file, f"{self._path}.{key}", why)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(key, default)
        found = value.lower() if isinstance(value, str) else value
        if not any(type(found) is type(each) and found == each for each in allowed):
            readable = ", ".join(str(each).lower() for each in allowed)
            raise self.refuse(key, f"{reprlib.repr(value)} cannot be read, only {readable}; {_INSTEAD}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, got {reprlib.repr(value)}")
        return value

    def group(self, key: str) -> int:
        value = self.get(key, 128)
        if type(value) is not int or (value != -1 and not 1 <= value <= _MAX_GROUP):
            raise self.refuse(key, f"must be -1, or 1 to {_MAX_GROUP}, got {reprlib.repr(value)}")
        return max(value, 0)

    def block(self, key: str) -> tuple[int, int]:
        """The rows and inputs that share a scale.

        Every tool writes powers of two. Any other number means a damaged file: because blocks at the edges may be
        partial, the shape of the scales may fit that number too, and nothing else would reveal the error.
        """
        value = self.get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(_is_power_of_two(size) for size in value):
            raise self.refuse(key, f"must be two powers of two, got {reprlib.repr(value)}")
        return value[0], value[1]

    def unset(self, *keys: str) -> None:
        """Refuse keys that would change the computation, if they are set."""
        for key in keys:
            if self.get(key):
                raise self.refuse(key, f"is not implemented; {_INSTEAD}")

    def section(self, key: str) -> _Section:
        return _Section(self.get(key, {}), self._file, f"{self._path}.{key}")


def _is_power_of_two(value: Any) -> bool:
    return type(value) is int and value > 0 and value & (value - 1) == 0


def read_quantisation(config: Mapping[str, Any], file: str) -> Quantisation | None:
    """How a checkpoint is quantised; None if it is not.

    Args:
        config: the whole `config.json`.
        file: its path, for errors.

    Raises:
        ModelFileError: the scheme is not implemented.
    """
    if config.get("compression_config") is not None:
        raise ModelFileError(file, "compression_config", f"is not read, only {_KEY}; {_INSTEAD}")
    if config.get(_KEY) is None:
        return None
    section = _Section(config[_KEY], file, _KEY)
    method = section.get("quant_method", "")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise section.refuse("quant_method", f"{reprlib.repr(method)}: {', '.join(_METHODS)} can be read; {_INSTEAD}")
    return reader(section)


def _gptq(section: _Section) -> Quantisation:
    section.unset("is_marlin_format", "adapter", "rotation")
    for pattern, changes in section.section("dynamic").values.items():
        if changes and not pattern.startswith("-"):
            raise section.refuse(
                "dynamic", f"modules with settings of their own ({pattern}) cannot be read; {_INSTEAD}"
            )
    layout = _gptq_layout(section)
    section.one_of("pack_dtype", ("int32",), "int32")
    return Quantisation(
        "gptq",
        bits=section.one_of("bits", (4, 8)),
        group=section.group("group_size"),
        centred=section.flag("sym", True),
        ordered=section.flag("desc_act", False),
        zeros_less_one=layout == "gptq",
    )


def _gptq_layout(section: _Section) -> str:
    """Which of GPTQ's two formats the tensors are in.

    AutoGPTQ and transformers store it as `checkpoint_format`, gptqmodel as `format`, and tools from before the second
    format not at all. The tensors do not show the difference, so a damaged key must not be treated as missing.
    """
    found = {}
    for key in ("checkpoint_format", "format"):
        if section.values.get(key) is not None:
            found[key] = section.one_of(key, ("gptq", "gptq_v2"))
    layouts = set(found.values()) or {"gptq"}
    if len(layouts) > 1:
        said = " and ".join(f"{key} is {value}" for key, value in found.items())
        raise section.refuse("checkpoint_format", f"cannot be told: {said}; {_INSTEAD}")
    (layout,) = layouts
    for key, value in section.values.items():
        if value == "gptq_v2" != layout:
            raise section.refuse(
                reprlib.repr(key), f"is {value}, but the format is named checkpoint_format; {_INSTEAD}"
            )
    return str(layout)


def _awq(section: _Section) -> Quantisation:
    if section.get("backend") == "llm-awq":
        raise section.refuse(
            "backend", f"the layout of llm-awq cannot be read, only that of AutoAWQ's gemm; {_INSTEAD}"
        )
    section.one_of("version" if section.get("version") else "format", ("gemm",), "gemm")
    section.one_of("zero_point", (True,), True)
    return Quantisation("awq", bits=section.one_of("bits", (4, 8), 4), group=section.group("group_size"))


def _fp8(section: _Section) -> Quantisation:
    section.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    section.one_of("expert_dtype", ("fp8",), "fp8")
    block = section.block("weight_block_size") if section.get("weight_block_size") is not None else None
    unheeded = [f"{_KEY}.{key}" for key in ("activation_scheme", "kv_cache_scheme") if section.get(key)]
    return Quantisation("fp8", block=block, unheeded=tuple(unheeded))


def _bitsandbytes(section: _Section) -> Quantisation:
    if section.flag("load_in_8bit", False) or section.flag("_load_in_8bit", False):
        raise section.refuse("load_in_8bit", f"cannot be read, only 4 bits; {_INSTEAD}")
    section.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return Quantisation("bitsandbytes")


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")


def _compressed(section: _Section) -> Quantisation:
    section.one_of("format", _FORMATS, "dense")
    section.section("sparsity_config").one_of("format", ("dense",), "dense")
    section.unset("transform_config")
    unheeded = [f"{_KEY}.kv_cache_scheme"] if section.get("kv_cache_scheme") else []
    groups = section.section("config_groups")
    block = None
    for name in groups.values:
        group = groups.section(name)
        block = _scheme(group) or block
        if group.get("input_activations"):
            unheeded.append(f"{_KEY}.config_groups.{name}.input_activations")
    return Quantisation("compressed-tensors", block=block, unheeded=tuple(unheeded))


def _scheme(group: _Section) -> tuple[int, int] | None:
    """Check one group of a compressed-tensors config; return its FP8 block size, if any."""
    group.one_of("format", _FORMATS, "dense")
    group.unset("output_activations")
    if group.get("input_activations"):
        group.section("input_activations").one_of("num_bits", (8,), 8)
    weights = group.section("weights")
    if not weights.values:
        return None
    number = weights.one_of("type", ("int", "float"), "int")
    weights.one_of("num_bits", (4, 8) if number == "int" else (8,), 8)
    allowed = ("group", "channel", "tensor") if number == "int" else ("block", "channel", "tensor")
    default = "group" if weights.get("group_size") else "tensor"
    if weights.one_of("strategy", allowed, default) != "block":
        return None
    return weights.block("block_structure")


_METHODS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda _: Quantisation("mxfp4"),
}
