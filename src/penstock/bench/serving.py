"""A load test of any server that speaks OpenAI's streaming API: sends calls when they are due and times every event.

An event counts as content if it carries text, reasoning or a tool call; the chunk that only opens the message does not.
Times are taken when bytes are read, before they are parsed. A slow answer never delays the next call, unless
`concurrency` limits how many run at once. Figures are computed in `latency`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from penstock.bench.event_stream import HttpFailure, Target, stream_events
from penstock.bench.workload import Call

__all__ = ["ENDPOINTS", "RequestOptions", "Outcome", "drive"]

ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}
CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of every request to the server.

    Attributes:
        endpoint: `completions` (prompts as token ids: lengths are exact) or `chat` (one user message of as many
            single letters as the prompt has tokens; tokenizer and template decide how many tokens they become).
        ignore_eos: ask for exactly the wanted number of tokens, by an extension that most engines know.
        headers: added to every request, such as `Authorization`.
        timeout: seconds after which a request counts as failed.
    """

    target: Target
    model: str
    endpoint: str = "completions"
    ignore_eos: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0

    def body(self, call: Call) -> bytes:
        """The JSON body of a call's request."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": call.output_tokens, "temperature": 0}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": " ".join(chr(97 + token % 26) for token in call.prompt)}]
        else:
            fields["prompt"] = list(call.prompt)
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a call. Times are in seconds after the start of the test.

    Attributes:
        due: when the call was to be sent.
        sent: when it was sent; later than `due` if the concurrency was limited or the load generator too slow.
        content: the time of every event that carried content.
        ended: the end of the answer.
        prompt_tokens, output_tokens: as the server counted them; if it does not, the prompt's length and the number of
            events with content.
        counted: whether the server counted the output tokens.
        cached_tokens: prompt tokens that the server had in its prefix cache; None if it does not say.
        error: why it failed, or "".
    """

    due: float
    sent: float
    content: tuple[float, ...]
    ended: float
    prompt_tokens: int
    output_tokens: int
    counted: bool
    error: str = ""
    cached_tokens: int | None = None


async def drive(
    calls: Sequence[Call],
    options: RequestOptions,
    concurrency: int = 0,
    on_outcome: Callable[[Outcome], object] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """Send every call when it is due; return outcomes in the order of the calls. A failed call does not end the test.

    Args:
        calls: the workload.
        options: the options of every request.
        concurrency: most requests in flight at once; 0 for no limit.
        on_outcome: called as each call ends, for a progress bar.
        now: a monotonic clock, in seconds.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    bodies = [options.body(call) for call in calls]  # written before the clock starts
    started = now()

    def elapsed() -> float:
        return now() - started

    async def attend(call: Call, body: bytes) -> Outcome:
        await asyncio.sleep(call.offset - elapsed())
        async with gate:
            outcome = await _ask(options, call, body, elapsed)
        if on_outcome is not None:
            on_outcome(outcome)
        return outcome

    return list(await asyncio.gather(*(attend(call, body) for call, body in zip(calls, bodies, strict=True))))


async def _ask(options: RequestOptions, call: Call, body: bytes, elapsed: Callable[[], float]) -> Outcome:
    sent = elapsed()
    answer = _Answer()
    error = ""
    try:
        async with asyncio.timeout(options.timeout):
            async for moment, data in stream_events(
                options.target, ENDPOINTS[options.endpoint], options.headers, body, elapsed
            ):
                answer.take(moment, data)
        if not answer.content:
            error = "no content in the answer"
    except TimeoutError:
        error = f"no end within {options.timeout:g} s"
    except HttpFailure as failure:
        error = str(failure)
    except OSError as failure:
        error = f"no connection: {failure.strerror or failure}"
    usage = answer.usage
    return Outcome(
        due=call.offset,
        sent=sent,
        content=tuple(answer.content),
        ended=elapsed(),
        prompt_tokens=usage.get("prompt_tokens", len(call.prompt)),
        output_tokens=usage.get("completion_tokens", len(answer.content)),
        counted="completion_tokens" in usage,
        error=error,
        cached_tokens=answer.cached_tokens,
    )


class _Answer:
    """The event times and usage of one answer; owned by the `_ask` that reads it."""

    def __init__(self) -> None:
        self.content: list[float] = []
        self.usage: dict[str, int] = {}
        self.cached_tokens: int | None = None

    def take(self, moment: float, data: str) -> None:
        """Note an event.

        Raises:
            HttpFailure: the event reports that the answer failed, or is not a JSON object.
        """
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise HttpFailure("an event that is not JSON") from error
        if not isinstance(chunk, dict):
            raise HttpFailure("an event that is not an object")
        if chunk.get("error"):
            raise HttpFailure(f"failed: {_message(chunk['error'])}")
        if any(has_content(choice) for choice in chunk.get("choices") or ()):
            self.content.append(moment)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = {name: count for name, count in usage.items() if type(count) is int}
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = cached if type(cached) is int else None


def has_content(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk's choice carries content; a role, a finish reason or an empty string is not content."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(key) for key in CONTENT_KEYS)


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200]
