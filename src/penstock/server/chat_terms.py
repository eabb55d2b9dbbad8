"""What a request says of a conversation beside how it is sampled: the prompt, its tools, and how the answer is read.

Decides what those fields of chat completions come to, for every endpoint and the library, and the form of an answer
that must call. Knows neither templates nor HTTP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, EngineRequest, TemplateValue
from penstock.contract.tools import ReasoningUse, ReplyRules, Tool
from penstock.server.conversation import read_conversation
from penstock.server.fields import BOOLEAN, OBJECT, Field, join_path
from penstock.server.parameters import check_prompt_chars
from penstock.server.reasoning import EFFORT, Variables, effort_variables
from penstock.server.strict_json import JsonObject, printable
from penstock.server.tools import TOOL_CHOICE, TOOLS, ToolOffer, enforced_schema, read_tools

__all__ = ["ANSWER_FIELDS", "PROMPT_FIELDS", "ChatTerms", "read_chat_terms"]

PROMPT_FIELDS = (
    Field("tools", TOOLS, "Functions that the model may call."),
    Field("add_generation_prompt", BOOLEAN, "End the prompt with the opening of the assistant's turn; by default so."),
    Field("continue_final_message", BOOLEAN, "Go on writing the last message, which must be the assistant's."),
    Field("chat_template_kwargs", OBJECT, "Variables that the model's chat template reads, such as enable_thinking."),
)
ANSWER_FIELDS = (
    Field(
        "tool_choice",
        TOOL_CHOICE,
        "none: no tool is shown. auto: the model decides. required, or a function: it must call.",
    ),
    Field("parallel_tool_calls", BOOLEAN, "Whether one answer may hold several calls; if not, it ends with the first."),
    Field("include_reasoning", BOOLEAN, "Whether to return what the model thinks before it answers."),
    Field(
        "reasoning_effort",
        EFFORT,
        "How much the model thinks, where its chat template has a variable for that: a level, or a switch, which knows"
        " none and the rest.",
    ),
)


@dataclass(frozen=True, slots=True)
class ChatTerms:
    """A conversation to be answered."""

    prompt: ChatPrompt
    reply: ReplyRules
    offer: ToolOffer

    def applied(self, ask: EngineRequest) -> EngineRequest:
        """`ask` on these terms; its own prompt and rules are left behind.

        Raises:
            InvalidParameter: it asks for another form than that of the calls that its answer must hold.
        """
        return replace(ask, prompt=self.prompt, reply=self.reply, grammar=self._grammar(ask.grammar))

    def _grammar(self, wanted: Grammar | None) -> Grammar | None:
        """The form of the answer: what the caller asked for, or that of the calls that it must hold."""
        if not self.offer.forced:
            return wanted
        if wanted is not None:
            message = (
                "tool_choice asks for a call, and response_format (or its like) for another answer: give one of them."
            )
            raise InvalidParameter("tool_choice", message)
        return Grammar(GrammarKind.JSON, json.dumps(enforced_schema(self.offer)))

    @classmethod
    def made(cls, prompt: ChatPrompt, offer: ToolOffer, reasoning: ReasoningUse) -> ChatTerms:
        """The terms of a prompt whose tools are those offered."""
        return cls(prompt, ReplyRules(reasoning, offer.use, offer.name, offer.parallel), offer)


def read_chat_terms(given: JsonObject, card: ModelCard, limits: RequestLimits) -> ChatTerms:
    """The terms in a request that has been checked field by field.

    Args:
        given: `messages`, and of `PROMPT_FIELDS` and `ANSWER_FIELDS` those that were sent.
        card: the served model.
        limits: on requests.

    Raises:
        InvalidParameter: they cannot be served; names the field.
    """
    offer = read_tools(given, limits)
    reasoning = ReasoningUse.SPLIT if given.get("include_reasoning", True) else ReasoningUse.HIDDEN
    return ChatTerms.made(_chat_prompt(given, offer.tools, card, limits), offer, reasoning)


def _chat_prompt(given: JsonObject, tools: tuple[Tool, ...], card: ModelCard, limits: RequestLimits) -> ChatPrompt:
    messages = read_conversation(given, limits)
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
