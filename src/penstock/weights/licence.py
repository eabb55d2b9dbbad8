"""Finds the licence under which a model is published, as far as its files state it.

Decides where to look: in a GGUF file's `general.license...` keys, or in the front matter of a directory's model card
(`README.md`), under the Hugging Face hub's key names; otherwise in the catalogue. Does not know what a licence allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from penstock.weights.catalogue import CATALOGUE
from penstock.weights.files import ModelFiles
from penstock.weights.gguf_file import GgufSource

__all__ = ["licence_of"]

_MAX_CARD = 1 << 16
_MAX_WORDS = 200
_FENCE = "---"


def licence_of(files: ModelFiles) -> str:
    """The licence as the files name it, followed by its custom name and link if they are given; "" for none."""
    facts = _of_gguf(files.source) if isinstance(files.source, GgufSource) else _of_card(files.path)
    known = [entry.licence for entry in CATALOGUE.values() if entry.file_name == files.path.name]
    words = [str(facts[key]) for key in ("license", "license_name", "license_link") if facts.get(key)] or known
    text = " ".join(dict.fromkeys(words))
    return text[:_MAX_WORDS] if text.isprintable() else ""


def _of_gguf(source: GgufSource) -> dict[str, Any]:
    found = source.header.metadata.get
    return {
        "license": found("general.license"),
        "license_name": found("general.license.name"),
        "license_link": found("general.license.link"),
    }


def _of_card(model: Path) -> dict[str, Any]:
    card = (model if model.is_dir() else model.parent) / "README.md"
    if not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(_MAX_CARD)
    opening, _, rest = text.partition("\n")
    front, fence, _ = rest.partition(f"\n{_FENCE}")
    if opening.strip() != _FENCE or not fence:
        return {}
    try:
        facts = yaml.safe_load(front)
    except yaml.YAMLError:
        return {}  # treat a malformed card as one that states no licence
    return facts if isinstance(facts, dict) else {}
