"""Measures how far one model's predictions lie from another's, position by position.

Decides the arithmetic: float64 throughout, so that divergences of 1e-7 nats are not rounding. Knows logits only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Divergence", "divergence", "sixteen_bit_log_probs", "sixteen_bit_nll"]

_SPAN = 16.0
"""Logits further than this below a row's largest are stored as if they lay exactly this far below it."""


class Divergence(NamedTuple):
    """Values for each position, in order.

    Attributes:
        kl: Kullback-Leibler divergence from the reference, nats.
        same_top: whether both have the same top token.
        nll: negative log likelihood of the token that follows, under the model, nats.
        reference_nll: the same under the reference.
    """

    kl: list[float]
    same_top: list[bool]
    nll: list[float]
    reference_nll: list[float]


def divergence(reference: Tensor, logits: Tensor, targets: Sequence[int]) -> Divergence:
    """Compare logits with those of a reference.

    The divergence is `sum p (log p - log q)`, `p` being the reference's probabilities (Kullback and Leibler, "On
    information and sufficiency", 1951).

    Args:
        reference: `[S, V]`.
        logits: `[S, V]`.
        targets: the token that follows each position.
    """
    following = torch.tensor(targets, device=logits.device)[:, None]
    log_p, log_q = _log_softmax(reference), _log_softmax(logits)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    same_top = reference.argmax(dim=-1) == logits.argmax(dim=-1)
    nll, reference_nll = (-log.gather(1, following)[:, 0] for log in (log_q, log_p))
    return Divergence(kl.tolist(), same_top.tolist(), nll.tolist(), reference_nll.tolist())


def sixteen_bit_log_probs(logits: Tensor) -> bytes:
    """Log probabilities `[S, V]` as llama.cpp's `llama-perplexity` stores them in a file of base logits.

    A row is float32 scale, float32 minimum, then a uint16 for each token, `log p = scale * number + minimum`; filled up
    to an even count. (llama.cpp, `tools/perplexity/perplexity.cpp`.)
    """
    rows = logits.double()
    top = rows.amax(dim=-1, keepdim=True)
    low = torch.maximum(rows.amin(dim=-1, keepdim=True), top - _SPAN)
    scale = (top - low) / 65535
    numbers = ((rows - low).clamp(min=0) / scale.clamp(min=torch.finfo(torch.float64).tiny)).round()
    minimum = low - rows.logsumexp(dim=-1, keepdim=True)
    head = torch.cat([scale, minimum], dim=-1).float().view(torch.int16)  # [S, 4]
    body = numbers.to(torch.int32).to(torch.int16)  # wraps round: the bits are those of uint16
    return torch.cat([head, body, body.new_zeros(len(body), body.shape[1] % 2)], dim=-1).cpu().numpy().tobytes()


def sixteen_bit_nll(logits: Tensor, targets: Sequence[int]) -> list[float]:
    """Negative log likelihoods of the following tokens, nats, by `sixteen_bit_log_probs` apart from its rounding.

    Less than the model's own wherever a token lies further than `_SPAN` below the top token.

    Args:
        logits: `[S, V]`.
        targets: the token that follows each position.
    """
    rows = logits.double()
    following = rows.gather(1, torch.tensor(targets, device=rows.device)[:, None])
    stored = torch.maximum(following, rows.amax(dim=-1, keepdim=True) - _SPAN)
    nll: list[float] = (rows.logsumexp(dim=-1, keepdim=True) - stored)[:, 0].tolist()
    return nll


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), dim=-1)
