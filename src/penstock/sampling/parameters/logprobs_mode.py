"""`logprobs_mode`: from which distribution log probabilities are taken."""

from __future__ import annotations

from penstock.sampling.kinds import Word
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER", "PROCESSED", "RAW"]

RAW = "raw_logprobs"
PROCESSED = "processed_logprobs"

PARAMETER = Parameter(
    name="logprobs_mode",
    kind=Word((RAW, PROCESSED)),
    default=RAW,
    neutral=RAW,
    nullable=False,
    home=Home.SPEC,
    field="logprobs_mode",
    doc="Where log probabilities come from. raw_logprobs: the model's own distribution. processed_logprobs: the one"
    " that the token was chosen from, after biases, penalties, temperature and filters. (In vLLM this is an option of"
    " the server.)",
)
