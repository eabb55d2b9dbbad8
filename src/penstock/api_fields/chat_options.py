"""The conversation options of a request, apart from sampling: the prompt, its tools, and how the answer is parsed.

Decides what these chat completions fields mean, for every endpoint and for the Python API, and the grammar of an answer
that must call a tool, or must have a given form unless it calls one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.api_fields.conversation import read_conversation
from penstock.api_fields.fields import BOOLEAN, OBJECT, Field, join_path
from penstock.api_fields.reasoning import EFFORT, Variables, effort_variables
from penstock.api_fields.request_options import check_prompt_chars, sampling_fields
from penstock.api_fields.strict_json import JsonObject, printable
from penstock.api_fields.tools import TOOL_CHOICE, TOOLS, ToolOffer, enforced_schema, read_tools, schema_beside_calls
from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, EngineRequest, Message, TemplateValue
from penstock.contract.tools import ReasoningUse, ReplyRules, Tool, ToolUse

__all__ = ["ANSWER_FIELDS", "CHAT_SAMPLING_FIELDS", "PROMPT_FIELDS", "ChatOptions", "read_chat_options"]

PROMPT_FIELDS = (
    Field("tools", TOOLS, "Functions that the model may call."),
    Field(
        "add_generation_prompt",
        BOOLEAN,
        "End the prompt with the opening of the assistant's turn; true by default, unless continue_final_message.",
    ),
    Field("continue_final_message", BOOLEAN, "Continue the last message, which must be the assistant's."),
    Field("chat_template_kwargs", OBJECT, "Set variables of the model's chat template, such as enable_thinking."),
)
ANSWER_FIELDS = (
    Field(
        "tool_choice",
        TOOL_CHOICE,
        "none: the model is shown no tools. auto: it decides. required: it must call one. A function: it must call it.",
    ),
    Field("parallel_tool_calls", BOOLEAN, "Allow several calls in one answer; if false, it ends with the first."),
    Field("include_reasoning", BOOLEAN, "Return what the model thinks before it answers; true by default."),
    Field(
        "reasoning_effort",
        EFFORT,
        "How much the model thinks, if its chat template has a variable for it: a level, or a switch, which tells only"
        " none from the rest.",
    ),
)

CHAT_SAMPLING_FIELDS = sampling_fields("best_of", "logprobs")
"""The sampling parameters that chat completions accept unchanged; `logprobs` is spelled differently there."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """A conversation, and how to answer it."""

    prompt: ChatPrompt
    reply: ReplyRules
    offer: ToolOffer

    def applied(self, request: EngineRequest) -> EngineRequest:
        """`request` with this conversation's prompt, reply rules and, if needed, grammar.

        Raises:
            InvalidParameter: the request asks for a form that cannot be combined with tool calls.
        """
        wanted = request.grammar
        if self.offer.forced:
            if wanted is not None:
                message = (
                    "tool_choice asks for a call, and response_format (or its like) for another answer: give one of"
                    " them."
                )
                raise InvalidParameter("tool_choice", message)
            return self._held_to(request, enforced_schema(self.offer))
        if wanted is None or wanted.kind is not GrammarKind.JSON or self.offer.use is ToolUse.NONE:
            return replace(request, prompt=self.prompt, reply=self.reply)
        try:
            schema = json.loads(wanted.source)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter("structured_outputs.json", "must be a JSON schema, as JSON text") from error
        request = self._held_to(request, schema_beside_calls(schema, self.offer))
        return replace(request, reply=replace(self.reply, form=wanted))

    def _held_to(self, request: EngineRequest, schema: JsonObject) -> EngineRequest:
        grammar = Grammar(GrammarKind.JSON, json.dumps(schema))
        return replace(request, prompt=self.prompt, reply=self.reply, grammar=grammar)

    @classmethod
    def made(cls, prompt: ChatPrompt, offer: ToolOffer, reasoning: ReasoningUse) -> ChatOptions:
        """The options for a prompt that was built with the tools in `offer`."""
        return cls(prompt, ReplyRules(reasoning, offer.use, offer.name, offer.parallel), offer)


def read_chat_options(given: JsonObject, card: ModelCard, limits: RequestLimits) -> ChatOptions:
    """The options in a request whose fields have already been checked individually.

    Args:
        given: `messages`, and the fields of `PROMPT_FIELDS` and `ANSWER_FIELDS` that the body has.
        card: the served model.
        limits: limits on requests.

    Raises:
        InvalidParameter: an option cannot be served; names the field.
    """
    offer = read_tools(given, limits)
    reasoning = ReasoningUse.SPLIT if given.get("include_reasoning", True) else ReasoningUse.HIDDEN
    return ChatOptions.made(_chat_prompt(given, offer.tools, card, limits), offer, reasoning)


def _chat_prompt(given: JsonObject, tools: tuple[Tool, ...], card: ModelCard, limits: RequestLimits) -> ChatPrompt:
    messages = read_conversation(given, limits)
    _check_names(messages, card)
    continues = given.get("continue_final_message", False)
    if continues and given.get("add_generation_prompt", False):
        message = "continue_final_message and add_generation_prompt contradict each other: give one of them."
        raise InvalidParameter("continue_final_message", message)
    if continues and messages[-1].role != "assistant":
        message = "continue_final_message needs a last message of role 'assistant'."
        raise InvalidParameter("continue_final_message", message)
    prompt = ChatPrompt(
        messages,
        tools=tools,
        add_generation_prompt=given.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        template_variables=_template_variables(given, card, limits),
    )
    check_prompt_chars(prompt.num_chars, "messages", card, limits)
    return prompt


def _check_names(messages: Sequence[Message], card: ModelCard) -> None:
    for index, message in enumerate(messages):
        if message.name and message.role != "tool" and message.role not in card.named_roles:
            where = f"messages.{index}.name"
            reason = f"{where}: this model's chat template has no place for names of role {message.role!r}."
            raise InvalidParameter(where, reason, code="unsupported_parameter")


def _template_variables(
    given: JsonObject, card: ModelCard, limits: RequestLimits
) -> tuple[tuple[str, TemplateValue], ...]:
    variables: Variables = given.get("chat_template_kwargs", {})
    if len(variables) > limits.max_template_variables:
        message = f"chat_template_kwargs may set at most {limits.max_template_variables} variables."
        raise InvalidParameter("chat_template_kwargs", message)
    for name, value in variables.items():
        where = join_path("chat_template_kwargs", printable(name))
        if not isinstance(value, bool | int | float | str):
            raise InvalidParameter(where, f"{where} must be a boolean, a number or a string.", code="invalid_type")
        if isinstance(value, str) and len(value) > limits.max_name_chars:
            raise InvalidParameter(where, f"{where} may have at most {limits.max_name_chars} characters.")
    return tuple((variables | _effort(given, variables, card)).items())


def _effort(given: JsonObject, variables: Variables, card: ModelCard) -> Variables:
    if "reasoning_effort" not in given:
        return {}
    chosen = effort_variables(given["reasoning_effort"], card, "reasoning_effort")
    for name, value in chosen.items():
        if variables.get(name, value) != value:
            message = f"reasoning_effort and chat_template_kwargs.{name} contradict each other: give one of them."
            raise InvalidParameter("reasoning_effort", message)
    return chosen
