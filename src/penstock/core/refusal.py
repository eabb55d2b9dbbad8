"""What the scheduler refuses at submission, and why.

Decides whether this configuration can ever serve a request, whatever the present load: a request that passes here will
be served in the end.
"""

from __future__ import annotations

import math

from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.errors import InvalidParameter, NeverFits, PromptTooLong
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig

__all__ = ["token_limit"]

MAX_TOKEN_ID = 2**63 - 1


def token_limit(request: SequenceRequest, config: SchedulerConfig) -> int:
    """Most tokens the sequence may ever have, prompt and output together.

    Raises:
        InvalidParameter: a field has a value that the core cannot work with.
        PromptTooLong: the context has no room for the prompt, or for even one generated token if any are wanted.
        NeverFits: the pool has fewer blocks in all than the sequence may come to need.
    """
    _refuse_unusable(request, config)
    prompt_tokens, generates = len(request.prompt), request.embedding is None
    if prompt_tokens + generates > config.max_model_len:
        raise PromptTooLong(prompt_tokens, config.max_model_len, param="prompt", generates=generates)
    limit = min(prompt_tokens + request.stop.max_tokens, config.max_model_len)
    need = config.most_blocks(limit)
    if need > config.num_blocks:
        raise NeverFits(need, config.num_blocks, config.block_size)
    return limit


def _refuse_unusable(request: SequenceRequest, config: SchedulerConfig) -> None:
    if not request.prompt:
        raise InvalidParameter("prompt", "must hold at least one token")
    if min(request.prompt) < 0 or max(request.prompt) > MAX_TOKEN_ID:
        raise InvalidParameter("prompt", f"token ids must lie in 0..{MAX_TOKEN_ID}")
    if request.embedding is not None:
        _refuse_unpoolable(request, request.embedding)
    elif config.looks_ahead:
        raise InvalidParameter("embedding", "must be given: a model that looks ahead generates nothing")
    elif request.stop.max_tokens < 1:
        raise InvalidParameter("max_tokens", f"must be at least 1, got {request.stop.max_tokens}")
    if request.stop.min_tokens < 0:
        raise InvalidParameter("min_tokens", f"must not be negative, got {request.stop.min_tokens}")
    if not math.isfinite(request.arrival):
        raise InvalidParameter("arrival", f"must be finite, got {request.arrival}")
    if config.policy != "priority" and request.priority != 0:
        raise InvalidParameter("priority", f"must be 0 under the policy {config.policy}")


def _refuse_unpoolable(request: SequenceRequest, spec: EmbeddingSpec) -> None:
    """Refuse what cannot be embedded: pooling needs every position computed, and no token is generated."""
    if request.stop.max_tokens != 0:
        raise InvalidParameter("max_tokens", f"must be 0 where a prompt is embedded, got {request.stop.max_tokens}")
    if not spec.pooling.takes_cached and not request.fresh_prompt:
        raise InvalidParameter("pooling", f"{spec.pooling} needs every position of the prompt computed")
