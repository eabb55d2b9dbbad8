"""`POST /v1/chat/completions`: from a body to an `Exchange`, and from outputs to OpenAI's chat objects.

Decides the endpoint's fields and defaults (the rest of the context as `max_tokens`). Knows neither
templates nor HTTP.
"""

from __future__ import annotations

import json
from dataclasses import replace

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, TokenPiece, Usage
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import Ask, ChatPrompt, TemplateValue
from penstock.contract.tools import ReasoningUse, ReplyRules, Tool, ToolUse
from penstock.server.answers import chat_usage_object, finite_logprob
from penstock.server.conversation import MESSAGES, read_conversation
from penstock.server.exchange import Exchange
from penstock.server.fields import (
    BOOLEAN,
    INTEGER,
    LABELS,
    NEUTRAL_CHAT,
    OBJECT,
    TEXT,
    Field,
    join_path,
    read_fields,
)
from penstock.server.parameters import (
    COMMON_FIELDS,
    STREAM_OPTIONS,
    check_model,
    check_prompt_chars,
    check_stream_options,
    max_tokens_alias,
    read_terms,
    sampling_fields,
)
from penstock.server.prompt_logprobs import read_prompt_logprobs
from penstock.server.response_format import RESPONSE_FORMAT, response_format_alias
from penstock.server.strict_json import JsonObject, printable
from penstock.server.timings import TIMINGS
from penstock.server.tools import (
    TOOL_CHOICE,
    TOOLS,
    ToolOffer,
    call_objects,
    enforced_schema,
    piece_object,
    read_tools,
)

__all__ = ["CHAT_FIELDS", "ChatShape", "parse_chat"]

CHAT_FIELDS = (
    Field("messages", MESSAGES, "The conversation. Text parts of one message are joined by line breaks."),
    Field("max_completion_tokens", INTEGER, "Most tokens to generate; by default the rest of the model's context."),
    Field("logprobs", BOOLEAN, "Whether to return the log probability of each generated token."),
    Field("top_logprobs", INTEGER, "How many of the likeliest tokens to return in each place; needs logprobs: true."),
    STREAM_OPTIONS,
    Field("tools", TOOLS, "Functions that the model may call."),
    Field(
        "tool_choice",
        TOOL_CHOICE,
        "none: no tool is shown. auto: the model decides. required, or a function: it must call.",
    ),
    Field("parallel_tool_calls", BOOLEAN, "Whether one answer may hold several calls; if not, it ends with the first."),
    Field("include_reasoning", BOOLEAN, "Whether to return what the model thinks before it answers."),
    Field("add_generation_prompt", BOOLEAN, "End the prompt with the opening of the assistant's turn; by default so."),
    Field("continue_final_message", BOOLEAN, "Go on writing the last message, which must be the assistant's."),
    Field("chat_template_kwargs", OBJECT, "Variables that the model's chat template reads, such as enable_thinking."),
    TIMINGS,
    RESPONSE_FORMAT,
    Field("safety_identifier", TEXT, "As user; user wins where both are given."),
    Field("metadata", LABELS, "Labels of the caller's own. Checked, then forgotten: this server stores no requests."),
    *COMMON_FIELDS,
    *sampling_fields("best_of", "logprobs"),
)


def parse_chat(body: JsonObject, exchange_id: str, card: ModelCard, limits: RequestLimits) -> Exchange:
    """The exchange that `body` asks for.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, CHAT_FIELDS, NEUTRAL_CHAT)
    if not card.has_chat_template:
        message = "The served model has no chat template; use /v1/completions."
        raise InvalidParameter("messages", message, code="unsupported_model")
    aliases = max_tokens_alias(given, "max_completion_tokens") | {"logprobs": "top_logprobs"}
    aliases |= response_format_alias(given)
    given["logprobs"] = _num_logprobs(given)
    terms = read_terms(given, {"max_tokens": None}, aliases, card, limits)
    stream = given.get("stream", False)
    prompt_logprobs = read_prompt_logprobs(terms.params, stream=stream, in_choices=False)
    offer = read_tools(given, limits)
    if offer.use in (ToolUse.REQUIRED, ToolUse.NAMED):
        aliases |= {"structured_outputs": "tools"}
    ask = terms.ask(exchange_id, _chat_prompt(given, offer.tools, card, limits))
    return Exchange(
        id=exchange_id,
        asks=(replace(ask, reply=_reply_rules(given, offer), grammar=_grammar(ask, offer)),),
        stream=stream,
        include_usage=check_stream_options(given),
        timings=given.get("timings", False),
        prompt_logprobs=prompt_logprobs,
        aliases=aliases,
    )


def _num_logprobs(given: JsonObject) -> int | None:
    """How many alternatives to each token are wanted, if log probabilities are wanted at all."""
    top: int = given.pop("top_logprobs", 0)
    if given.get("logprobs", False):
        return top
    if top:
        raise InvalidParameter("top_logprobs", "top_logprobs is only allowed together with logprobs: true.")
    return None


def _grammar(ask: Ask, offer: ToolOffer) -> Grammar | None:
    """The form of the answer: what the caller asked for, or that of the calls that it must hold."""
    if offer.use not in (ToolUse.REQUIRED, ToolUse.NAMED):
        return ask.grammar
    if ask.grammar is not None:
        message = "tool_choice asks for a call and response_format for another answer: give one of them."
        raise InvalidParameter("tool_choice", message)
    return Grammar(GrammarKind.JSON, json.dumps(enforced_schema(offer)))


def _reply_rules(given: JsonObject, offer: ToolOffer) -> ReplyRules:
    reasoning = ReasoningUse.SPLIT if given.get("include_reasoning", True) else ReasoningUse.HIDDEN
    return ReplyRules(reasoning, offer.use, offer.name, offer.parallel)


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
        template_variables=_template_variables(given.get("chat_template_kwargs", {}), limits),
    )
    check_prompt_chars(prompt.num_chars, "messages", card, limits)
    return prompt


def _template_variables(given: JsonObject, limits: RequestLimits) -> tuple[tuple[str, TemplateValue], ...]:
    if len(given) > limits.max_template_variables:
        message = f"chat_template_kwargs may set at most {limits.max_template_variables} variables."
        raise InvalidParameter("chat_template_kwargs", message)
    for name, value in given.items():
        where = join_path("chat_template_kwargs", printable(name))
        if not isinstance(value, bool | int | float | str):
            raise InvalidParameter(where, f"{where} must be a boolean, a number or a string.", code="invalid_type")
        if isinstance(value, str) and len(value) > limits.max_name_chars:
            raise InvalidParameter(where, f"{where} may have at most {limits.max_name_chars} characters.")
    return tuple(given.items())


def _message_object(delta: ChoiceDelta) -> JsonObject:
    """A whole answer as a message; as in OpenAI's, an answer that only calls has no content."""
    calls = call_objects(delta.calls)
    message: JsonObject = {"role": "assistant", "content": delta.text if delta.text or not calls else None}
    message["refusal"] = None
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


class ChatShape:
    """OpenAI's `chat.completion` and `chat.completion.chunk`. One instance an answer."""

    def __init__(self, exchange_id: str, model: str, created: int, logprobs: bool) -> None:
        self._head = {"id": exchange_id, "created": created, "model": model, "system_fingerprint": None}
        self._logprobs = logprobs

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """A `chat.completion`."""
        objects = [
            {
                "index": delta.choice,
                "message": _message_object(delta),
                "logprobs": self._logprobs_object(delta.tokens),
                "finish_reason": finished.reason.value,
                "stop_reason": finished.stop,
            }
            for delta, finished in choices
        ]
        return {**self._head, "object": "chat.completion", "choices": objects, "usage": chat_usage_object(usage)}

    def opening(self, index: int) -> JsonObject:
        """The chunk with the role; sent together with the choice's first token."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with text, reasoning or a piece of a call."""
        said: JsonObject = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.text or (self._logprobs and delta.tokens and not said):
            said["content"] = delta.text
        if delta.calls:
            said["tool_calls"] = [piece_object(piece) for piece in delta.calls]
        return self._chunk(delta.choice, said, logprobs=self._logprobs_object(delta.tokens)) if said else None

    def ending(self, finished: ChoiceFinished) -> JsonObject:
        """The chunk with the finish reason."""
        chunk = self._chunk(finished.choice, {}, finish_reason=finished.reason.value)
        chunk["choices"][0]["stop_reason"] = finished.stop
        return chunk

    def usage(self, usage: Usage) -> JsonObject:
        """The chunk with the usage, which belongs to no choice."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": chat_usage_object(usage)}

    def _chunk(
        self, index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs_object(self, tokens: tuple[TokenPiece, ...]) -> JsonObject | None:
        if not self._logprobs:
            return None
        content = [
            {
                **_token_object(token),
                "top_logprobs": [_token_object(other) for other in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _token_object(token: TokenPiece) -> JsonObject:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.bytes)}
