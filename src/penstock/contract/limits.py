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
    max_logprobs: int = 20
    """Alternatives to each token whose log probability is reported."""
    max_repetition_pattern: int = 256
    max_repetition_count: int = 256
    max_logit_biases: int = 1024
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_bad_word_tokens: int = 1024
    """Of all spellings of all words together."""
    max_sequence_breakers: int = 32
    max_sequence_breaker_chars: int = 40
    max_messages: int = 2048
    max_prompt_chars_per_token: int = 64
    """A text longer than the context times this is refused before it is tokenised."""
    max_tools: int = 128
    max_tool_name_chars: int = 64
    max_tool_calls: int = 128
    """Calls in one message of a conversation's history."""
    max_template_variables: int = 32
    max_body_bytes: int = 8 * 1024 * 1024
    max_name_chars: int = 256
    max_cache_salt_chars: int = 128


DEFAULT_LIMITS = RequestLimits()
