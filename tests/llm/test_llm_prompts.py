"""The shapes in which prompts come."""

from __future__ import annotations

import pytest

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import TextPrompt, TokenPrompt
from penstock.llm.prompts import as_chat_prompt, as_prompt, as_prompts


def test_one_prompt_or_a_list_of_them():
    assert as_prompts("a") == [TextPrompt("a")]
    assert as_prompts(["a", "b"]) == [TextPrompt("a"), TextPrompt("b")]
    assert as_prompts([1, 2]) == [TokenPrompt((1, 2))]
    assert as_prompts([[1, 2], "a", {"prompt_token_ids": [3]}]) == [
        TokenPrompt((1, 2)),
        TextPrompt("a"),
        TokenPrompt((3,)),
    ]
    assert as_prompts([]) == []


@pytest.mark.parametrize("given", [3, [], [1, "a"], [True], {"prompt": "a", "more": 1}, {}, [1.5], None])
def test_other_shapes_are_refused(given):
    with pytest.raises(InvalidParameter):
        as_prompt(given)


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": 3}, {"role": "user", "content": "", "x": 1}]
)
def test_malformed_messages_are_refused_by_place(message):
    with pytest.raises(InvalidParameter) as caught:
        as_chat_prompt([{"role": "user", "content": "ok"}, message])
    assert caught.value.param.startswith("messages.1")
