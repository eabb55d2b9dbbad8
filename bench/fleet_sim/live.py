"""Holds a trace's conversations with an engine in real time, and returns the outcome.

Texts are pieces of a book, chosen by the trace: a tenant's system prompt is the same in all its conversations, and a
prompt repeats everything said before, answers included, and adds something new. Answers are greedy and have the length
that the trace says, so they do not depend on which replica computes them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fleet_sim.trace import Conversation
from penstock.bench.arithmetic import percentile
from penstock.contract.errors import EngineFault, PenstockError
from penstock.contract.events import ChoiceDelta, RequestFailed, RequestFinished, Usage
from penstock.contract.ports import EngineClient
from penstock.contract.request import EngineRequest, StopRules, TextPrompt
from penstock.contract.sampling import SamplingSpec

__all__ = ["Held", "conversation_of", "hold"]

CHARS = 4
"""Characters of the book that make about one token."""

GREEDY = SamplingSpec((("temperature", 0.0),))


@dataclass(slots=True)
class Held:
    """Counts the outcome of the messages that were sent while figures count. Times are seconds.

    Attributes:
        first_token: time from each answered message to the first token of its answer.
        whole: time from each answered message to the end of its answer.
        prompt_tokens: prompt tokens of answered messages.
        cached_tokens: how many of these were found in prefix caches.
        failures: reasons why messages were not answered, with how often.
    """

    first_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def answered(self, first_token: float, whole: float, usage: Usage) -> None:
        """Count a message that was answered."""
        self.first_token.append(first_token)
        self.whole.append(whole)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens

    def failed(self, reason: str) -> None:
        """Count a message that was not answered."""
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def figures(self) -> dict[str, Any]:
        """Return the figures for a record.

        Raises:
            ValueError: no message was answered.
        """
        failed = sum(self.failures.values())
        return {
            "requests": len(self.first_token) + failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_share": self.cached_tokens / max(1, self.prompt_tokens),
            "first_token_p50": percentile(self.first_token, 50),
            "first_token_p90": percentile(self.first_token, 90),
            "first_token_p99": percentile(self.first_token, 99),
            "first_token_mean": fmean(self.first_token),
            "whole_mean": fmean(self.whole),
            "failed": failed,
            "failures": self.failures,
        }


def conversation_of(request_id: str) -> str:
    """Return the name of the conversation that a request sent by `hold` belongs to."""
    return request_id.partition("-")[0]


async def hold(
    client: EngineClient,
    talks: Sequence[Conversation],
    book: str,
    *,
    warm: float,
    ends: float,
    most_tokens: int,
    patience: float = 60.0,
) -> Held:
    """Hold all conversations, each from its own time of beginning.

    Args:
        client: the engine that answers.
        talks: the conversations: what is said, and when.
        book: the text that messages are taken from.
        warm: seconds after which messages count.
        ends: seconds after which no message is sent.
        most_tokens: most tokens of a prompt and its answer; a conversation ends before a message that could exceed it.
        patience: seconds after which a message without a whole answer has failed, and its conversation ends.
    """
    held, began = Held(), time.monotonic()

    def now() -> float:
        return time.monotonic() - began

    async def one(talk: Conversation) -> None:
        await asyncio.sleep(talk.begins - now())
        said = _text(book, f"tenant {talk.tenant}", talk.system)
        for number, turn in enumerate(talk.turns):
            await asyncio.sleep(turn.think)
            said += _text(book, f"{talk.number} {number}", turn.said)
            sent = now()
            if sent >= ends or len(said) / CHARS * 1.2 + turn.answer > most_tokens:
                return
            counts = held if sent >= warm else Held()
            stop = StopRules(max_tokens=turn.answer, ignore_eos=True)
            request = EngineRequest(f"{talk.number}-{number}", TextPrompt(said), sampling=GREEDY, stop=stop)
            try:
                async with asyncio.timeout(patience):
                    said += await _answer(client, request, counts)
            except TimeoutError:
                counts.failed("no answer in time")
                return
            except PenstockError as error:
                counts.failed(str(error))
                return

    await asyncio.gather(*(one(talk) for talk in talks if talk.begins < ends))
    return held


async def _answer(client: EngineClient, request: EngineRequest, counts: Held) -> str:
    """Return the text of an answer, and count its times and usage."""
    sent, first, text = time.monotonic(), 0.0, ""
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            match output:
                case ChoiceDelta():
                    first = first or time.monotonic()
                    text += output.text
                case RequestFinished(usage):
                    if not first:
                        raise EngineFault("an answer without a token")
                    counts.answered(first - sent, time.monotonic() - sent, usage)
                case RequestFailed(message):
                    raise EngineFault(message)
    return text


def _text(book: str, name: str, tokens: int) -> str:
    """Return a piece of the book of about `tokens` tokens, always the same for the same name."""
    length = tokens * CHARS
    begins = random.Random(name).randrange(len(book) - length)
    return book[begins : begins + length]
