"""`reasoning_effort`: what it sets in a model's chat template, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api_fields.chat_options import ANSWER_FIELDS, PROMPT_FIELDS, read_chat_options
from penstock.api_fields.conversation import MESSAGES
from penstock.api_fields.fields import Field, read_fields
from penstock.api_fields.reasoning import EFFORTS
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard

HI = [{"role": "user", "content": "Hi"}]
CHAT_FIELDS = (Field("messages", MESSAGES, ""), *PROMPT_FIELDS, *ANSWER_FIELDS)
PLAIN = ModelCard("acme/tiny-1", 0, max_model_len=64, vocab_size=100, has_chat_template=True)
ALWAYS = replace(PLAIN, thinks=True)
SWITCH = replace(PLAIN, thinks=True, template_variables=frozenset({"enable_thinking", "theme"}))
LEVEL = replace(PLAIN, thinks=True, template_variables=frozenset({"reasoning_effort"}))
BOTH = replace(PLAIN, thinks=True, template_variables=frozenset({"reasoning_effort", "thinking"}))


def variables(card: ModelCard, **fields: object) -> dict:
    given = read_fields({"messages": HI} | fields, CHAT_FIELDS, {})
    return dict(read_chat_options(given, card, DEFAULT_LIMITS).prompt.template_variables)


@pytest.mark.parametrize(
    ("card", "effort", "expected"),
    [
        (PLAIN, "none", {}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "low", {"enable_thinking": True}),
        (LEVEL, "none", {"reasoning_effort": "none"}),
        (LEVEL, "high", {"reasoning_effort": "high"}),
        (BOTH, "none", {"thinking": False}),
        (BOTH, "medium", {"thinking": True, "reasoning_effort": "medium"}),
    ],
)
def test_an_effort_becomes_what_the_template_reads(card, effort, expected):
    assert variables(card, reasoning_effort=effort) == expected
    assert variables(card) == variables(card, reasoning_effort=None) == {}


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_model_that_always_thinks_refuses_an_effort_by_name(effort):
    with pytest.raises(InvalidParameter) as caught:
        variables(ALWAYS, reasoning_effort=effort)
    assert (caught.value.param, caught.value.code) == ("reasoning_effort", "unsupported_parameter")


@pytest.mark.parametrize("effort", EFFORTS)
def test_to_a_model_that_never_thinks_an_effort_is_a_hint_that_changes_nothing(effort):
    assert variables(PLAIN, reasoning_effort=effort) == {}


def test_an_effort_and_a_variable_may_agree_but_not_contradict_each_other():
    for agreeing in ({"enable_thinking": False}, {"theme": "dark"}):
        chosen = variables(SWITCH, reasoning_effort="none", chat_template_kwargs=agreeing)
        assert chosen == agreeing | {"enable_thinking": False}
    with pytest.raises(InvalidParameter, match="contradict") as caught:
        variables(SWITCH, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("value", ["lots", 1, True, ["low"]])
def test_an_effort_is_one_of_openais_words(value):
    with pytest.raises(InvalidParameter, match="one of none") as caught:
        variables(SWITCH, reasoning_effort=value)
    assert caught.value.param == "reasoning_effort"
