"""Every field's fate: implemented, accepted at its neutral value, or refused by name. None is ignored in silence."""

from __future__ import annotations

import typing

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from scripted_engine import always, finished, stop

from penstock.contract.request import ChatPrompt, Message, TextPrompt, TokenPrompt
from penstock.server.openai.chat import CHAT_FIELDS, NEUTRAL_CHAT
from penstock.server.openai.completions import COMPLETION_FIELDS, NEUTRAL_COMPLETION
from penstock.server.openai.generate import NEUTRAL_GENERATE

VLLM = frozenset(
    {
        "use_beam_search",
        "top_k",
        "min_p",
        "repetition_penalty",
        "length_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "allowed_token_ids",
        "prompt_logprobs",
        "logprob_token_ids",
        "bad_words",
        "add_special_tokens",
        "response_format",
        "structured_outputs",
        "priority",
        "request_id",
        "session_id",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "return_token_offsets",
        "cache_salt",
        "kv_transfer_params",
        "vllm_xargs",
        "repetition_detection",
        "thinking_token_budget",
        "stream_interval",
    }
)
VLLM_CHAT = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "include_reasoning",
        "return_prompt_text",
    }
)


def openai_names(*types) -> set[str]:
    return {name for each in types for name in typing.get_type_hints(each)}


OPENAI_CHAT = openai_names(
    chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming
)
OPENAI_COMPLETION = openai_names(
    completion_create_params.CompletionCreateParamsNonStreaming,
    completion_create_params.CompletionCreateParamsStreaming,
)


def test_every_field_of_openai_and_vllm_is_supported_or_refused():
    chat = {field.name for field in CHAT_FIELDS} | set(NEUTRAL_CHAT)
    completion = {field.name for field in COMPLETION_FIELDS} | set(NEUTRAL_COMPLETION)
    assert not (OPENAI_CHAT | VLLM | VLLM_CHAT) - chat
    assert not (OPENAI_COMPLETION | VLLM | {"prompt_embeds"}) - completion


def test_no_field_is_both_supported_and_refused():
    assert not {field.name for field in CHAT_FIELDS} & set(NEUTRAL_CHAT)
    assert not {field.name for field in COMPLETION_FIELDS} & set(NEUTRAL_COMPLETION)


TABLES = {"chat": NEUTRAL_CHAT, "complete": NEUTRAL_COMPLETION, "generate": NEUTRAL_GENERATE}


@pytest.mark.parametrize("endpoint", TABLES)
def test_what_is_not_implemented_is_accepted_at_its_neutral_values(served, endpoint):
    table = TABLES[endpoint]
    for pick in range(3):
        body = {name: (values[pick] if pick < len(values) else None) for name, values in table.items()}
        response = getattr(served, endpoint)(**body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("endpoint", TABLES)
def test_what_is_not_implemented_is_refused_by_name_at_any_other_value(served, endpoint):
    for name, neutral in TABLES[endpoint].items():
        for value in ({"a": 17}, not neutral[0] if neutral and neutral != (True, False) else 0.5):
            response = getattr(served, endpoint)(**{name: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter"), name
            assert name in error["message"]
            assert response.headers["x-should-retry"] == "false"
    assert not served.engine.requests


@pytest.mark.parametrize("endpoint", TABLES)
def test_an_unknown_field_is_refused_by_name(served, endpoint):
    error = getattr(served, endpoint)(temprature=0.5).json()["error"]
    assert (error["param"], error["code"], error["type"]) == (
        "temprature",
        "unknown_parameter",
        "invalid_request_error",
    )
    assert "temprature" in error["message"]


def test_what_litellm_adds_to_a_message_that_it_sends_back_means_nothing(served):
    spoken = {"role": "assistant", "content": "Hi"}
    for added in ({}, {"refusal": None}):
        turns = [spoken | {"provider_specific_fields": added}, {"role": "user", "content": "And?"}]
        assert served.chat(messages=turns).status_code == 200
    turns[0]["provider_specific_fields"] = {"refusal": "No."}
    error = served.chat(messages=turns).json()["error"]
    assert (error["param"], error["code"]) == ("messages.0.provider_specific_fields", "unsupported_parameter")


def test_false_is_not_zero_and_zero_is_a_float_too(served):
    assert served.chat(length_penalty=True).json()["error"]["code"] == "unsupported_parameter"
    assert served.chat(frequency_penalty=False).json()["error"]["param"] == "frequency_penalty"
    assert served.chat(length_penalty=1.0, frequency_penalty=0.0, presence_penalty=0, logit_bias={}).status_code == 200


def test_penalties_biases_and_word_lists_reach_the_engine(served):
    fields = {"presence_penalty": 0.5, "bad_words": ["x"], "allowed_token_ids": [3], "dry_multiplier": 1}
    assert served.chat(logit_bias={"25": -100}, seed=1, **fields).status_code == 200
    assert dict(served.request.sampling.entries) == fields | {
        "logit_bias": ((25, -100.0),),
        "bad_words": ("x",),
        "allowed_token_ids": (3,),
        "seed": 1,
    }


def test_null_means_the_default(served):
    names = [field.name for field in CHAT_FIELDS if field.name != "messages"]
    assert served.chat(**dict.fromkeys(names)).status_code == 200
    by_null = served.request
    assert served.chat().status_code == 200
    assert (by_null.sampling, by_null.stop, by_null.n) == (
        served.request.sampling,
        served.request.stop,
        served.request.n,
    )


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
}


@pytest.mark.parametrize("endpoint", TABLES)
def test_implemented_fields_reach_the_engine(served, endpoint):
    fields = SAMPLING | {
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "priority": -3,
        "cache_salt": "pepper",
        "user": "alice",
        "model": "acme/tiny-1",
    }
    assert getattr(served, endpoint)(**fields).status_code == 200
    request = served.request
    assert dict(request.sampling.entries) == SAMPLING
    assert (request.stop.max_tokens, request.stop.min_tokens) == (9, 2)
    assert (request.stop.strings, request.stop.token_ids) == (("a", "b"), (3, 4))
    assert (request.stop.ignore_eos, request.stop.include_stop_string) == (True, True)
    assert (request.priority, request.cache_salt, request.tenant) == (-3, "pepper", "alice")


def test_defaults_of_max_tokens_are_those_of_each_endpoint(served):
    for endpoint, expected in (("chat", 0), ("complete", 16), ("generate", 16)):
        getattr(served, endpoint)()
        assert served.request.stop.max_tokens == expected, endpoint


@pytest.mark.parametrize(("endpoint", "alias"), [("chat", "max_completion_tokens"), ("generate", "max_new_tokens")])
def test_the_other_name_of_max_tokens(served, endpoint, alias):
    call = getattr(served, endpoint)
    call(**{alias: 3})
    assert served.request.stop.max_tokens == 3
    assert call(**{alias: 3, "max_tokens": 3}).status_code == 200
    assert call(**{alias: 3, "max_tokens": 4}).json()["error"]["param"] == alias
    for bad in (0, 65):
        error = call(**{alias: bad}).json()["error"]
        assert error["param"] == alias
        assert alias in error["message"]


def test_stop_may_be_one_string(served):
    served.chat(stop="END")
    assert served.request.stop.strings == ("END",)


def test_roles_and_parts_become_what_templates_know(served):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": "", "tool_calls": [], "refusal": None},
    ]
    assert served.chat(messages=messages).status_code == 200
    assert served.request.prompt == ChatPrompt(
        (Message("system", "Be brief."), Message("user", "a\nb"), Message("assistant", ""))
    )


def test_the_prompts_four_spellings(served):
    for prompt, expected in [
        ("ab", [TextPrompt("ab")]),
        (["ab", "c"], [TextPrompt("ab"), TextPrompt("c")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2], [99]], [TokenPrompt((1, 2)), TokenPrompt((99,))]),
    ]:
        served.engine.requests.clear()
        assert served.complete(prompt=prompt).status_code == 200
        assert [request.prompt for request in served.engine.requests] == expected
        assert len({request.id for request in served.engine.requests}) == len(expected)


def test_labels_are_checked_and_the_successor_of_user_is_one(served):
    assert served.chat(metadata={"k": "v"}, safety_identifier="bob").status_code == 200
    assert served.request.tenant == "bob"
    served.chat(safety_identifier="bob", user="alice")
    assert served.request.tenant == "alice"
    assert "x-ignored-params" not in served.chat(safety_identifier="bob").headers, "it is used"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]}, "messages.0.content.0.x"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "function", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "a" * 257}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": "Hi", "nmae": "al"}]}, "messages.0.nmae"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 4097}]}, "messages"),
        ({"model": 3}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 65}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [100]}, "stop_token_ids.0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"user": "u" * 257}, "user"),
        ({"safety_identifier": "u" * 257}, "safety_identifier"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
)
def test_a_wrong_chat_field_is_named(served, fields, param):
    response = served.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [5, 100]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [[5], [5, -1]]}, "prompt.1.1"),
        ({"prompt": [1] * 64}, "prompt"),
        ({"prompt": [[1], [1] * 64]}, "prompt.1"),
        ({"prompt": "x" * 4097}, "prompt"),
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"prompt": ["x"] * 4, "n": 4}, "n"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"prompt": ["x"] * 4, "best_of": 4}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
def test_a_wrong_completion_field_is_named(served, fields, param):
    response = served.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert param in error["message"]
    assert not served.engine.requests


@pytest.mark.parametrize(("best_of", "candidates"), [(2, 2), (5, 5), (None, 2)])
def test_best_of_says_how_many_are_generated_of_which_n_are_answered(served, best_of, candidates):
    served.engine.script = always(stop(0), stop(1), finished())
    assert len(served.complete(best_of=best_of, n=2).json()["choices"]) == 2
    assert (served.request.n, served.request.candidates) == (2, candidates)


def test_best_of_equal_to_n_may_be_streamed(served):
    assert served.complete(best_of=1, stream=True).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": ["a"]}, "prompt.0"), ({"prompt": None}, "prompt"), ({"n": 2}, "n"), ({"logprobs": 0}, "logprobs")],
)
def test_a_wrong_generate_field_is_named(served, fields, param):
    response = served.generate(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("prompt_tokens", [63, 1])
def test_a_prompt_of_ids_may_fill_all_of_the_context_but_one(served, prompt_tokens):
    assert served.complete(prompt=[1] * prompt_tokens).status_code == 200
