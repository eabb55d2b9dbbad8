"""Prompts in request bodies: text or token ids, one or several.

A prompt field has four forms, as in OpenAI's API: a text, a list of texts, a list of token ids, a list of such lists.
"""

from __future__ import annotations

from typing import Any

from penstock.api_fields.fields import Kind, join_path, whole_numbers
from penstock.api_fields.request_options import check_prompt_chars
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter, PromptTooLong
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import Prompt, TextPrompt, TokenPrompt

__all__ = ["PROMPT", "PROMPTS", "check_token_ids", "read_prompt", "split_prompts"]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE_PROMPT: list[JsonObject] = [{"type": "string"}, _IDS]
PROMPT = Kind(
    "a string or a list of token ids",
    {"anyOf": _ONE_PROMPT},
    lambda value: isinstance(value, str | list),
    whole_numbers,
)
PROMPTS = Kind(
    "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    {"anyOf": [*_ONE_PROMPT, *({"type": "array", "items": each, "minItems": 1} for each in _ONE_PROMPT)]},
    lambda value: isinstance(value, str | list),
    whole_numbers,
)


def split_prompts(value: Any, field: str, most: int) -> list[tuple[str, Any]]:
    """Split a field of kind `PROMPTS` into prompts, each with its path.

    Raises:
        InvalidParameter: there is no prompt, there are more than `most`, or texts and token ids are mixed.
    """
    if value is None:
        raise InvalidParameter(field, f"{field} is missing.", code="missing_value")
    if isinstance(value, str) or (value and not isinstance(value[0], str | list)):
        return [(field, value)]
    if not value:
        raise InvalidParameter(field, f"{field} must not be an empty list.")
    if len(value) > most:
        raise InvalidParameter(field, f"{field} may hold at most {most} {field}s.")
    if len({type(item) for item in value}) > 1:
        raise InvalidParameter(field, f"{field} must be {PROMPTS.name}, not a mixture.", code="invalid_type")
    return [(f"{field}.{index}", item) for index, item in enumerate(value)]


def read_prompt(value: Any, path: str, card: ModelCard, limits: RequestLimits) -> Prompt:
    """Read one prompt: text, or token ids of the served vocabulary.

    Raises:
        RequestError: it is neither, or is longer than the context.
    """
    if isinstance(value, str):
        check_prompt_chars(len(value), path, card, limits)
        return TextPrompt(value)
    if not isinstance(value, list):
        raise InvalidParameter(path, f"{path} must be a string or a list of token ids.", code="invalid_type")
    if not value:
        raise InvalidParameter(path, f"{path} must hold at least one token id.")
    if len(value) >= card.max_model_len:
        raise PromptTooLong(len(value), card.max_model_len, param=path)
    check_token_ids(value, path, card)
    return TokenPrompt(tuple(value))


def check_token_ids(value: list[Any], path: str, card: ModelCard) -> None:
    """Check that every item of a list is a token id of the served vocabulary.

    Raises:
        InvalidParameter: an item is not; names it.
    """
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < card.vocab_size:
            where = join_path(path, index)
            raise InvalidParameter(where, f"{where} must be a token id: an integer in 0..{card.vocab_size - 1}.")
