"""One HTTP request and its answer, in the engine's terms: what to ask, and the outputs of it all as one stream.

Decides how the outputs of several prompts become one fair stream with choices numbered through, that every prompt is
aborted when one fails or the client leaves, and how usage adds up. Knows no JSON shapes and no HTTP.
Invariants: at most one output per prompt is held here, so a slow reader costs nothing; a stream that ends without an
error has ended every choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from penstock.contract.errors import EngineFault
from penstock.contract.events import (
    AskFailed,
    AskFinished,
    ChoiceDelta,
    ChoiceFinished,
    FinishReason,
    Output,
    PromptTokens,
    Usage,
)
from penstock.contract.measurements import UNTIMED, Timings
from penstock.contract.ports import EngineClient
from penstock.contract.request import Ask
from penstock.server.prompt_logprobs import PromptLogprobs

__all__ = ["Exchange", "Replies", "Transcript"]

NO_ALIASES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A parsed request.

    Attributes:
        id: the answer's id, and the stem of the asks' ids.
        asks: one a prompt, each with the same `n`.
        stream: whether to answer piece by piece.
        include_usage: whether a stream ends with a usage chunk.
        timings: whether the answer ends with its timings.
        prompt_logprobs: what a whole answer holds of its prompts' log probabilities; None for nothing.
        aliases: parameter names that errors use -> the names that this caller used.
    """

    id: str
    asks: tuple[Ask, ...]
    stream: bool = False
    include_usage: bool = False
    timings: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    aliases: Mapping[str, str] = field(default_factory=lambda: NO_ALIASES)

    @property
    def num_choices(self) -> int:
        """Choices of the whole answer: prompt i's choice j has index `i * n + j`."""
        return sum(ask.n for ask in self.asks)


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class Replies:
    """The outputs of an exchange as one stream. Owned by the one task that answers the request.

    Attributes:
        usage: of the prompts that have ended.
        timings: of these together.
        sent_tokens: tokens that have come through.
        finish_reasons: of the choices that have ended.
        prompts: by the index of their ask, those that have come.
    """

    def __init__(self, client: EngineClient, exchange: Exchange) -> None:
        self.usage = Usage()
        self.timings = UNTIMED
        self.sent_tokens = 0
        self.finish_reasons: list[str] = []
        self.prompts: dict[int, PromptTokens] = {}
        self._client = client
        self._exchange = exchange

    async def stream(self) -> AsyncGenerator[ChoiceDelta | ChoiceFinished, None]:
        """Deltas and ends with the whole answer's choice indices. Close it (`aclosing`): that aborts what is left.

        Raises:
            PenstockError: as `EngineClient.generate`; and `EngineFault` when an ask failed on the way.
        """
        asks = self._exchange.asks
        unfinished = len(asks)
        async with aclosing(_merged(self._client, asks)) as outputs:
            async for prompt, output in outputs:
                match output:
                    case PromptTokens():
                        self.prompts[prompt] = output
                        for choice in range(asks[prompt].n if asks[prompt].echo else 0):
                            yield _echoed(output, prompt * asks[prompt].n + choice, asks[prompt])
                    case ChoiceDelta() | ChoiceFinished():
                        self._note(output)
                        yield _renumbered(output, prompt * asks[prompt].n)
                    case AskFinished():
                        unfinished -= 1
                        self._add(output.usage, output.timings)
                    case AskFailed():
                        self._add(output.usage, output.timings)
                        raise EngineFault(output.message)
        if unfinished:
            raise EngineFault("The engine ended the answer before it was complete.")

    def _note(self, output: ChoiceDelta | ChoiceFinished) -> None:
        if isinstance(output, ChoiceDelta):
            self.sent_tokens += len(output.tokens)
        else:
            self.finish_reasons.append(output.reason.value)

    def _add(self, usage: Usage, timings: Timings) -> None:
        self.timings = timings if self.timings is UNTIMED else self.timings.joined(timings)
        self.usage = Usage(
            prompt_tokens=self.usage.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens + usage.completion_tokens,
            cached_tokens=self.usage.cached_tokens + usage.cached_tokens,
            reasoning_tokens=self.usage.reasoning_tokens + usage.reasoning_tokens,
        )


def _echoed(prompt: PromptTokens, choice: int, ask: Ask) -> ChoiceDelta:
    """The prompt as a choice's beginning, its tokens with as many alternatives as the generated ones have."""
    count = ask.sampling.get("logprobs", 0)
    return ChoiceDelta(choice, prompt.text, tuple(token.with_top(count) for token in prompt.tokens))


def _renumbered(output: ChoiceDelta | ChoiceFinished, first: int) -> ChoiceDelta | ChoiceFinished:
    if isinstance(output, ChoiceFinished) and output.reason is FinishReason.ERROR:
        raise EngineFault("One of the choices failed.")
    return replace(output, choice=first + output.choice) if first else output


async def _merged(client: EngineClient, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Output], None]:
    """(prompt index, output), taking from every prompt that has something in turn."""
    async with AsyncExitStack() as closing:  # closes every iterator, even when closing one of them fails
        iterators: list[AsyncIterator[Output]] = []
        for ask in asks:
            iterators.append(client.generate(ask))
            closing.push_async_callback(_close, client, ask, iterators[-1])
        if len(iterators) == 1:  # the common case, without a task an output
            async for output in iterators[0]:
                yield 0, output
            return
        async with aclosing(_in_turns(iterators)) as turns:
            async for turn in turns:
                yield turn


async def _in_turns(iterators: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output], None]:
    pending = {asyncio.create_task(_next(iterator)): index for index, iterator in enumerate(iterators)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: pending[task]):
                index = pending.pop(task)
                output = task.result()
                if output is None:
                    continue
                yield index, output
                pending[asyncio.create_task(_next(iterators[index]))] = index
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _next(iterator: AsyncIterator[Output]) -> Output | None:
    return await anext(iterator, None)


async def _close(client: EngineClient, ask: Ask, iterator: AsyncIterator[Output]) -> None:
    if isinstance(iterator, _Closable):
        await iterator.aclose()
    else:
        await client.abort(ask.id)


class Transcript:
    """A whole answer, gathered from the same stream that would be sent piece by piece. Owned by one answering task."""

    def __init__(self, num_choices: int) -> None:
        self._deltas: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
        self._ends: dict[int, ChoiceFinished] = {}

    def take(self, output: ChoiceDelta | ChoiceFinished) -> None:
        """Add one output."""
        if isinstance(output, ChoiceFinished):
            self._ends[output.choice] = output
            return
        self._deltas[output.choice].append(output)

    def choices(self) -> list[tuple[ChoiceDelta, ChoiceFinished]]:
        """Every choice as if it had come in one piece, by index.

        Raises:
            EngineFault: a choice has not ended.
        """
        if len(self._ends) != len(self._deltas):
            raise EngineFault("The engine ended the answer before it was complete.")
        return [(_joined(index, deltas), self._ends[index]) for index, deltas in enumerate(self._deltas)]


def _joined(choice: int, deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    return ChoiceDelta(
        choice,
        "".join(delta.text for delta in deltas),
        tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        "".join(delta.reasoning for delta in deltas),
        tuple(chain.from_iterable(delta.calls for delta in deltas)),
    )
