"""Computes the log probabilities of a prompt's tokens from the hidden states of a step.

They have the same bits as if the tokens were an answer. Computes logits for a few positions at a time, since `[T, V]`
for a long prompt is larger than any model. Knows no sequence and no slot table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.contract.plan import PromptScores, TopLogprobs
from penstock.exec.sampler import log_probabilities, ranks_of, top_tokens
from penstock.kernels.backend import Choose

__all__ = ["PORTION", "prompt_scores"]

PORTION = 32
"""Positions whose logits are in memory at the same time."""


def prompt_scores(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Sequence[int],
    count: int,
    start: int,
    choose: Choose | None = None,
) -> PromptScores:
    """Score the tokens `targets`, the first of which has index `start` in its prompt.

    Args:
        logits_of: `[S, H]` to `[S, V]`.
        hidden: `[S, H]`, the hidden state of the position before each target.
        targets: the tokens to score.
        count: how many top tokens are reported at each position.
        start: index of the first target in its prompt.
        choose: the backend's compiled call; see `sampler.log_probabilities`.
    """
    logprobs: list[float] = []
    top_logprobs: list[TopLogprobs] = []
    ranks: list[int] = []
    for begin in range(0, len(targets), PORTION):
        here = torch.tensor(targets[begin : begin + PORTION], device=hidden.device)
        logits = logits_of(hidden[begin : begin + len(here)])  # [P, V]
        scores = log_probabilities(logits, choose)
        logprobs += scores.gather(-1, here[:, None]).squeeze(-1).tolist()
        top_logprobs += top_tokens(logits, scores, [count] * len(here)) if count else [()] * len(here)
        ranks += ranks_of(logits, here)
    return PromptScores(start, tuple(logprobs), tuple(top_logprobs), tuple(ranks))
