"""What a caller wants from the engine, in text (`EngineRequest`), and what the scheduler is given (`SequenceRequest`).

An `EngineRequest` becomes one `SequenceRequest` per choice once the engine has rendered, tokenised and resolved it.
Neither ever changes afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.grammar import Grammar
from penstock.contract.sampling import NEUTRAL, SamplingSpec
from penstock.contract.thinking import ThinkingBudget
from penstock.contract.tools import PLAIN_REPLY, ReplyRules, Tool, ToolCall

__all__ = [
    "AnswerCaching",
    "ChatPrompt",
    "EngineRequest",
    "Message",
    "Prompt",
    "SequenceRequest",
    "StopRules",
    "TemplateValue",
    "TextPrompt",
    "TokenPrompt",
]

TemplateValue = bool | int | float | str
"""What a caller may set a variable of the model's chat template to."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is whatever the model's template knows (system, user, assistant, ...).

    Attributes:
        tool_calls: the calls that an assistant made in this turn.
        tool_call_id: for a tool's turn, the call that it answers; else "".
        name: who speaks, if the template has a place for it; for a tool's turn, the function. "" for none.
        reasoning: what an assistant thought before this turn; templates show what the model was trained to see.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text. Special tokens written in it are honoured: the caller is writing the model's own format."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are; nothing is added in front."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's chat template. Special tokens inside `content` are plain text.

    Attributes:
        tools: the functions shown to the model.
        add_generation_prompt: end with the opening of an assistant's turn.
        continue_final_message: leave the last message open, so that the model goes on writing it; excludes
            `add_generation_prompt`.
        template_variables: (name, value) for variables that the template declares.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: tuple[tuple[str, TemplateValue], ...] = ()

    @property
    def num_chars(self) -> int:
        """Characters of the conversation and its tools, as limits on a prompt's length count them."""
        spoken = sum(len(message.content) + len(message.reasoning) for message in self.messages)
        called = sum(len(call.arguments) for message in self.messages for call in message.tool_calls)
        return spoken + called + sum(len(tool.definition) for tool in self.tools)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends. The core reads ids and limits; the text side reads strings.

    Attributes:
        max_tokens: most tokens to generate, at least 1; in an `EngineRequest` 0 stands for "the rest of the context",
            which never reaches the core.
        min_tokens: no stop before this many generated tokens (length limits still hold).
        token_ids: ids that end the sequence, besides the model's own end-of-sequence ids.
        strings: texts that end the sequence; the match and all after it are cut from the output.
        ignore_eos: the model's own end-of-sequence ids do not end the sequence.
        include_stop_string: keep the matched string in the output.
        repetition: shortest pattern, longest pattern and count of copies that end the sequence as a loop; () for none.
    """

    max_tokens: int = 0
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    repetition: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerCaching:
    """What the answer cache, if there is one, may do for a request.

    Attributes:
        most_age: an answer that is older than this many seconds is computed anew; below 0, every answer is.
        keep: whether the answer may be kept.
    """

    most_age: float = float("inf")
    keep: bool = True


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One caller's request, in the caller's terms: a prompt, `n` choices, how to sample, when to stop.

    Attributes:
        id: unique among live requests; chosen by the caller's side, used for abort and logs.
        n: how many choices to answer with.
        best_of: how many choices to generate, of which the `n` best are the answer; None generates `n`.
        priority: lower runs earlier under the `priority` policy; ignored, and required to be 0, under `fcfs`.
        tenant: the tenant that it belongs to; under the `fair` policy, tenants get shares.
        share: how much of the machine its tenant gets, relative to a tenant with a share of 1.
        cache_salt: prompts share cached KV only with prompts of the same salt.
        echo: the outputs begin with the prompt (`PromptTokens`); with `prompt_logprobs` they always do.
        running_usage: the outputs begin with the prompt even if the answer does not show it, so that its tokens can be
            counted as the answer grows.
        reply: how the answer to a conversation is parsed into text, reasoning and calls.
        grammar: the form that each choice must have; None for free text.
        embedding: what vector to answer with; then nothing is generated, and `n`, `sampling`, `stop`, `echo`, `reply`
            and `grammar` keep their defaults. None for text.
        thinking_token_budget: most tokens of reasoning before the answer; None for no separate limit.
        drawn_seed: the seed of random sampling if the request names none; None to have one drawn.
        max_seconds: how long its caller allows the whole request to take; 0 for any time. The engine refuses a request
            that could not begin by then; the reader of the outputs ends one that takes longer.
        most_prompt_tokens: a longer prompt is cut to its first so many tokens; these include all that the tokenizer
            puts around a text, which is kept. 0 cuts nothing.
        adapter: the name of the adapter to compute it with, beside the model; "" for the model alone.
        certified: the answer comes with its certificate.
        answer_caching: what the answer cache may do for it.
    """

    id: str
    prompt: Prompt
    n: int = 1
    sampling: SamplingSpec = NEUTRAL
    stop: StopRules = StopRules()
    priority: int = 0
    tenant: str = ""
    share: float = 1.0
    cache_salt: str = ""
    echo: bool = False
    reply: ReplyRules = PLAIN_REPLY
    grammar: Grammar | None = None
    embedding: EmbeddingSpec | None = None
    most_prompt_tokens: int = 0
    best_of: int | None = None
    thinking_token_budget: int | None = None
    running_usage: bool = False
    drawn_seed: int | None = None
    max_seconds: float = 0.0
    adapter: str = ""
    certified: bool = False
    answer_caching: AnswerCaching = AnswerCaching()

    @property
    def candidates(self) -> int:
        """How many choices are generated."""
        return self.n if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate, or to embed, fully resolved: what the scheduler is given.

    Attributes:
        id: unique among live sequences (`<request id>/<choice>`).
        prompt: token ids, at least one.
        choice: index of this choice in its request; part of the randomness key.
        sampling: passed on to the runner unread; carries an explicit seed whenever sampling is random.
        stop: resolved rules: `max_tokens` >= 1 and `token_ids` already holding the model's end-of-sequence ids unless
            `ignore_eos`. For a sequence that is embedded, `max_tokens` is 0.
        tenant, share: as in `EngineRequest`.
        fresh_prompt: compute every position, whatever is cached, because the scores or states of all are wanted.
        arrival: seconds on the engine's clock; ordering between equal arrivals is submission order.
        embedding: the vector that is wanted in place of tokens: the sequence ends when its prompt is computed, and with
            `Pooling.MEAN` every position of it must be (`fresh_prompt`). None if tokens are wanted.
        thinking: how much reasoning it may hold; None for any.
        adapter: the name of its adapter; "" for none.
        adapter_digest: identifies the contents of the adapter, so that KV blocks are shared under the same one only.
    """

    id: str
    prompt: tuple[int, ...]
    choice: int = 0
    sampling: SamplingSpec = NEUTRAL
    stop: StopRules = StopRules()
    priority: int = 0
    tenant: str = ""
    share: float = 1.0
    cache_salt: str = ""
    arrival: float = 0.0
    fresh_prompt: bool = False
    grammar: Grammar | None = None
    embedding: EmbeddingSpec | None = None
    thinking: ThinkingBudget | None = None
    adapter: str = ""
    adapter_digest: str = ""
