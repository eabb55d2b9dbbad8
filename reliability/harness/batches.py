"""Sends many requests at once, and compares their answers with what they should be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from harness.client import Answer, ask, said
from harness.requests import Request
from harness.server import Server

__all__ = ["answers_to", "difference", "differences", "gather"]


async def gather(
    url: str, requests: Sequence[Request], at_once: int = 64, headers: Mapping[str, str] | None = None
) -> list[Answer]:
    """Return the streamed answers to `requests`, with at most `at_once` under way at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(request: Request) -> Answer:
        async with room:
            return await ask(url, request.path, request.streamed(), headers)

    return await asyncio.gather(*(one(each) for each in requests))


def answers_to(server: Server, requests: Sequence[Request], at_once: int = 64) -> list[Answer]:
    """Do the same outside an event loop, where nothing should go wrong.

    Raises:
        RuntimeError: an answer is incomplete.
    """
    answers = asyncio.run(gather(server.url, requests, at_once))
    for request, answer in zip(requests, answers, strict=True):
        if not answer.finished:
            raise RuntimeError(f"an undisturbed answer ({request.kind}) did not come whole: {answer.describe()}")
    return answers


def difference(request: Request, want: dict[str, Any], answer: Answer) -> str:
    """Say how an answer differs from what it should say; "" if it does not."""
    if not answer.finished:
        return f"{request.kind}: did not finish: {answer.describe()}"
    got = said(answer)
    if got == want:
        return ""
    for index, choice in want["choices"].items():
        other = got["choices"].get(index, {})
        for name, value in choice.items():
            if other.get(name) != value:
                return f"{request.kind}: {name} of choice {index} is {_short(other.get(name))}, not {_short(value)}"
    return f"{request.kind}: {_short(got['usage'])}, not {_short(want['usage'])}"


def differences(requests: Sequence[Request], want: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> list[str]:
    """Return a sentence for each answer that differs from what it should say."""
    return [found for each in zip(requests, want, answers, strict=True) if (found := difference(*each))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:60]} ... {text[-50:]}"
