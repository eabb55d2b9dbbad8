"""A budget for reasoning on the default model, made to think by the beginning of its turn: every API keeps to it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from served import Served, serve

from penstock import LLM, SamplingParams

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
TURNS = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "<think>I should"}]
BUDGET, LENGTH = 5, 24


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("trace") / "trace.jsonl", "--reasoning-parser", "think") as served:
        yield served


@pytest.fixture(scope="module")
def oai(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def chat(oai, budget: int | None, **fields):
    body = {"continue_final_message": True, "thinking_token_budget": budget}
    asked = {"model": MODEL, "messages": TURNS, "temperature": 0, "max_completion_tokens": LENGTH, "extra_body": body}
    return oai.chat.completions.create(**asked | fields)


def test_every_api_closes_the_reasoning_at_the_same_place(oai, claude, served, default_model):
    free = chat(oai, None)
    assert free.choices[0].message.content == ""  # by itself the model never stops to think
    assert free.usage.completion_tokens_details.reasoning_tokens > 2 * BUDGET

    answer = chat(oai, BUDGET, logprobs=True)
    message, tokens = answer.choices[0].message, answer.choices[0].logprobs.content
    thought = "".join(each.token for each in tokens[:BUDGET])
    assert message.reasoning_content == thought.strip()
    assert free.choices[0].message.reasoning_content.startswith(message.reasoning_content)
    closing = answer.usage.completion_tokens_details.reasoning_tokens - BUDGET
    assert "".join(each.token for each in tokens[BUDGET : BUDGET + closing]) == "</think>"
    assert "".join(each.token for each in tokens[BUDGET + closing :]).strip() == message.content.strip() != ""

    pieces = [chunk.choices[0].delta for chunk in chat(oai, BUDGET, stream=True) if chunk.choices]
    assert "".join(piece.content or "" for piece in pieces) == message.content
    assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == message.reasoning_content

    said = claude.messages.create(
        model=MODEL,
        messages=TURNS,
        max_tokens=LENGTH,
        thinking={"type": "enabled", "budget_tokens": BUDGET},
        extra_body={"temperature": 0},
    )
    assert [block.type for block in said.content] == ["thinking", "text"]
    assert (said.content[0].thinking, said.content[1].text) == (message.reasoning_content, message.content)

    with LLM(str(default_model), reasoning_parser="think", kv_cache_memory=50_000_000) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH, thinking_token_budget=BUDGET)
        [output] = llm.chat(TURNS, params, use_tqdm=False, continue_final_message=True)
        [raw] = llm.generate([output.prompt], params, use_tqdm=False)
    assert (output.outputs[0].reasoning, output.outputs[0].text) == (message.reasoning_content, message.content)
    assert raw.outputs[0].text.split("</think>")[0].strip() == message.reasoning_content
    assert raw.outputs[0].token_ids == output.outputs[0].token_ids
    completion = oai.completions.create(
        model=MODEL,
        prompt=output.prompt,
        temperature=0,
        max_tokens=LENGTH,
        extra_body={"thinking_token_budget": BUDGET},
    )
    assert completion.choices[0].text == raw.outputs[0].text


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"allowed_token_ids": [1, 2]}, "allowed_token_ids"), ({"thinking_token_budget": -1}, "thinking_token_budget")],
)
def test_what_stands_against_a_budget_is_refused_by_name(oai, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(oai, BUDGET, extra_body={"continue_final_message": True, "thinking_token_budget": BUDGET} | fields)
    assert caught.value.param == param


def test_a_form_of_the_answer_leaves_no_room_for_reasoning_so_it_keeps_to_any_budget(oai):
    answer = chat(
        oai,
        BUDGET,
        extra_body={
            "continue_final_message": True,
            "thinking_token_budget": BUDGET,
            "structured_outputs": {"choice": ["Nile"]},
        },
    )
    assert answer.choices[0].message.content == "Nile"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_model_that_does_not_think_refuses_by_name(default_server):
    with (
        openai.OpenAI(base_url=default_server.url + "/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="does not think") as caught,
    ):
        chat(client, BUDGET)
    assert (caught.value.param, caught.value.code) == ("thinking_token_budget", "unsupported_parameter")
