"""How much a model may think, in every API's fields, and conversations that are only rendered or tokenised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from server_harness import CARD, LIMITS, running

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import ChatPrompt, Message
from penstock.server.http.access import Access
from penstock.server.openai.chat import parse_chat
from penstock.server.tokens.apply_template import parse_template
from penstock.server.tokens.tokenize import parse_tokenize

HI = [{"role": "user", "content": "Hi"}]
ALWAYS = replace(CARD, thinks=True)
NOW = {"type": "function", "function": {"name": "now"}}


def test_with_compat_an_effort_that_cannot_be_had_is_left_out_and_listed(served):
    with running(served.engine, card=ALWAYS, access=Access(compat=True)) as url:
        answer = served.http.post(url + "/v1/chat/completions", json={"messages": HI, "reasoning_effort": "high"})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-params"] == "reasoning_effort"


@pytest.mark.parametrize("budget", [0, 7, 2**31 - 1])
def test_a_budget_reaches_the_engine_and_a_model_that_does_not_think_refuses_it(budget):
    [request] = parse_chat({"messages": HI, "thinking_token_budget": budget}, "id", ALWAYS, LIMITS).requests
    assert request.thinking_token_budget == budget
    with pytest.raises(InvalidParameter) as caught:
        parse_chat({"messages": HI, "thinking_token_budget": budget}, "id", CARD, LIMITS)
    assert (caught.value.param, caught.value.code) == ("thinking_token_budget", "unsupported_parameter")


@pytest.mark.parametrize("endpoint", ["chat", "complete", "generate"])
def test_every_endpoint_takes_a_budget_and_with_compat_one_that_means_nothing_is_left_out(served, endpoint):
    answer = getattr(served, endpoint)(thinking_token_budget=3)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"
    with running(served.engine, access=Access(compat=True)) as url:
        path = answer.request.url.path
        body = {"messages": HI} if endpoint == "chat" else {"prompt": "Hi"}
        kept = served.http.post(url + path, json=body | {"thinking_token_budget": 3})
        assert (kept.status_code, kept.headers["x-ignored-params"]) == (200, "thinking_token_budget")
    with running(served.engine, card=ALWAYS) as url:
        assert served.http.post(url + path, json=body | {"thinking_token_budget": 3}).status_code == 200
    assert [request.thinking_token_budget for request in served.engine.requests] == [None, 3]


# --- rendered and tokenised as they would be answered

FIELDS = {
    "messages": [*HI, {"role": "assistant", "content": "It"}],
    "tools": [NOW],
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.mark.parametrize("parse", [lambda body: parse_tokenize(body, CARD, LIMITS)[0], None])
def test_a_conversation_is_read_as_the_chat_endpoint_reads_it(parse):
    parse = parse or (lambda body: parse_template(body, CARD, LIMITS))
    [request] = parse_chat(FIELDS, "id", CARD, LIMITS).requests
    prompt = parse(FIELDS)
    assert prompt == request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools[0].name, prompt.continue_final_message) == ("now", True)
    assert prompt.template_variables == (("enable_thinking", False),)
    plain = parse({"messages": HI, "add_generation_prompt": False})
    assert plain == ChatPrompt((Message("user", "Hi"),), add_generation_prompt=False)


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"])
def test_what_belongs_to_a_conversation_is_not_ignored_beside_a_text(served, field):
    value = {"tools": [NOW], "chat_template_kwargs": {}}.get(field, True)
    answer = served.http.post("/tokenize", json={"prompt": "a", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
