"""A digest of everything that answers depend on besides their requests: servers with the same digest answer alike."""

from __future__ import annotations

import hashlib

from penstock.contract.memory import RunnerFacts
from penstock.version import __version__

__all__ = ["ANSWERING", "model_digest"]

ANSWERING = (
    "dtype",
    "quantization",
    "device",
    "kv_cache_dtype",
    "tool_call_parser",
    "reasoning_parser",
    "tokenizer",
    "chat_template",
    "generation_config",
    "lora",
)
"""The engine options that answers depend on; the others affect only speed and capacity."""


def model_digest(facts: RunnerFacts, max_model_len: int) -> bytes:
    """SHA-256 of the model's files, the relevant options, the context length, and the version."""
    options = [(name, getattr(facts.config, name)) for name in ANSWERING]
    whole = (facts.model_digest.hex(), options, max_model_len, __version__)
    return hashlib.sha256(repr(whole).encode()).digest()
