"""Every limit on what a request may ask, with its default, in one place.

Checked where the request is parsed, and again at the engine's door.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_LIMITS", "RequestLimits"]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds that keep one request from costing what all the others have."""

    max_choices: int = 16
    max_prompts: int = 64
    max_sequences: int = 64
    """Prompts times choices of one HTTP request."""
    max_stop_strings: int = 4
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_messages: int = 2048
    max_prompt_chars_per_token: int = 64
    """A text longer than the context times this is refused before it is tokenised."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_name_chars: int = 256
    max_cache_salt_chars: int = 128
    max_grammar_chars: int = 64 * 1024
    """Of a JSON schema, a regular expression or a grammar, and of all choices together."""
    max_grammar_choices: int = 1000


DEFAULT_LIMITS = RequestLimits()
