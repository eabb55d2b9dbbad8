"""The partner of a conversation: one interface for the engine in this process and for a server elsewhere."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.contract.errors import EngineFault
from penstock.contract.request import ChatPrompt, Message
from penstock.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.llm.offline import LLM

__all__ = ["EnginePartner", "Partner", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of an answer.

    Attributes:
        reasoning: what the model thinks before it answers.
        prompt_tokens: tokens of the whole conversation that was sent; 0 if not known (yet).
        tokens: tokens generated so far; 0 if not known (yet).
        finish_reason: set on the last piece.
    """

    text: str = ""
    reasoning: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    finish_reason: str = ""


class Partner(Protocol):
    """Answers conversations, one at a time."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of conversation and answer together; 0 if not known."""
        ...

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[Piece]:
        """Yield the pieces of an answer as they arrive; closing the iterator ends the answer.

        Args:
            messages: the conversation, the question last.
            params: the chosen sampling parameters; the partner's own defaults apply to the others.

        Raises:
            PenstockError: the conversation cannot be answered, or the answer failed.
        """
        ...


class EnginePartner:
    """The engine in this process; `adapter` is the name of the adapter that answers, "" for none."""

    def __init__(self, llm: LLM, adapter: str = "") -> None:
        self._llm = llm
        self._adapter = adapter
        self.name = adapter or llm.card.name
        self.context = llm.card.max_model_len

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[Piece]:
        """See `Partner.stream`."""
        llm = self._llm
        chosen = SamplingParams.from_fields(dict(llm.card.sampling_defaults) | {"max_tokens": None} | dict(params))
        request_id = llm.add_request(ChatPrompt(tuple(messages)), chosen, adapter=self._adapter)
        said, thought = 0, 0
        try:
            while llm.has_unfinished_requests():
                for output in llm.step():
                    answer = output.outputs[0]
                    text, reasoning = answer.text[said:], answer.reasoning[thought:]
                    said, thought = said + len(text), thought + len(reasoning)
                    counts = len(output.prompt_token_ids), len(answer.token_ids)
                    yield Piece(text, reasoning, *counts, answer.finish_reason or "")
                    if output.error:
                        raise EngineFault(f"the answer failed: {output.error}")
        finally:
            llm.abort_request(request_id)
