"""A call that must be made, on the default model: the library and every API, whole and streamed, make the same one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import jsonschema
import openai
import pytest
from served import Served

from penstock import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
TURNS = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "weather"}}
LENGTH = 64


@pytest.fixture(scope="module")
def served(default_server) -> Served:
    return default_server


@pytest.fixture(scope="module")
def oai(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def by_chat(oai, choice, *, stream: bool):
    asked = {
        "model": MODEL,
        "messages": TURNS,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": LENGTH,
    }
    if not stream:
        choice = oai.chat.completions.create(**asked).choices[0]
    else:
        with oai.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            choice = events.get_final_completion().choices[0]
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


def by_responses(oai, choice, *, stream: bool):
    asked = {
        "model": MODEL,
        "input": TURNS,
        "tools": [{"type": "function"} | FUNCTION],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": LENGTH,
    }
    if not stream:
        response = oai.responses.create(**asked)
    else:
        with oai.responses.stream(**asked) as events:
            response = events.get_final_response()
    assert response.status == "completed"
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def by_messages(claude, choice, *, stream: bool):
    asked = {
        "model": MODEL,
        "messages": TURNS,
        "tools": [{"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}],
        "tool_choice": choice | {"disable_parallel_tool_use": True},
        "max_tokens": LENGTH,
        "extra_body": {"temperature": 0},
    }
    if not stream:
        message = claude.messages.create(**asked)
    else:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
    assert message.stop_reason == "tool_use"
    return [(block.name, json.dumps(block.input)) for block in message.content if block.type == "tool_use"]


def as_json(calls) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("kind", ["required", "named"])
def test_every_api_makes_the_same_call_whole_and_streamed(oai, claude, kind):
    chat, response, message = {
        "required": ("required", "required", {"type": "any"}),
        "named": (NAMED, {"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
    }[kind]
    [(name, arguments)] = expected = by_chat(oai, chat, stream=False)
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert by_chat(oai, chat, stream=True) == expected
    assert by_responses(oai, response, stream=False) == by_responses(oai, response, stream=True) == expected
    for stream in (False, True):
        assert as_json(by_messages(claude, message, stream=stream)) == as_json(expected)


def test_tools_are_counted_as_they_are_computed(claude, oai):
    tools = [{"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}]
    count = claude.messages.count_tokens(model=MODEL, messages=TURNS, tools=tools).input_tokens
    used = claude.messages.create(model=MODEL, messages=TURNS, tools=tools, max_tokens=1).usage
    assert used.input_tokens + used.cache_read_input_tokens == count
    chat = oai.chat.completions.create(model=MODEL, messages=TURNS, tools=[TOOL], max_completion_tokens=1)
    tokens = oai.post("/../tokenize", body={"messages": TURNS, "tools": [TOOL]}, cast_to=object)
    assert chat.usage.prompt_tokens == tokens["count"] == count


async def test_the_library_makes_the_call_that_the_server_makes(default_model, oai):
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    options = {"kv_cache_memory": 50_000_000}
    with LLM(str(default_model), **options) as llm:
        [output] = llm.chat(TURNS, params, use_tqdm=False, **asked)
        answer = output.outputs[0]
        [call] = answer.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        [after] = llm.chat([*TURNS, answer.message, result], params, use_tqdm=False, tools=[TOOL])
        plain = llm.chat([TURNS, TURNS], params, use_tqdm=False)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("", "", "tool_calls")
    assert [(call.name, call.arguments)] == by_chat(oai, "required", stream=False)
    assert "sunny" in after.prompt
    assert plain[0].outputs[0].text == plain[1].outputs[0].text != ""
    async with AsyncLLM(str(default_model), **options) as online:
        outputs = [output async for output in online.chat(TURNS, params, **asked)]
    assert [each.arguments for each in outputs[-1].outputs[0].tool_calls] == [call.arguments]


# --- tools and a form of the answer

FORM = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}, "note": {"type": "string", "maxLength": 12}},
    "required": ["sunny", "note"],
    "additionalProperties": False,
}
ASKED = {"temperature": 1.5, "top_p": 1}


def check_call_or_form(calls, text):
    """An answer is either calls or a form, and follows its schema."""
    for name, arguments in calls:
        assert name == "weather"
        jsonschema.validate(arguments, SCHEMA)
    if calls:
        assert not (text or "").strip()
    else:
        jsonschema.validate(json.loads(text), FORM)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_with_tools_and_a_form_has_one_of_them_in_every_api(oai, claude, seed):
    """Whole and streamed alike. The seed makes chat and responses equal; messages have none, and are greedy."""
    chat = {"model": MODEL, "messages": TURNS, "tools": [TOOL], "max_completion_tokens": LENGTH, "seed": seed} | ASKED
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM, "strict": True}}
    whole = oai.chat.completions.create(**chat).choices[0].message
    with oai.chat.completions.stream(**chat) as events:
        events.until_done()
        streamed = events.get_final_completion().choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in whole.tool_calls or ()]
    check_call_or_form(calls, whole.content)
    assert (streamed.content or "") == (whole.content or "")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed.tool_calls or ()] == calls

    response = {"model": MODEL, "input": TURNS, "tools": [{"type": "function"} | FUNCTION], "max_output_tokens": LENGTH}
    response |= {"text": {"format": {"type": "json_schema", "name": "n", "schema": FORM}}} | ASKED
    for stream in (False, True):
        if stream:
            with oai.responses.stream(**response) as events:
                given = events.get_final_response()
        else:
            given = oai.responses.create(**response)
        found = [(item.name, json.loads(item.arguments)) for item in given.output if item.type == "function_call"]
        check_call_or_form(found, given.output_text)

    message = {
        "model": MODEL,
        "messages": TURNS,
        "tools": [{"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}],
        "max_tokens": LENGTH,
        "output_config": {"format": {"type": "json_schema", "schema": FORM}},
        "extra_body": {"temperature": 0},
    }
    answers = [claude.messages.create(**message)]
    with claude.messages.stream(**message) as events:
        answers.append(events.get_final_message())
    for given in answers:
        found = [(block.name, block.input) for block in given.content if block.type == "tool_use"]
        check_call_or_form(found, "".join(block.text for block in given.content if block.type == "text"))
    assert answers[0].content[0].type == answers[1].content[0].type


def test_json_mode_with_tools_is_json_or_a_call(oai):
    asked = {"model": MODEL, "messages": TURNS, "tools": [TOOL], "max_completion_tokens": LENGTH}
    for seed in range(4):
        message = (
            oai.chat.completions.create(**asked, **ASKED, seed=seed, response_format={"type": "json_object"})
            .choices[0]
            .message
        )
        if message.tool_calls:
            jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), SCHEMA)
        else:
            assert isinstance(json.loads(message.content), dict)
