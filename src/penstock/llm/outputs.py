"""The results that the library returns, built up from the engine's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.contract.embedding import vector_floats
from penstock.contract.errors import EngineFault
from penstock.contract.events import (
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    FinishReason,
    Output,
    PromptTokens,
    RequestFailed,
    RequestFinished,
    TokenPiece,
    Usage,
)
from penstock.contract.tools import CallPiece, ToolCall, made_calls
from penstock.engine import ResolvedRequest
from penstock.llm.embeddings import EmbeddingOutput, EmbeddingRequestOutput

__all__ = ["Answer", "CompletionOutput", "Logprob", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token under the distribution that `logprobs_mode` names, and the token as text.

    Attributes:
        rank: the token's place among all tokens, the most likely first, from 1.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice, as far as it has been generated.

    Attributes:
        token_ids: the generated tokens, up to the cut of a stop string; an end-of-sequence id is included.
        cumulative_logprob: sum of the tokens' log probabilities; None unless `logprobs` were requested.
        logprobs: one `{token id: Logprob}` per token, the generated token first, then the requested alternatives; None
            unless requested.
        finish_reason: "stop", "length", "tool_calls", "repetition", "abort" or "error"; None while unfinished.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end of sequence.
        reasoning: the model's reasoning before its answer to a conversation; not part of `text`.
        tool_calls: the tool calls in the answer; not part of `text`. The arguments fit the tool's schema if the tool is
            strict, and break off if the generation did.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the assistant's message, to append to a conversation for the next `chat`."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        more = {"reasoning_content": self.reasoning, "tool_calls": calls}
        return {"role": "assistant", "content": self.text} | {name: value for name, value in more.items() if value}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request and its choices.

    Attributes:
        prompt: the prompt as text (a conversation as its template rendered it); None if it was given as token ids.
        num_cached_tokens: number of prompt tokens whose KV was found in the prefix cache; known once `finished`.
        prompt_logprobs: one `{token id: Logprob}` per prompt token, the token itself first, and None for the first
            token; None unless requested, and until they are known.
        error: why the engine failed this request; "" if it did not.
        certificate: the certificate of the whole answer, as JSON text; "" unless requested, and until it is known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    error: str = ""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    certificate: str = ""


class _GrowingChoice:
    __slots__ = ("calls", "finish_reason", "logprobs", "reasoning", "stop_reason", "text", "token_ids", "total_logprob")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallPiece] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.total_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


class Answer:
    """Folds the outputs of one request into a `RequestOutput`, or its vector. Owned by the code that waits for it.

    Attributes:
        id: the request's id.
    """

    def __init__(self, resolved: ResolvedRequest, wants_logprobs: bool = False) -> None:
        self.id = resolved.id
        self._resolved = resolved
        self._wants_logprobs = wants_logprobs
        self._choices = [_GrowingChoice() for _ in range(resolved.answered)]
        self._usage = Usage()
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._vector: bytes | None = None
        self._certificate = ""
        self.error = ""
        self.finished = False

    @property
    def pieces(self) -> list[str]:
        """The first choice's text, in the pieces in which it arrived."""
        return self._choices[0].text

    def add(self, output: Output) -> None:
        """Add the next output."""
        match output:
            case PromptTokens(_, tokens):
                self._prompt_logprobs = [None, *(_logprobs(piece) for piece in tokens[1:])]
            case Embedding(vector):
                self._vector = vector
            case ChoiceDelta():
                self._extend(output)
            case ChoiceFinished(choice, reason, stop):
                self._choices[choice].finish_reason = reason.value
                self._choices[choice].stop_reason = stop
            case RequestFinished(usage):
                self._usage = usage
                self._certificate = output.certificate
                self.finished = True
            case RequestFailed(message, usage):
                self._fail(message, usage)

    def _fail(self, message: str, usage: Usage) -> None:
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or FinishReason.ERROR.value
        self._usage = usage
        self.error = message
        self.finished = True

    def _extend(self, delta: ChoiceDelta) -> None:
        choice = self._choices[delta.choice]
        choice.text.append(delta.text)
        choice.reasoning.append(delta.reasoning)
        choice.calls += delta.calls
        for piece in delta.tokens:
            choice.token_ids.append(piece.id)
            if self._wants_logprobs:
                choice.logprobs.append(_logprobs(piece))
                choice.total_logprob += piece.logprob

    def output(self) -> RequestOutput:
        """The request so far."""
        return RequestOutput(
            request_id=self._resolved.id,
            prompt=self._resolved.prompt_text or None,
            prompt_token_ids=list(self._resolved.prompt),
            outputs=[self._completion(index) for index in range(len(self._choices))],
            finished=self.finished,
            num_cached_tokens=self._usage.cached_tokens,
            error=self.error,
            prompt_logprobs=self._prompt_logprobs,
            certificate=self._certificate,
        )

    def embedding(self) -> EmbeddingRequestOutput:
        """The embedding of a request that has ended.

        Raises:
            EngineFault: there is none, because the request failed or was aborted.
        """
        if self._vector is None:
            raise EngineFault(self.error or f"request {self.id} was aborted before it had its embedding")
        return EmbeddingRequestOutput(
            request_id=self.id,
            outputs=EmbeddingOutput(vector_floats(self._vector)),
            prompt_token_ids=list(self._resolved.prompt),
            num_cached_tokens=self._usage.cached_tokens,
        )

    def _completion(self, index: int) -> CompletionOutput:
        choice = self._choices[index]
        return CompletionOutput(
            index=index,
            text="".join(choice.text),
            token_ids=list(choice.token_ids),
            cumulative_logprob=choice.total_logprob if self._wants_logprobs else None,
            logprobs=list(choice.logprobs) if self._wants_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            reasoning="".join(choice.reasoning),
            tool_calls=made_calls(choice.calls) if choice.calls else (),
        )


def _logprobs(piece: TokenPiece) -> dict[int, Logprob]:
    """The log probabilities of a token, then of the alternatives to it."""
    return {each.id: Logprob(each.logprob, each.rank, each.text) for each in (piece, *piece.top)}
