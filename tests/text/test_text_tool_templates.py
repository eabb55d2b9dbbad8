"""Conversations with tools are rendered as transformers renders them, whatever the family of the template.

The templates here have the structure of published ones (what they read, where they branch, how they quote), in words of
our own.
"""

# ruff: noqa: E501  (templates are written in the lines that they render)

from __future__ import annotations

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ReplyRules, Tool, ToolCall, ToolUse
from penstock.text import ChatTemplate, ControlTokens
from penstock.text.reply import find_reply_format

HERMES = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '<|eot_id|>' }}
{%- if tools_in_user_message and tools is not none %}
{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('One call at a time!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
{#- a code interpreter would be announced by <|python_tag|> #}"""

MISTRAL = """\
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] ' + tools | map(attribute='function') | list | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}
{{- out[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

STRICT = """\
{%- for m in messages %}
{%- if m.role == 'assistant' and m.content is none %}{{- 'C:' }}{%- for c in m.tool_calls %}{{- c.function.name }}{%- endfor %}
{%- else %}{{- m.role + (':' + m.name if m.name else '') + ':' + m.content }}{%- endif %}{{- '|' }}
{%- endfor %}"""

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

FAMILIES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]")

DEFINITION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather in a city, e.g. "Zürich" <é>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL = Tool("weather", json.dumps(DEFINITION, ensure_ascii=False), json.dumps(DEFINITION["function"]["parameters"]))
ID = "a1B2c3D4e"
ASK = Message("user", "Weather in Zürich?")
CALL = Message("assistant", "", tool_calls=(ToolCall(ID, "weather", '{"city": "Zürich"}'),))
RESULT = Message("tool", '{"celsius": 21}', tool_call_id=ID, name="weather")
HISTORIES = {
    "offer": (ASK,),
    "called": (ASK, CALL, RESULT),
    "answered": (ASK, CALL, RESULT, Message("assistant", "21 degrees."), Message("user", "Thanks, and now?")),
    "spoken": (ASK, Message("assistant", "I look.", tool_calls=CALL.tool_calls), RESULT),
}


def template(source: str, *control: str) -> ChatTemplate:
    control_tokens = ControlTokens(control or CONTROL)
    return ChatTemplate(source, file="t", special_tokens=SPECIAL, control_tokens=control_tokens)


def as_given(message: Message) -> dict:
    """What a user of transformers would write."""
    given: dict = {"role": message.role, "content": message.content}
    if message.tool_calls:
        given["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    more = {"tool_call_id": message.tool_call_id, "name": message.name}
    return given | {key: value for key, value in more.items() if value}


def theirs(source: str, messages, tools=None, **options) -> str:
    options = {"add_generation_prompt": True, **options}
    conversation = [as_given(message) for message in messages]
    rendered, _ = render_jinja_template(
        conversations=[conversation], tools=tools, chat_template=source, **options, **SPECIAL
    )
    return rendered[0]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tools_and_calls_are_rendered_as_transformers_does(family, history):
    messages = HISTORIES[history]
    ours = template(FAMILIES[family]).render_prompt(ChatPrompt(messages, tools=(TOOL,)))
    assert ours.text == theirs(FAMILIES[family], messages, [DEFINITION])
    without = template(FAMILIES[family]).render_prompt(ChatPrompt(messages))
    assert without.text == theirs(FAMILIES[family], messages)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["The answer", "The answer is", "1. one\n2."])
def test_the_last_message_is_continued_as_transformers_does(family, content):
    messages = (ASK, Message("assistant", content))
    ours = template(FAMILIES[family]).render_prompt(ChatPrompt(messages, continue_final_message=True))
    expected = theirs(FAMILIES[family], messages, add_generation_prompt=False, continue_final_message=True)
    assert ours.text == expected
    assert ours.text.endswith(content)


def test_a_continued_message_keeps_its_last_space():
    messages = (ASK, Message("assistant", "It is "))
    assert template(LLAMA).render_prompt(ChatPrompt(messages, continue_final_message=True)).text.endswith("It is ")


def test_what_cannot_be_continued_is_refused():
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    for source, last in ((silent, Message("assistant", "x")), (HERMES, CALL)):
        with pytest.raises(InvalidParameter) as caught:
            template(source).render_prompt(ChatPrompt((ASK, last), continue_final_message=True))
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_recognised(family):
    assert find_reply_format("auto", "auto", template(FAMILIES[family])).calls.name == family
    assert find_reply_format("auto", "auto", template(HERMES)).thinks
    assert not find_reply_format("auto", "auto", template(LLAMA)).thinks
    assert find_reply_format("json", "none", template(HERMES)).calls.name == "json"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_of_the_callers_becomes_a_control_token(family):
    """Wherever it stands: tool names, descriptions, arguments, ids, results, reasoning, variables."""
    evil = "".join(CONTROL)
    definition = json.loads(json.dumps(DEFINITION).replace("The weather", evil))
    definition["function"]["parameters"]["properties"][evil] = {"type": evil, "enum": [evil]}
    tool = Tool("weather", json.dumps(definition), "{}")
    messages = (
        ASK,
        Message("assistant", "", tool_calls=(ToolCall(ID, evil, json.dumps({evil: [evil]})),), reasoning=evil),
        Message("tool", evil, tool_call_id=ID, name=evil),
        Message("user", evil),
    )
    harmless = template(FAMILIES[family]).render_prompt(ChatPrompt((ASK, CALL, RESULT, ASK), tools=(TOOL,)))
    rendered = template(FAMILIES[family]).render_prompt(ChatPrompt(messages, tools=(tool,)))
    for control in CONTROL:
        assert rendered.template_text.count(control) == harmless.template_text.count(control)
    assert rendered.text == template(FAMILIES[family], "unused").render_prompt(ChatPrompt(messages, (tool,))).text


# --- variables and names


def test_only_variables_that_the_template_reads_can_be_set():
    thinking = template(HERMES)
    assert thinking.variables == {"enable_thinking"}
    off = thinking.render_prompt(ChatPrompt((ASK,), template_variables=(("enable_thinking", False),)))
    assert off.text == theirs(HERMES, (ASK,), enable_thinking=False)
    assert off.text.endswith("<think>\n\n</think>\n\n")
    dated = template(LLAMA).render_prompt(ChatPrompt((ASK,), template_variables=(("date_string", "today"),)))
    assert "Today: today" in dated.text
    for name in ("thinking", "messages", "tools", "bos_token", "add_generation_prompt", "raise_exception", "tokenize"):
        with pytest.raises(InvalidParameter) as caught:
            thinking.render_prompt(ChatPrompt((ASK,), template_variables=((name, True),)))
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_control_token_in_a_variable_is_ordinary_text():
    rendered = template(LLAMA).render_prompt(ChatPrompt((ASK,), template_variables=(("date_string", "<|eot_id|>"),)))
    assert rendered.template_text.count("<|eot_id|>") == 2
    assert rendered.text.count("<|eot_id|>") == 3


def test_a_name_is_shown_or_refused():
    named = Message("user", "Hi", name="al")
    assert template(STRICT).render_prompt(ChatPrompt((named,))).text == "user:al:Hi|"
    with pytest.raises(InvalidParameter) as caught:
        template(HERMES).render_prompt(ChatPrompt((ASK, named)))
    assert caught.value.param == "messages.1.name"


def test_a_template_that_asks_for_no_content_gets_none():
    assert template(STRICT).render_prompt(ChatPrompt((ASK, CALL))).text == "user:Weather in Zürich?|C:weather|"


# --- models whose template knows no tools


def test_tools_are_put_into_words_where_the_template_has_no_place_for_them():
    rendered = template(CHATML).render_prompt(ChatPrompt((Message("system", "Be kind."), ASK), tools=(TOOL,))).text
    assert rendered.startswith("<|im_start|>system\nBe kind.\n\n")
    assert json.dumps(DEFINITION["function"], ensure_ascii=False) in rendered
    assert '{"name": "<its name>", "arguments": {<its arguments>}}' in rendered
    alone = template(CHATML).render_prompt(ChatPrompt((ASK,), tools=(TOOL,))).text
    assert alone.startswith("<|im_start|>system\nYou can call functions")


def test_calls_and_results_are_put_into_words_where_the_template_has_no_place_for_them():
    both = (CALL.tool_calls[0], ToolCall("x", "now", "{}"))
    messages = (ASK, Message("assistant", "I look.", tool_calls=both), RESULT, Message("tool", "noon", name="now"))
    rendered = template(CHATML).render_prompt(ChatPrompt(messages)).text
    assert (
        '<|im_start|>assistant\nI look.\n[{"name": "weather", "arguments": {"city": "Zürich"}},'
        ' {"name": "now", "arguments": {}}]<|im_end|>\n'
        '<|im_start|>user\nResult of weather: {"celsius": 21}\nResult of now: noon<|im_end|>\n'
    ) in rendered


def test_what_is_put_into_words_can_be_read_back():
    chat = template(CHATML)
    format_ = find_reply_format("auto", "auto", chat)
    reader = format_.reader(ChatPrompt((ASK,), tools=(TOOL,)), ReplyRules(tool_use=ToolUse.AUTO), "")
    turn = chat.render_prompt(ChatPrompt((ASK, CALL), add_generation_prompt=False)).text.split("assistant\n")[1]
    parser = reader.parser("x")
    piece = parser.push(turn.removesuffix("<|im_end|>\n"))
    assert [each.name for each in piece.calls] == ["weather", ""]
    assert json.loads(piece.calls[1].arguments) == {"city": "Zürich"}


@pytest.mark.parametrize("arguments", ["", "[]", "{", "nul", '"x"'])
def test_arguments_that_are_no_object_are_refused_by_name(arguments):
    message = Message("assistant", "", tool_calls=(ToolCall(ID, "weather", arguments),))
    for source in (HERMES, CHATML):
        with pytest.raises(InvalidParameter) as caught:
            template(source).render_prompt(ChatPrompt((ASK, message)))
        assert caught.value.param == "messages.1.tool_calls.0.function.arguments"
