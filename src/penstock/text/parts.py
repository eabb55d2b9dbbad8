"""What a reader of tokenizer files hands over: a `tokenizers` backend and the facts around it.

Knows neither format.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from tokenizers import processors

__all__ = ["TemplateSource", "TextParts", "surround"]


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Jinja source, and the file and key that errors about it name."""

    source: str
    file: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class TextParts:
    """Everything read from one model's tokenizer files.

    Attributes:
        file: the file that holds the vocabulary, for errors.
        special_tokens: spelling by role (`bos_token`, `eos_token`, ...), as chat templates see them.
        bos: -1 when the model has none.
        template: None when the model has no chat template.
    """

    file: str
    backend: Backend
    special_tokens: dict[str, str]
    bos: int
    eos: frozenset[int]
    template: TemplateSource | None


def surround(backend: Backend, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> None:
    """Make the backend put a token (spelling, id) in front of every text it encodes, and one behind; None puts none."""
    # Named by place: a spelling may hold a colon, which the template's notation would read as its own.
    special = [
        {"id": name, "ids": [token[1]], "tokens": [token[0]]}
        for name, token in (("begin", begin), ("end", end))
        if token
    ]
    template = [name for name, wanted in (("begin", begin), ("$A", True), ("end", end)) if wanted]
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B"], special_tokens=special
    )
