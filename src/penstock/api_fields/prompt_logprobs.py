"""`prompt_logprobs` in answers: the log probabilities of a prompt's tokens, in vLLM's format.

Completions may have several prompts, so each choice carries those of its own prompt; answers of other endpoints
carry them once. Streams have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.api_fields.answers import finite_logprob
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import PromptTokens, TokenPiece
from penstock.sampling import SamplingParams

__all__ = ["PROMPT_LOGPROBS_SCHEMA", "PromptLogprobs", "add_prompt_logprobs", "read_prompt_logprobs"]

_ENTRY: JsonObject = {
    "type": "object",
    "properties": {
        "logprob": {"type": "number"},
        "rank": {"type": "integer"},
        "decoded_token": {"type": "string"},
    },
    "required": ["logprob", "rank", "decoded_token"],
    "additionalProperties": False,
}
PROMPT_LOGPROBS_SCHEMA: JsonObject = {
    "type": "array",
    "items": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": _ENTRY}]},
}


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Which prompt log probabilities an answer holds.

    Attributes:
        count: number of alternatives to each token.
        in_choices: whether each choice carries its own prompt's; otherwise the answer carries those of its only prompt.
    """

    count: int
    in_choices: bool


def read_prompt_logprobs(params: SamplingParams, *, stream: bool, in_choices: bool) -> PromptLogprobs | None:
    """The prompt log probabilities that `params` ask for, or None.

    Raises:
        InvalidParameter: `params` ask for them in a stream.
    """
    if params.prompt_logprobs is None:
        return None
    if stream:
        message = "prompt_logprobs has no place in a stream; leave out stream."
        raise InvalidParameter("prompt_logprobs", message)
    return PromptLogprobs(params.prompt_logprobs, in_choices)


def add_prompt_logprobs(answer: JsonObject, wanted: PromptLogprobs, prompts: Sequence[PromptTokens]) -> None:
    """Add them to a complete answer, whose choices are in the order of `prompts`, equally many for each prompt."""
    objects = [_entries(prompt, wanted.count) for prompt in prompts]
    if not wanted.in_choices:
        (answer["prompt_logprobs"],) = objects
        return
    choices = answer["choices"]
    for index, choice in enumerate(choices):
        choice["prompt_logprobs"] = objects[index * len(objects) // len(choices)]


def _entries(prompt: PromptTokens, count: int) -> list[JsonObject | None]:
    """One entry per token: null for the first, which has no prediction; otherwise the token and the top ones, by id."""
    return [None, *({str(each.id): _entry(each) for each in (t, *t.top[:count])} for t in prompt.tokens[1:])]


def _entry(token: TokenPiece) -> JsonObject:
    return {"logprob": finite_logprob(token.logprob), "rank": token.rank, "decoded_token": token.text}
