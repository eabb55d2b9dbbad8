"""The engine's outputs for one parsed request, as one stream.

Merges the outputs of several prompts into one stream with consecutive choice indices, aborts every prompt when one
fails or the client disconnects, and adds up usage. Knows nothing of JSON or HTTP.
Invariant: a stream that ends without an error has ended every choice.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from itertools import chain, repeat

from penstock.contract.errors import EngineFault
from penstock.contract.events import (
    CacheLookup,
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    FinishReason,
    Output,
    PromptTokens,
    RequestFailed,
    RequestFinished,
    Usage,
)
from penstock.contract.measurements import NO_PARTS, UNTIMED, LatencyParts, Timings
from penstock.contract.request import EngineRequest
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.turns import take_in_turns

__all__ = ["OutputStream", "Transcript"]

ANSWER_CACHE_HEADER = "x-penstock-answer-cache"


class OutputStream:
    """The outputs of a parsed request as one stream. Owned by the one task that answers.

    Attributes:
        began: when the request arrived, in seconds of `time.monotonic`; the response sets it.
        usage: total of the prompts that have ended.
        timings: timings of the same prompts together.
        sent_tokens: number of tokens passed on so far.
        finish_reasons: reasons of the choices that have ended.
        headers: headers for the response, as far as they are known; complete before the first output is passed on.
        certificate: the certificate of the answer, if it is wanted and complete; else "".
        vectors: prompt index -> its embedding, as `Embedding.vector`.
        prompts: prompt index -> its tokens, if they were requested and have come.
        kept: collects the outputs of a single request, if the complete answer of a stream is wanted.
    """

    def __init__(self, live: LiveRequests, parsed: ParsedRequest) -> None:
        self.began = time.monotonic()
        self.usage = Usage()
        self.timings = UNTIMED
        self.sent_tokens = 0
        self.finish_reasons: list[str] = []
        self.headers: dict[str, str] = {}
        self.certificate = ""
        self.vectors: dict[int, bytes] = {}
        self.prompts: dict[int, PromptTokens] = {}
        self.kept: Transcript | None = None
        self._ages: list[float | None] = []
        self._live = live
        self._parsed = parsed
        self._unfinished = len(parsed.requests)
        self._counted = ExitStack()
        self._entered = False

    @property
    def complete(self) -> bool:
        """Whether every prompt has ended, so that no more output will come."""
        return not self._unfinished

    @property
    def tokens_so_far(self) -> Usage:
        """Tokens of the prompts received so far (`EngineRequest.running_usage`), and of the answer so far."""
        prompts = sum(len(prompt.tokens) for prompt in self.prompts.values())
        return Usage(prompt_tokens=prompts, completion_tokens=self.sent_tokens)

    def parts_until(self, now: float) -> LatencyParts:
        """Where the time from the request's arrival until `now` went; `NO_PARTS` if the engine has not said.

        Args:
            now: in seconds of `time.monotonic`.
        """
        parts = self.timings.parts
        return parts if parts == NO_PARTS else parts.within(self.began, self.timings.arrived, now)

    def enter(self) -> None:
        """Count among the caller's requests from now until `leave`, instead of only while the stream is read.

        Raises:
            Overloaded: the caller is at its limit of requests at once.
        """
        if not self._entered:
            tenant = self._parsed.requests[0].tenant
            self._counted.enter_context(self._live.concurrency.one_more(tenant, self._parsed.concurrent))
            self._entered = True

    def leave(self) -> None:
        """Stop counting; does nothing the second time."""
        self._counted.close()

    async def stream(self) -> AsyncGenerator[ChoiceDelta | ChoiceFinished, None]:
        """Yield deltas and ends, with the whole answer's choice indices. Close it (`aclosing`) to abort what is left.

        Raises:
            PenstockError: as `enter` and `EngineClient.generate`; and `EngineFault` if a request fails midway.
        """
        names = self._parsed.prompt_fields or repeat("prompt")
        async with AsyncExitStack() as closing:  # closes every request, even when closing one of them fails
            self.enter()
            closing.callback(self.leave)
            opened = [self._live.open(each, name) for each, name in zip(self._parsed.requests, names, strict=False)]
            for request in opened:
                closing.push_async_callback(request.close)
            if len(opened) == 1:  # the common case: no task and no generator in between
                while (output := await opened[0].next()) is not None:
                    for translated in self._translate(0, output):
                        yield translated
            else:
                turns = await closing.enter_async_context(aclosing(take_in_turns(opened, self._parsed.at_once)))
                async for index, output in turns:
                    for translated in self._translate(index, output):
                        yield translated
        if self._unfinished:
            raise EngineFault("The engine ended the answer before it was complete.")

    def _translate(self, index: int, output: Output) -> Iterable[ChoiceDelta | ChoiceFinished]:
        """What `output` of prompt `index` adds to the whole answer; usage, timings and vectors are recorded here."""
        request = self._parsed.requests[index]
        first = index * request.n
        match output:
            case ChoiceDelta() if self._parsed.prompt_only:
                return ()
            case ChoiceFinished() if self._parsed.prompt_only:
                self._note(_without_token(output))
                return (_renumbered(_without_token(output), first),)
            case ChoiceDelta() | ChoiceFinished():  # nearly every output
                self._note(output)
                if request.echo and index in self.prompts:  # an abort may come before the prompt
                    output = _after_echo(self.prompts[index], output)
                return (_renumbered(output, first),)
            case PromptTokens():
                self.prompts[index] = output
                return [_echo(output, first + choice, request) for choice in range(request.n if request.echo else 0)]
            case CacheLookup(age):
                self._note_lookup(age)
            case Embedding(vector):
                self.vectors[index] = vector
            case RequestFinished():
                self._unfinished -= 1
                self.certificate = output.certificate
                self._add(output.usage, output.timings)
            case RequestFailed():
                self._add(output.usage, output.timings)
                raise output.error
        return ()

    def _note_lookup(self, age: float | None) -> None:
        """Set the headers that say whether the answer was cached, once that is known of every prompt."""
        self._ages.append(age)
        if len(self._ages) < len(self._parsed.requests):
            return
        found = [each for each in self._ages if each is not None]
        hit = len(found) == len(self._ages)
        self.headers[ANSWER_CACHE_HEADER] = "hit" if hit else "miss"
        if hit:
            self.headers["age"] = str(int(max(found)))

    def _note(self, output: ChoiceDelta | ChoiceFinished) -> None:
        if self.kept is not None:
            self.kept.take(output)
        if isinstance(output, ChoiceDelta):
            self.sent_tokens += len(output.tokens)
        else:
            self.finish_reasons.append(output.reason.value)

    def _add(self, usage: Usage, timings: Timings) -> None:
        self.timings = timings if self.timings is UNTIMED else self.timings.joined(timings)
        generated = 0 if self._parsed.prompt_only else usage.completion_tokens
        self.usage = Usage(
            prompt_tokens=self.usage.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens + generated,
            cached_tokens=self.usage.cached_tokens + usage.cached_tokens,
            reasoning_tokens=self.usage.reasoning_tokens + usage.reasoning_tokens,
        )


def _echo(prompt: PromptTokens, choice: int, request: EngineRequest) -> ChoiceDelta:
    """The prompt as the beginning of a choice; its tokens get as many alternatives as the generated ones."""
    count = request.sampling.get("logprobs", 0)
    return ChoiceDelta(choice, prompt.text, tuple(token.with_top(count) for token in prompt.tokens))


def _without_token(end: ChoiceFinished) -> ChoiceFinished:
    """The end of a choice that should have no tokens: whatever its one token was, the finish reason is `length`."""
    complete = end.reason in (FinishReason.STOP, FinishReason.LENGTH)
    return ChoiceFinished(end.choice, FinishReason.LENGTH) if complete else end


def _after_echo(prompt: PromptTokens, output: ChoiceDelta | ChoiceFinished) -> ChoiceDelta | ChoiceFinished:
    """`output` of a choice that begins with the prompt: its tokens' starts are moved past the prompt's text."""
    if isinstance(output, ChoiceFinished):
        return output
    before = len(prompt.text)
    return output._replace(tokens=tuple(each._replace(start=each.start + before) for each in output.tokens))


def _renumbered(output: ChoiceDelta | ChoiceFinished, first: int) -> ChoiceDelta | ChoiceFinished:
    if isinstance(output, ChoiceFinished) and output.reason is FinishReason.ERROR:
        raise EngineFault("One of the choices failed.")
    return output._replace(choice=first + output.choice) if first else output


class Transcript:
    """Collects a complete answer from the stream of its pieces. Owned by one task."""

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
        """Every choice joined into one piece, by index.

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
