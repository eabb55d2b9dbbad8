"""Command-line options derived from the configuration classes, and the YAML file that may stand in for them.

Every option's name, default, choices and help come from `contract.config`; nothing is spelled twice. Precedence: flag,
then `--config` file, then default. No environment variable stands in for a flag, with one exception,
PENSTOCK_KV_STORE: whether prompts may be written to disk is decided for a machine, not for one command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click
import yaml

from penstock.cli.sections import SectionedOption, model_argument
from penstock.contract.adapter import adapter_option
from penstock.contract.config import EngineConfig, options_behind
from penstock.contract.errors import ConfigError
from penstock.contract.fleet_config import FleetConfig
from penstock.contract.options import BYTE_FIELDS, Front, read_bytes
from penstock.contract.server_config import HostingConfig

__all__ = [
    "ADAPTER_OPTIONS",
    "NOT_OFFLINE",
    "build_configs",
    "config_options",
    "library_options",
    "only_adapter",
    "read_options",
    "read_yaml",
]

NOT_OFFLINE = frozenset(EngineConfig.__dataclass_fields__) - options_behind(Front.NONE)
"""Engine options without effect in commands that step the engine themselves."""

ADAPTER_OPTIONS = frozenset({"lora", "max_loras", "max_lora_rank"})
"""Engine options of commands whose requests may have an adapter."""

ALIASES = {"tokenizer": ("--tokenizer-name",), "tensor_parallel": ("--tp", "--tensor-parallel-size")}
"""Alternative spellings of options: RoseInfer's, and vLLM's."""

_SECTIONS = {EngineConfig: "Engine", HostingConfig: "Several models", FleetConfig: "Replicas"}

METAVARS = {
    "models_file": "FILE",
    "kv_events": "ADDRESS",
    "kv_events_replay": "ADDRESS",
    "record": "FILE",
    "api_key_file": "FILE",
    "otlp_traces_endpoint": "URL",
    "profile_dir": "DIRECTORY",
    "lora": "NAME=DIRECTORY",
    "lora_dir": "DIRECTORY",
}


class ByteSize(click.ParamType[int]):
    """A number of bytes, plain or with a unit: 500MB, 8GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the value, or fail and name the option."""
        if isinstance(value, int):
            return value
        try:
            return read_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def config_options(
    *classes: type, leave_out: frozenset[str] = frozenset({"model"}), defaults: Mapping[str, Any] | None = None
) -> Callable[[Any], Any]:
    """A decorator that gives a command its MODEL, one option for each field of the classes, and `--config`.

    `defaults`: option name -> the command's own default, if it differs from the field's.
    """

    def decorate(command: Any) -> Any:
        for config in reversed(classes):
            for field in reversed(fields(config)):
                if field.name not in leave_out:
                    default = (defaults or {}).get(field.name, field.default)
                    command = _option(field, default, _SECTIONS.get(config, "Server"))(command)
        command = model_argument(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Read options from this YAML file, one per line, such as `max-num-seqs: 8`; flags override it.",
        )(command)

    return decorate


def _option(field: Field[Any], default: Any, section: str) -> Callable[[Any], Any]:
    flag = "--" + field.name.replace("_", "-")
    help_text = field.metadata["help"]
    if isinstance(default, bool):
        return click.option(
            f"{flag}/--no-{flag[2:]}",
            field.name,
            default=default,
            show_default=True,
            help=help_text,
            cls=SectionedOption,
            section=section,
        )
    choices = field.metadata["choices"]
    if isinstance(default, tuple):
        return click.option(
            flag,
            field.name,
            type=str,
            multiple=True,
            metavar=METAVARS.get(field.name, "NAME"),
            help=help_text,
            cls=SectionedOption,
            section=section,
        )
    kind: Any = click.Choice(choices) if choices else ByteSize() if field.name in BYTE_FIELDS else type(default)
    shown = default != ""
    return click.option(
        flag,
        *ALIASES.get(field.name, ()),
        field.name,
        type=kind,
        default=default,
        show_default=shown,
        metavar=METAVARS.get(field.name),
        help=help_text,
        cls=SectionedOption,
        section=section,
    )


def build_configs(context: click.Context, *classes: type) -> list[Any]:
    """The configuration values of a command: one for each class, from flags, file and defaults.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or a value that cannot be used.
    """
    given: dict[str, Any] = {name: value for name, value in context.params.items() if name != "config_file"}
    path = context.params.get("config_file")
    if path is not None:
        known = {field.name for config in classes for field in fields(config)} & context.params.keys()
        read = read_options(context, read_yaml(path, "--config"), known, path, "--config")
        default = click.core.ParameterSource.DEFAULT
        given |= {name: each for name, each in read.items() if context.get_parameter_source(name) is default}
    return [config(**{f.name: given[f.name] for f in fields(config) if f.name in given}) for config in classes]


def library_options(config: EngineConfig) -> dict[str, Any]:
    """The options of a configuration that `LLM` takes."""
    return {name: getattr(config, name) for name in options_behind(Front.NONE)}


def only_adapter(config: EngineConfig) -> str:
    """The name of the adapter that a command of one conversation or prompt uses; "" for none.

    Raises:
        ConfigError: there are several.
    """
    if len(config.lora) > 1:
        raise ConfigError("lora", "names several adapters; this command uses one")
    return adapter_option(config.lora[0])[0] if config.lora else ""


def read_options(context: click.Context, content: object, known: Set[str], path: Path, option: str) -> dict[str, Any]:
    """Options from a YAML file, spelled like flags and checked against the same types; None means no options.

    Args:
        context: the command that has the options.
        content: the decoded YAML that should hold the options.
        known: the options that it may hold.
        path: the file, for errors.
        option: the option that names the file.

    Raises:
        ConfigError: it is not a mapping, has an unknown option, or a value that an option does not accept.
    """
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(option, f"{path} must hold `option: value` lines")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = values.keys() - known
    if unknown:
        raise ConfigError(option, f"{path} has unknown keys: {_with_dashes(unknown)}; known are {_with_dashes(known)}")
    return {name: _convert(context, name, value, path) for name, value in values.items()}


def read_yaml(path: Path, option: str) -> object:
    """The content of a YAML file; `option` names the file in errors. Raises ConfigError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(option, f"{path} cannot be read: {reason}") from error


def _with_dashes(names: Iterable[str]) -> str:
    """Options as their flags spell them."""
    return ", ".join(sorted(name.replace("_", "-") for name in names))


def _convert(context: click.Context, name: str, value: Any, path: Path) -> Any:
    """A value from the file, converted to the type of its flag."""
    for parameter in context.command.params:
        if parameter.name == name:
            if parameter.multiple and not isinstance(value, list):
                value = [value]
            try:
                return parameter.type_cast_value(context, value)
            except click.BadParameter as error:
                raise ConfigError(name, f"{error.format_message()} (in {path})") from error
    raise AssertionError(f"the command has no option {name}")
