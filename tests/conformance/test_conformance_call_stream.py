"""The official clients read calls while the default model writes them, and end with the call of the whole answer.

Drafts are off here: a call that was written before would be guessed, and come in one or two pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest
from conformance_harness import ASK_WEATHER, MODEL, NAMED, WEATHER
from served import Served, serve

pytestmark = pytest.mark.model

FUNCTION = {name: value for name, value in WEATHER["function"].items() if name != "strict"}
CALL = r'\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{2,6}", "unit": "[CF]"\}\}'
CHOICES = {
    "required": {"tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tool_choice": NAMED},
    "auto": {"tool_choice": "auto", "extra_body": {"structured_outputs": {"regex": CALL}}},
}


@pytest.fixture(scope="module")
def server(default_model, tmp_path_factory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("calls") / "trace.jsonl", "--no-speculate") as served:
        yield served


@pytest.fixture(scope="module")
def oai(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.mark.parametrize("choice", CHOICES)
def test_chat_completions(oai, choice):
    asked = {"model": MODEL, "messages": ASK_WEATHER, "max_tokens": 60, "temperature": 0, **CHOICES[choice]}
    asked["tools"] = [{"type": "function", "function": FUNCTION}]
    [whole] = oai.chat.completions.create(**asked).choices[0].message.tool_calls
    pieces = []
    with oai.chat.completions.stream(**asked) as stream:
        pieces += [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert len([piece for piece in pieces if piece]) > 4
    assert "".join(pieces) == streamed.function.arguments == whole.function.arguments
    assert set(json.loads(whole.function.arguments)) == {"city", "unit"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"])
def test_responses(oai, choice):
    asked = {"model": MODEL, "input": ASK_WEATHER, "max_output_tokens": 60, "temperature": 0, "tool_choice": choice}
    asked |= {"tools": [{"type": "function", **FUNCTION}], "parallel_tool_calls": False}
    [whole] = oai.responses.create(**asked).output
    with oai.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [streamed] = stream.get_final_response().output
    assert len(pieces) > 4
    assert "".join(pieces) == streamed.arguments == whole.arguments
    assert whole.status == streamed.status == "completed"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_messages(server, choice):
    tool = {"name": "get_weather", "description": "d", "input_schema": FUNCTION["parameters"]}
    asked = {"model": MODEL, "messages": ASK_WEATHER, "max_tokens": 60, "temperature": 0, "tools": [tool]}
    asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=240) as client:
        asked["extra_body"] = {"temperature": asked.pop("temperature")}
        [whole] = client.messages.create(**asked).content
        with client.messages.stream(**asked) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            [streamed] = stream.get_final_message().content
    assert len(pieces) > 4
    assert json.loads("".join(pieces)) == streamed.input == whole.input
