"""What the bits of an answer depend on beside its request: the model as it is computed, and what computes it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARITHMETIC", "AnswerContract"]

ARITHMETIC = ("instruction_set", "kernels", "penstock", "torch")
"""Fields that say what computes. Where one differs the same model may give other bits; the other fields say which model
it is."""


@dataclass(frozen=True, slots=True)
class AnswerContract:
    """Two engines with equal contracts give the same tokens and log probabilities for the same request, bit for bit.

    Attributes:
        model: hex digits that identify the model's files, as `ModelFiles.digest` does.
        form: how the weights are kept: a word of `WeightFormat`.
        dtype: of the activations.
        kv_cache_dtype: of keys and values.
        max_model_len: the operator's bound on the context, by which some models choose their rotary angles; 0 for none.
        tokenizer: hex digits that identify the vocabulary, on which grammars and stop strings depend; "" before the
            model's text is known.
        tool_call_parser, reasoning_parser: the operator's options: how answers to conversations are taken apart, which
            may end them.
        instruction_set: the class of instructions that the compiled kernels use here.
        kernels: hex digits that identify the compiled kernels.
        penstock: the release, and the number that is raised when it computes other bits.
        torch: the release of torch, and the class of instructions that it uses here.
    """

    model: str
    form: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    tokenizer: str
    tool_call_parser: str
    reasoning_parser: str
    instruction_set: str
    kernels: str
    penstock: str
    torch: str
