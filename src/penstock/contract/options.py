"""What the fields of configurations share: help, choices, the front that reads them, and checks of their types.

Each field's help text lives beside it; the command line is derived from it.
"""

from __future__ import annotations

import re
from dataclasses import field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from penstock.contract.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "BYTE_FIELDS",
    "Front",
    "check_numbers",
    "check_socket_address",
    "option",
    "option_help",
    "read_bytes",
]

BYTE_FIELDS = frozenset({"answer_cache", "kv_cache_memory", "kv_store_bytes", "memory_limit", "models_memory"})
"""Fields that operators may give as text, for `read_bytes`."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBERS = {bool: "true or false", int: "an integer", float: "a number"}
_SOCKET_ADDRESS = re.compile(r"tcp://(?:\*|[\w.-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})|ipc://\S+", re.ASCII)


class Front(IntEnum):
    """What stands between callers and the engine; each front also has what the ones before it have.

    An option that is read only from some front on is not offered before it, where it would do nothing.
    """

    NONE = 0
    """Callers step the engine themselves: `LLM`, `penstock generate`, `penstock chat`."""
    QUEUE = 1
    """Callers wait for an engine in a thread of its own: `AsyncLLM`."""
    HTTP = 2
    """Callers ask for a model by its name, and may give a priority: `penstock serve`, `penstock run-batch`."""


def option(default: Any, help_text: str, choices: tuple[str, ...] = (), front: Front = Front.NONE) -> Any:
    """A field of a configuration class; `choices` are the values that it may have, () for any."""
    return field(default=default, metadata={"help": help_text, "choices": choices, "front": front})


def option_help(config: type, name: str) -> str:
    """The help text of one field of a configuration class."""
    text: str = config.__dataclass_fields__[name].metadata["help"]  # type: ignore[attr-defined]
    return text


def read_bytes(text: str) -> int:
    """A number of bytes, plain or with a unit: 500MB, 8GiB.

    Raises:
        ValueError: the text is not a number of bytes; the message says so.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes such as 500MB, 8GiB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def check_numbers(config: DataclassInstance) -> None:
    """Make sure that every flag and number of a configuration is of its field's type; an integer may stand for a float.

    Raises:
        ConfigError: one is not; names the first.
    """
    for each in fields(config):
        value, wanted = getattr(config, each.name), type(each.default)
        if wanted not in _NUMBERS:
            continue
        kinds = (int, float) if wanted is float else (wanted,)
        if not isinstance(value, kinds) or isinstance(value, bool) != (wanted is bool):
            raise ConfigError(each.name, f"must be {_NUMBERS[wanted]}, got {value!r}")


def check_socket_address(name: str, address: str) -> None:
    """Make sure that an option is an address to listen on.

    Raises:
        ConfigError: it is not; names the option.
    """
    match = _SOCKET_ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > 65535:
        forms = "tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///path/of/a/socket"
        raise ConfigError(name, f"must be an address such as {forms}, got {address!r}")
