"""One HTTP request and its answer, in the engine's terms: what to ask, and the outputs of it all as one stream.

Decides how the outputs of several prompts become one fair stream with choices numbered through, that every prompt is
aborted when one fails or the client leaves, and how usage adds up. Knows no JSON shapes and no HTTP.
Invariants: at most one output per prompt is held here, so a slow reader costs nothing; at most `at_once` prompts are in
the engine; a stream that ends without an error has ended every choice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Protocol, runtime_checkable

from penstock.contract.errors import EngineFault, Overloaded, RequestError
from penstock.contract.events import (
    AskFailed,
    AskFinished,
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    FinishReason,
    Output,
    PromptTokens,
    Usage,
)
from penstock.contract.measurements import UNTIMED, Timings
from penstock.contract.ports import EngineClient
from penstock.contract.request import EngineRequest
from penstock.server.prompt_logprobs import PromptLogprobs

__all__ = ["Exchange", "Replies", "Transcript"]

NO_ALIASES: Mapping[str, str] = {}
PAUSE_SECONDS = 0.2
"""Between two tries to have the engine take a prompt that it had no room for."""


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
        prompt_fields: the same of `prompt`, one an ask, where each has its own.
        at_once: asks that are in the engine at the same time, or fewer where its queue is full; the others follow. 0
            for all, or none.
    """

    id: str
    asks: tuple[EngineRequest, ...]
    stream: bool = False
    include_usage: bool = False
    timings: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    aliases: Mapping[str, str] = field(default_factory=lambda: NO_ALIASES)
    prompt_fields: tuple[str, ...] = ()
    at_once: int = 0

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
        vectors: of the prompts that are embedded, by their index; as `Embedding.vector`.
        prompts: by the index of their ask, those that have come.
    """

    def __init__(self, client: EngineClient, exchange: Exchange) -> None:
        self.usage = Usage()
        self.timings = UNTIMED
        self.sent_tokens = 0
        self.finish_reasons: list[str] = []
        self.vectors: dict[int, bytes] = {}
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
        async with aclosing(_merged(self._client, self._exchange)) as outputs:
            async for prompt, output in outputs:
                match output:
                    case ChoiceDelta() | ChoiceFinished():
                        self._note(output)
                        begun = asks[prompt].echo and prompt in self.prompts  # an abort may come before the prompt
                        said = _behind(self.prompts[prompt], output) if begun else output
                        yield _renumbered(said, prompt * asks[prompt].n)
                    case PromptTokens():
                        self.prompts[prompt] = output
                        for choice in range(asks[prompt].n if asks[prompt].echo else 0):
                            yield _echoed(output, prompt * asks[prompt].n + choice, asks[prompt])
                    case Embedding(vector):
                        self.vectors[prompt] = vector
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


def _echoed(prompt: PromptTokens, choice: int, ask: EngineRequest) -> ChoiceDelta:
    """The prompt as a choice's beginning, its tokens with as many alternatives as the generated ones have."""
    count = ask.sampling.get("logprobs", 0)
    return ChoiceDelta(choice, prompt.text, tuple(token.with_top(count) for token in prompt.tokens))


def _behind(prompt: PromptTokens, output: ChoiceDelta | ChoiceFinished) -> ChoiceDelta | ChoiceFinished:
    """`output` of a choice that begins with the prompt."""
    if isinstance(output, ChoiceFinished):
        return output
    return replace(output, tokens=tuple(replace(each, start=each.start + len(prompt.text)) for each in output.tokens))


def _renumbered(output: ChoiceDelta | ChoiceFinished, first: int) -> ChoiceDelta | ChoiceFinished:
    if isinstance(output, ChoiceFinished) and output.reason is FinishReason.ERROR:
        raise EngineFault("One of the choices failed.")
    return replace(output, choice=first + output.choice) if first else output


async def _merged(client: EngineClient, exchange: Exchange) -> AsyncGenerator[tuple[int, Output], None]:
    """(prompt index, output), taking from every prompt that has something in turn."""
    names = exchange.prompt_fields or repeat("prompt")
    async with AsyncExitStack() as closing:  # closes every source, even when closing one of them fails
        sources = [_Source(client, ask, name) for ask, name in zip(exchange.asks, names, strict=False)]
        for source in sources:
            closing.push_async_callback(source.close)
        if len(sources) == 1:  # the common case, without a task an output
            while (output := await sources[0].next()) is not None:
                yield 0, output
            return
        async with aclosing(_in_turns(sources, exchange.at_once)) as turns:
            async for turn in turns:
                yield turn


class _Source:
    """The outputs of one prompt. Owned by the task that answers the request.

    Args:
        name: of the field that the prompt came from, for errors.
    """

    def __init__(self, client: EngineClient, ask: EngineRequest, name: str) -> None:
        self._client = client
        self._ask = ask
        self._name = name
        self._outputs = client.generate(ask)  # begins when its first output is asked for

    async def next(self) -> Output | None:
        """The next output; None after the last."""
        try:
            return await anext(self._outputs, None)
        except RequestError as error:
            if error.param == "prompt":
                error.param = self._name
            raise

    def renew(self) -> None:
        """Begin again, after the engine refused it."""
        self._outputs = self._client.generate(self._ask)

    async def close(self) -> None:
        """End it, wherever it is."""
        if isinstance(self._outputs, _Closable):
            await self._outputs.aclose()
        else:
            await self._client.abort(self._ask.id)


async def _in_turns(sources: Sequence[_Source], at_once: int) -> AsyncGenerator[tuple[int, Output], None]:
    """See `_merged`. Where only some are in the engine `at_once`, one that it has no room for waits for another.

    If it has room for none from the beginning, that is the caller's answer. Once some were taken, their work is not
    thrown away for it: what is left asks again until it is taken, or until whoever reads this gives up.
    """
    waiting = deque(range(len(sources)))
    pending: dict[asyncio.Task[Output | None], int] = {}
    taken = False

    def go_on(index: int) -> None:
        pending[asyncio.create_task(sources[index].next())] = index

    def follow(most: int) -> None:
        """Let some of those that wait begin."""
        for _ in range(min(most, len(waiting), (at_once or len(sources)) - len(pending))):
            go_on(waiting.popleft())

    follow(len(sources))
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: pending[task]):
                index = pending.pop(task)
                try:
                    output = task.result()
                except Overloaded:
                    if not at_once or not (pending or taken):
                        raise
                    sources[index].renew()
                    waiting.appendleft(index)
                    continue
                taken = True
                if output is not None:
                    yield index, output
                    go_on(index)
                else:
                    follow(2)  # its place, and one that was lost when the engine had no room
            if waiting and not pending:
                await asyncio.sleep(PAUSE_SECONDS)
                follow(1)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


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
        sum(delta.reasoning_tokens for delta in deltas),
    )
