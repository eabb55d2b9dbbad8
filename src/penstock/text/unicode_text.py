"""What counts as text: any sequence of Unicode scalar values. JSON and Python can also carry lone surrogates."""

from __future__ import annotations

import re

from penstock.contract.errors import InvalidParameter

__all__ = ["require_unicode"]

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def require_unicode(text: str, param: str) -> str:
    """Check `text` and return it.

    Raises:
        InvalidParameter: it has a lone surrogate (Unicode 3.9, D76), which no tokenizer can encode; names `param`.
    """
    if _SURROGATE.search(text):
        raise InvalidParameter(param, "contains a lone surrogate, which is not Unicode text")
    return text
