"""LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.

Decides what each setting means (https://huggingface.co/docs/peft, `LoraConfig`), and which settings are refused:
those that do more than add low-rank updates to the weights of linear modules. A setting that is not known here is
refused too, unless it is off. The tensors say which modules are updated; the settings must agree with them.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.contract.errors import ModelFileError
from penstock.weights.adapter_files import AdapterFiles, Factors, check_shapes, digest_of
from penstock.weights.safetensors_files import SafetensorsSource, load_json_object, read_header

__all__ = ["open_peft"]

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_MOST_RANK = 1 << 16

_TRAINING = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "task_type"),
    }
)
"""Settings that say where the modules are, how they were trained or initialised, or nothing that is needed here."""

_READ = frozenset({"alpha_pattern", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora"})

_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they are."""

_WHY = {
    "bias": "updates of biases are not implemented; only none is",
    "use_dora": "DoRA, which changes the lengths of weights too, is not implemented",
    "modules_to_save": "modules with whole weights of their own are not implemented",
    "lora_bias": "biases of the low-rank factors are not implemented",
    "trainable_token_indices": "embeddings of their own for some tokens are not implemented",
    "layer_replication": "layers that stand several times in the model are not implemented",
    "target_parameters": "updates of parameters that are no linear modules are not implemented",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt are not implemented",
    "init_lora_weights": "such a start changes the model's own weights; have PEFT convert the adapter to plain LoRA",
}

_MAX_PATTERN = 256
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def open_peft(directory: Path) -> AdapterFiles:
    """Open an adapter without reading its tensors, beyond hashing them.

    Raises:
        ModelFileError: a file is missing or malformed, or the adapter needs something that is not implemented; the
            error names the file and the setting or tensor.
    """
    config_file, tensors_file = directory / CONFIG_FILE, directory / TENSORS_FILE
    config = load_json_object(config_file)
    settings = _Settings(config, str(config_file))
    if not tensors_file.is_file():
        pickle = directory / "adapter_model.bin"
        if pickle.is_file():
            raise ModelFileError(
                str(pickle), "", "is a Python pickle, which can run any code; convert it to safetensors"
            )
        raise ModelFileError(str(tensors_file), "", "is missing")
    source = SafetensorsSource(read_header(tensors_file), str(tensors_file))
    factors = _factors(source, settings, str(tensors_file))
    settings.check_targets(factors)
    digest = digest_of((config_file, tensors_file))
    return AdapterFiles(directory, str(tensors_file), factors, digest, source.read_into)


class _Settings:
    """The settings of an adapter, checked."""

    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        self._config = config
        self._file = file
        if config.get("peft_type") != "LORA":
            raise self._error("peft_type", f"{reprlib.repr(config.get('peft_type'))} is not implemented; LORA is")
        for key, value in config.items():
            self._check(key, value)
        self._rank = self._count(config.get("r"), "r")
        self._alpha = self._number(config.get("lora_alpha"), "lora_alpha")
        self._by_root = self._flag("use_rslora")
        self._ranks = self._pattern("rank_pattern", self._count)
        self._alphas = self._pattern("alpha_pattern", self._number)

    def rank(self, module: str) -> int:
        """The rank of a module's update."""
        return int(_found(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """The factor on a module's update."""
        rank, alpha = self.rank(module), float(_found(self._alphas, module, self._alpha))
        return alpha / math.sqrt(rank) if self._by_root else alpha / rank

    def check_targets(self, modules: Iterable[str]) -> None:
        """Check that the file has exactly the modules that `target_modules` lists; if it is a pattern, check nothing.

        Raises:
            ModelFileError: a module in the file is not listed, or a listed name fits no module in the file.
        """
        targets = self._config.get("target_modules")
        if targets is None or isinstance(targets, str):
            return
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            raise self._error("target_modules", "must be a list of names, or one pattern")
        unmet = set(targets)
        for module in modules:
            found = {each for each in targets if module == each or module.endswith(f".{each}")}
            if not found:
                raise self._error("target_modules", f"does not name {module}, of which the file has tensors")
            unmet -= found
        if unmet:
            raise self._error("target_modules", f"names {', '.join(sorted(unmet))}, of which the file has no tensors")

    def _check(self, key: str, value: Any) -> None:
        """Refuse a setting that asks for something that is not implemented."""
        if key in _READ or key in _TRAINING:
            return
        neutral = value is None or value is False or value in ("", [], {})
        if key == "bias":
            neutral = value == "none"
        elif key == "init_lora_weights":
            neutral = isinstance(value, str | bool | None) and value in _PLAIN_STARTS
        if not neutral:
            reason = _WHY.get(key, "this setting is not known here")
            raise self._error(key, f"{reprlib.repr(value)}: {reason}")

    def _flag(self, key: str) -> bool:
        value = self._config.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, f"must be true or false, got {reprlib.repr(value)}")
        return value

    def _count(self, value: Any, key: str) -> int:
        if type(value) is not int or not 1 <= value <= _MOST_RANK:
            raise self._error(key, f"must be an integer from 1 to {_MOST_RANK}, got {reprlib.repr(value)}")
        return value

    def _number(self, value: Any, key: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._error(key, f"must be a number, got {reprlib.repr(value)}")
        return float(value)

    def _pattern(self, key: str, read: Any) -> list[tuple[re.Pattern[str], float]]:
        """Values by patterns of module names; a pattern matches the end of a name."""
        value = self._config.get(key) or {}
        if not isinstance(value, dict):
            raise self._error(key, "must map names of modules to numbers")
        return [(self._compiled(key, each), read(number, f"{key}.{each}")) for each, number in value.items()]

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str]:
        if len(pattern) > _MAX_PATTERN or _REPEATED_GROUP.search(pattern):
            raise self._error(f"{key}.{pattern[:_MAX_PATTERN]}", "is too long a pattern, or one with a repeated group")
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise self._error(f"{key}.{pattern}", f"is no pattern: {error}") from error

    def _error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self._file, key, message)


def _found(patterns: list[tuple[re.Pattern[str], float]], module: str, otherwise: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)


def _factors(source: SafetensorsSource, settings: _Settings, file: str) -> dict[str, Factors]:
    names = source.names()
    factors = {}
    for name in sorted(names):
        module = _module(name, file)
        other = f"{_PREFIX}{module}{_UP if name.endswith(_DOWN) else _DOWN}"
        if other not in names:
            raise ModelFileError(file, name, f"has no {other} beside it")
        if not name.endswith(_DOWN):
            continue
        shapes = source.shape(name), source.shape(other)
        check_shapes(file, module, *shapes)
        if shapes[0][0] != settings.rank(module):
            raise ModelFileError(file, name, f"has rank {shapes[0][0]}, but the settings say {settings.rank(module)}")
        factors[module] = Factors(module, name, other, shapes, settings.scale(module))
    if not factors:
        raise ModelFileError(file, "", "holds no low-rank factors")
    return factors


def _module(name: str, file: str) -> str:
    """The module that a tensor belongs to."""
    for ending in (_DOWN, _UP):
        if name.startswith(_PREFIX) and name.endswith(ending):
            return name[len(_PREFIX) : -len(ending)]
    if "lora_embedding" in name:
        raise ModelFileError(file, name, "updates an embedding, which is not implemented")
    if "lora_magnitude" in name:
        raise ModelFileError(file, name, "belongs to DoRA, which is not implemented")
    raise ModelFileError(file, name, "is no factor of a linear module (…lora_A.weight, …lora_B.weight)")
