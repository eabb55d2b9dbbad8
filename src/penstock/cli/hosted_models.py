"""The models that one server offers: from its arguments, and from the file of `--models-file`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from penstock.cli.options import read_options, read_yaml
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.hosting import ModelChoice
from penstock.contract.server_config import HostingConfig

__all__ = ["choose_models"]

_FILE_OPTION = "--models-file"
_OF_ONE = (
    *("served_model_name", "tokenizer", "chat_template", "draft_model", "lora", "lora_dir", "record"),
    *("kv_events", "kv_events_replay", "kv_events_topic"),
)
"""Options that apply to one model only: with several models, each may have its own in the file."""
_OF_ALL = {"memory_limit"}
"""Engine options that hold for the whole server, not for one model."""


def choose_models(
    context: click.Context, config: EngineConfig, hosting: HostingConfig, models: Sequence[str]
) -> list[ModelChoice]:
    """The models of a server that hosts several; [] for a server of one model, which is loaded at once.

    A single model is hosted too if an option of `hosting` is set, for example when to unload it.

    Args:
        context: the command.
        config: the options of every model, unless its entry in the file sets others.
        hosting: the options of a server that hosts several models.
        models: the models named as arguments; without the default model.

    Raises:
        ConfigError: an option is given that only one model can have, or the file cannot be used.
    """
    chosen = [ModelChoice(replace(config, model=name), idle_seconds=hosting.unload_after) for name in models]
    chosen += _from_file(context, config, hosting)
    if not chosen and hosting != HostingConfig():
        chosen = [ModelChoice(config, idle_seconds=hosting.unload_after)]
    if len(chosen) == 1 and hosting == HostingConfig():
        return []
    if len(chosen) > 1:
        for name in _OF_ONE:
            if getattr(config, name) != getattr(EngineConfig(), name):
                raise ConfigError(name, f"is for one model; give each its own in a file ({_FILE_OPTION})")
    return chosen


def _from_file(context: click.Context, config: EngineConfig, hosting: HostingConfig) -> list[ModelChoice]:
    if not hosting.models_file:
        return []
    path = Path(hosting.models_file)
    content = read_yaml(path, _FILE_OPTION)
    entries = content.get("models") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(_FILE_OPTION, f"{path} must hold a list `models` and nothing else")
    return [_from_entry(context, config, hosting, entry, path) for entry in entries]


def _from_entry(
    context: click.Context, config: EngineConfig, hosting: HostingConfig, entry: object, path: Path
) -> ModelChoice:
    if isinstance(entry, str):
        entry = {"model": entry}
    given: dict[str, Any] = dict(entry) if isinstance(entry, dict) else {}
    if not isinstance(given.get("model"), str):
        raise ConfigError(_FILE_OPTION, f"{path}: an entry of `models` must have a `model`, got {entry!r}")
    pinned = given.pop("pin", False)
    if not isinstance(pinned, bool):
        raise ConfigError("pin", f"must be true or false, got {pinned!r} (in {path})")
    known = {each.name for each in fields(EngineConfig)} - _OF_ALL | {"unload_after"}
    options = read_options(context, given, known, path, _FILE_OPTION)
    idle = options.pop("unload_after", hosting.unload_after)
    if idle < 0:
        raise ConfigError("unload_after", f"must be a number from 0 up, got {idle} (in {path})")
    for name in ("served_model_name", "lora"):
        if name in options:
            options[name] = tuple(options[name])
    return ModelChoice(replace(config, **options), pinned, idle)
