"""Facts about a LoRA adapter that is loaded beside a model, for rooms that do not use tensors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AdapterFacts", "adapter_option", "is_adapter_name"]

MOST_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """A loaded adapter.

    Attributes:
        name: requests choose it by this name; a key, never a path.
        path: where its files are.
        digest: hex digits that identify its contents: a hash of all of its files' bytes. Part of the keys of KV blocks.
        rank: the largest rank of any module.
        modules: how many modules it updates.
        bytes: memory of its weights.
        created: Unix time at which it was loaded.
    """

    name: str
    path: str
    digest: str
    rank: int
    modules: int
    bytes: int
    created: int = 0


def adapter_option(text: str) -> tuple[str, str]:
    """Split the option `NAME=PATH` into the name and the path.

    Raises:
        ValueError: the text does not have this form.
    """
    name, _, path = text.partition("=")
    if not path or not is_adapter_name(name):
        raise ValueError(f"must be NAME=DIRECTORY, got {text!r}")
    return name, path


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name: it is printable, not too long, and without space at its ends."""
    return 0 < len(name) <= MOST_NAME_CHARS and name.isprintable() and name == name.strip()
