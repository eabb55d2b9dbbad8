"""What the bits of an answer depend on besides its request: the model as it is computed, and what computes it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARITHMETIC", "AnswerContract"]

ARITHMETIC = ("instruction_set", "kernels", "penstock", "torch")
"""Fields that say what computes. If one of them differs, the same model may give other bits; the other fields identify
the model."""


@dataclass(frozen=True, slots=True)
class AnswerContract:
    """Two engines with equal contracts give the same tokens and log probabilities for the same request, bit for bit.

    Attributes:
        model: hex digits that identify the model's files, as `ModelFiles.digest` does.
        form: the weight format, as a word of `WeightFormat`.
        dtype: data type of the activations.
        kv_cache_dtype: data type of keys and values.
        max_model_len: the operator's limit on the context, from which some models choose their rotary angles; 0 for
            none.
        tokenizer: hex digits that identify the vocabulary, on which grammars and stop strings depend; "" before the
            model's text is known.
        tool_call_parser, reasoning_parser: the operator's options for parsing answers to conversations; parsing may
            end an answer.
        instruction_set: the class of instructions that the compiled kernels use here.
        kernels: hex digits that identify the compiled kernels.
        penstock: the release, and a number that is raised whenever Penstock starts to compute other bits.
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
