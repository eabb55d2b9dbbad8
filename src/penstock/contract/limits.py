"""Every limit on a request, with its default, in one place.

Checked where the request is parsed, and again when the engine takes the request.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_LIMITS", "DEFAULT_SERVER_LIMITS", "RequestLimits", "ServerLimits"]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that keep one request from using up what all the others need."""

    max_choices: int = 16
    max_prompts: int = 64
    max_sequences: int = 64
    """Prompts times choices of one HTTP request."""
    max_embedding_inputs: int = 2048
    """Inputs of one request for embeddings; at most `max_sequences` of these are in the engine at once."""
    max_stop_strings: int = 64
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    """Top alternatives that are reported with a token's log probability."""
    max_prompt_logprobs: int = 262_144
    """Entries of one prompt's log probabilities: its tokens, times one plus their alternatives, times choices."""
    max_repetition_pattern: int = 256
    max_repetition_count: int = 256
    max_logit_biases: int = 1024
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_bad_word_tokens: int = 1024
    """Tokens of all spellings of all words together."""
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
    max_detokenized_ids: int = 1 << 20
    max_aborted_ids: int = 256
    """Ids in one request to abort."""
    max_grammar_chars: int = 64 * 1024
    """Characters of a JSON schema, a regular expression or a grammar, or of all choices together."""
    max_grammar_choices: int = 1000
    max_json_object_tokens: int = 2048
    """Tokens of an answer that may be any JSON object, if the request has no `max_tokens`: nothing else ends it."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits that keep one client, or one connection, from using up what all the others need.

    Limits that an operator may want to change are also options (`contract.config`), with these defaults.
    """

    max_queued_requests: int = 1024
    """Sequences that wait for admission."""
    max_queued_tokens: int = 262_144
    """Tokens of the sequences that wait."""
    max_connections: int = 1024
    max_header_bytes: int = 16 * 1024
    max_headers: int = 64
    header_seconds: float = 5.0
    """From the connection, or the first byte of its next request, to the end of the request's headers."""
    write_seconds: float = 30.0
    """How long a client may read nothing of an answer that is ready."""
    request_seconds: float = 600.0
    """From a request's headers to the end of its answer."""
    drain_seconds: int = 30
    """How long running answers may go on after SIGTERM."""
    heartbeat_seconds: float = 10.0
    """How long the engine may take to answer a heartbeat and still count as ready."""
    max_api_keys: int = 1024
    min_api_key_chars: int = 16
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 1024 * 1024
    max_resumable_streams: int = 16_384
    """Streams that are remembered, half a kilobyte each, so that their clients may ask for the rest."""
    max_ignored_params: int = 128
    """Fields that `--compat` takes out of one request."""


DEFAULT_LIMITS = RequestLimits()
DEFAULT_SERVER_LIMITS = ServerLimits()
