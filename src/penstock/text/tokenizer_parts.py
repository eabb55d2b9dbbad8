"""What every reader of tokenizer files returns: a `tokenizers` backend and the facts around it.

Knows neither format.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

__all__ = ["TemplateSource", "TokenizerParts"]


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Jinja source, and the file and key that errors about it name."""

    source: str
    file: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Everything read from one model's tokenizer files.

    Attributes:
        file: the file that holds the vocabulary, for errors.
        special_tokens: spelling by role (`bos_token`, `eos_token`, ...), as chat templates see them.
        bos: -1 when the model has none.
        template: None when the model has no chat template.
        tool_template: the template for conversations with tools; None if `template` serves those too.
    """

    file: str
    backend: Backend
    special_tokens: dict[str, str]
    bos: int
    eos: frozenset[int]
    template: TemplateSource | None
    tool_template: TemplateSource | None = None
