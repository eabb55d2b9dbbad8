"""What the scheduler emits, in ids (`SeqEvent`), and what the engine emits, in text (`Output`).

Invariant: every accepted sequence yields exactly one `Finished`, and nothing after it. Every request yields one
`ChoiceFinished` for each of its choices and then one `RequestFinished`, or one `RequestFailed` and nothing more.

Values that are made for every token are named tuples, as in `penstock.contract.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from penstock.contract.errors import EngineFault, RequestPoisoned
from penstock.contract.measurements import UNTIMED, Timings
from penstock.contract.plan import TopLogprobs
from penstock.contract.tools import CallPiece

__all__ = [
    "Admitted",
    "CacheLookup",
    "ChoiceDelta",
    "ChoiceFinished",
    "DraftsJudged",
    "Embedded",
    "Embedding",
    "FinishReason",
    "Finished",
    "Generated",
    "Output",
    "PromptScored",
    "PromptTokens",
    "RequestFailed",
    "RequestFinished",
    "SeqEvent",
    "TokenPiece",
    "Usage",
]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string; or its embedding is complete."""
    LENGTH = "length"
    """`max_tokens` or the context is used up."""
    REPETITION = "repetition"
    """It ran into a loop, as defined by `StopRules.repetition`."""
    TOOL_CALLS = "tool_calls"
    """As `STOP`, and the model chose to call tools."""
    ABORT = "abort"
    """The caller went away or aborted it."""
    ERROR = "error"
    """A failure that belongs to this sequence alone."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequence took a slot for the first time; `cached` of its prompt tokens were found in the prefix cache."""

    seq_id: str
    cached: int


class Generated(NamedTuple):
    """The sequence has one more token; `rank` is 0 where its log probability was not requested."""

    seq_id: str
    token: int
    logprob: float
    top: TopLogprobs = ()
    rank: int = 0


class DraftsJudged(NamedTuple):
    """A row of the sequence carried `drafts` drafts of this drafter, of which the first `right` were drawn.

    Comes before the tokens that the row drew.
    """

    seq_id: str
    drafter: str
    drafts: int
    right: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence's last event.

    Attributes:
        stop_token: the id that ended it; -1 when no id did.
        message: for `ERROR`, what happened, safe to show; else "".
        poisoned: whether the failure was that its rows make steps fail.
    """

    seq_id: str
    reason: FinishReason
    stop_token: int = -1
    message: str = ""
    poisoned: bool = False


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The model's scores of prompt tokens, from position `start`; comes again for positions that are computed again."""

    seq_id: str
    start: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The prompt of an embedded sequence is computed; `vector` is float32, little-endian."""

    seq_id: str
    vector: bytes


SeqEvent = Admitted | PromptScored | DraftsJudged | Generated | Embedded | Finished


_Bytes = bytes
"""For classes with a field called `bytes`, which hides the type from their annotations."""


class TokenPiece(NamedTuple):
    """One generated token: its id, the bytes it stands for, and its log probability (0.0 when not requested).

    Attributes:
        top: the top tokens at its position, most likely first, as many as were requested.
        rank: its rank among all tokens by likelihood, from 1; if tokens are equally likely, the lower id comes first. 0
            when not requested.
        start: how many characters come before it in the text that it is part of: its choice's, or the prompt's. If
            several tokens write one character, each begins where the character does. 0 in alternatives.
    """

    id: int
    bytes: _Bytes
    logprob: float
    top: tuple[TokenPiece, ...] = ()
    rank: int = 0
    start: int = 0

    def with_top(self, count: int) -> TokenPiece:
        """A copy with at most `count` alternatives."""
        return self._replace(top=self.top[:count]) if len(self.top) > count else self

    @property
    def text(self) -> str:
        """The token alone as text; bytes that do not form a whole character become U+FFFD."""
        return self.bytes.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt that all choices continue; comes once, before them, if the request wants it.

    Attributes:
        text: the prompt as text.
        tokens: all its tokens; a log probability that does not exist is NaN, as the first token's always is.
    """

    text: str
    tokens: tuple[TokenPiece, ...]


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """The answer was looked up in the answer cache; comes first, if it was looked up.

    Attributes:
        age: seconds since the answer was computed; None if it was not found and is computed now.
    """

    age: float | None


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of an embedding request: float32, little-endian; comes once, before the end of its only choice."""

    vector: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request: the prompt once, the completions of all choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """How many of `completion_tokens` began inside the reasoning, if answers are parsed."""


class ChoiceDelta(NamedTuple):
    """More of one choice: text that is final (nothing of it is held back or will be cut), and the tokens behind it.

    `text` may be "" when tokens arrived whose text is not complete yet; `tokens` may be empty when held-back text is
    released. Joined over a choice, texts and tokens are the whole completion. If the request has it parsed
    (`ReplyRules`), texts, reasoning and calls are the whole, and tokens come beside any of them, as they are generated.

    Attributes:
        reasoning_tokens: how many more of the choice's tokens so far, counted from the first, are now known to be
            reasoning, its tags included. Their sum is final once the first text after the reasoning comes.
    """

    choice: int
    text: str
    tokens: tuple[TokenPiece, ...]
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    reasoning_tokens: int = 0

    @property
    def empty(self) -> bool:
        """Whether it carries nothing."""
        return not (self.text or self.tokens or self.reasoning or self.calls)

    def parts(self) -> tuple[ChoiceDelta, ...]:
        """Split it into parts with at most one piece of a call each; text and reasoning come first."""
        if not self.calls:  # nearly every delta; copying each would be a tenth of the cost of streaming it
            return (self,)
        spoken = self._replace(calls=())
        calls = tuple(ChoiceDelta(self.choice, "", (), calls=(piece,)) for piece in self.calls)
        return calls if spoken.empty else (spoken, *calls)

    def in_order(self, told: int) -> Iterator[str | CallPiece]:
        """Its text and its pieces of calls, in the order in which the model wrote them.

        Args:
            told: characters of text in the choice's earlier deltas.
        """
        at = 0
        for piece in self.calls:
            before = piece.text_before - told
            if piece.id and before > at:
                yield self.text[at:before]
                at = before
            yield piece
        if at < len(self.text):
            yield self.text[at:]

    def then(self, later: ChoiceDelta) -> ChoiceDelta:
        """Join this delta and the next one of the same choice."""
        return ChoiceDelta(
            self.choice,
            self.text + later.text,
            self.tokens + later.tokens,
            self.reasoning + later.reasoning,
            _joined(self.calls, later.calls) if later.calls else self.calls,
            self.reasoning_tokens + later.reasoning_tokens,
        )


def _joined(calls: tuple[CallPiece, ...], later: tuple[CallPiece, ...]) -> tuple[CallPiece, ...]:
    """Concatenate pieces of calls; arguments that continue the last piece are joined to it."""
    if not calls or later[0].id or calls[-1].id:
        return calls + later
    last = replace(calls[-1], arguments=calls[-1].arguments + later[0].arguments)
    return (*calls[:-1], last, *later[1:])


class ChoiceFinished(NamedTuple):
    """A choice is complete.

    Attributes:
        stop: the string or token id that ended it; None for an end-of-sequence id or when it did not end by a stop.
    """

    choice: int
    reason: FinishReason
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Every choice of the request is complete; the stream ends here.

    Attributes:
        certificate: the answer's, as `penstock.certificates` writes it; "" if none is wanted, or the request was
            aborted.
    """

    usage: Usage
    timings: Timings = UNTIMED
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended by a failure of ours; `message` is safe to show. The stream ends here.

    Attributes:
        poisoned: whether computing the request makes steps fail.
    """

    message: str
    usage: Usage
    timings: Timings = UNTIMED
    poisoned: bool = False

    @property
    def error(self) -> EngineFault:
        """The failure as an exception."""
        return RequestPoisoned(self.message) if self.poisoned else EngineFault(self.message)


Output = CacheLookup | PromptTokens | Embedding | ChoiceDelta | ChoiceFinished | RequestFinished | RequestFailed
