"""Penstock: an LLM inference engine and server. Importing it loads no tensor library; the names below are found on first use."""

from __future__ import annotations

from typing import Any

from penstock.version import __version__

__all__ = ["AsyncLLM", "CompletionOutput", "LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first asked for, so that `penstock.core` runs where torch is absent."""
    if name == "SamplingParams":
        from penstock.sampling import SamplingParams

        return SamplingParams
    if name in __all__:
        from penstock import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
