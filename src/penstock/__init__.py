"""Penstock: an LLM inference engine and server.

Importing it loads no tensor library: public names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from penstock.llm.embeddings import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
    from penstock.llm.offline import LLM
    from penstock.llm.online import AsyncLLM
    from penstock.llm.outputs import CompletionOutput, Logprob, RequestOutput
    from penstock.sampling.params import SamplingParams

__all__ = [
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LLM",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "__version__",
]

_PUBLIC = {
    "AsyncLLM": "penstock.llm.online",
    "BeamSearchOutput": "penstock.llm.beam_search",
    "BeamSearchParams": "penstock.llm.beam_search",
    "BeamSearchSequence": "penstock.llm.beam_search",
    "CompletionOutput": "penstock.llm.outputs",
    "EmbeddingOutput": "penstock.llm.embeddings",
    "EmbeddingRequestOutput": "penstock.llm.embeddings",
    "LLM": "penstock.llm.offline",
    "Logprob": "penstock.llm.outputs",
    "RequestOutput": "penstock.llm.outputs",
    "SamplingParams": "penstock.sampling.params",
    "ScoringOutput": "penstock.llm.embeddings",
    "ScoringRequestOutput": "penstock.llm.embeddings",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `penstock.core` runs without torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
