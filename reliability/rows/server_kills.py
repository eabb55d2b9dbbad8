"""R35: the whole server is killed under background responses; the next server completes them, exact to the byte."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

import httpx

from harness.requests import KINDS, mixed_requests
from harness.row import Depth, Measured, Progress, judge
from harness.server import Server, serving

__all__ = ["background_kills"]

RESPONSES = "/v1/responses"
MANY = 12
NEW_TOKENS = 96
PATIENCE = 300.0
_NOT_COMPARED = ("created_at", "usage")
"""Fields of a response that may differ: another server begins it at another time, with another part of it cached."""
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FORM = {"format": {"type": "json_schema", "name": "person", "schema": _SCHEMA}}


def _bodies() -> list[dict[str, Any]]:
    """Make random, greedy and structured responses in turn; none names a seed."""
    prompts = [each.body["prompt"] for each in mixed_requests(MANY, NEW_TOKENS, kinds=KINDS[:1])]
    ways: tuple[dict[str, Any], ...] = ({"temperature": 1.2}, {"temperature": 0}, {"temperature": 0.8, "text": _FORM})
    return [
        {"input": prompt, "max_output_tokens": NEW_TOKENS, "background": True} | ways[index % len(ways)]
        for index, prompt in enumerate(prompts)
    ]


def _accepted(server: Server, bodies: list[dict[str, Any]]) -> list[str]:
    """Return their ids. The idempotency key determines the id, and the id the seed: both are the same on any server."""
    ids = []
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for index, body in enumerate(bodies):
            answer = client.post(RESPONSES, json=body, headers={"Idempotency-Key": f"background-{index}"})
            ids.append(answer.raise_for_status().json()["id"])
    return ids


def _found(server: Server, response_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}{RESPONSES}/{response_id}", timeout=PATIENCE)
    body: dict[str, Any] = answer.json() if answer.status_code == 200 else {"status": f"answered {answer.status_code}"}
    return body


def _ended(server: Server, ids: list[str]) -> list[dict[str, Any]]:
    """Return the responses once none is in progress; after `PATIENCE`, a response may still say that it is."""
    last = time.monotonic() + PATIENCE
    found = [_found(server, each) for each in ids]
    while any(each["status"] == "in_progress" for each in found) and time.monotonic() < last:
        time.sleep(0.05)
        found = [_found(server, each) for each in ids]
    return found


def background_kills(depth: Depth, progress: Progress) -> Measured:
    """R35: a server accepts responses and is killed at any moment; so is the next one; a third server finishes."""
    trials = depth.of(20)
    progress.expect(trials)
    chance, misses, bodies = random.Random(3), [], _bodies()
    unfinished = 0
    with tempfile.TemporaryDirectory() as folder, serving("--journal", folder) as server:
        want = _ended(server, _accepted(server, bodies))
    if not all(each["status"] in ("completed", "incomplete") for each in want):
        raise RuntimeError(f"an undisturbed response did not come whole: {[each['status'] for each in want]}")
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            with serving("--journal", folder, ends_with=None) as server:
                ids = _accepted(server, bodies)
                unfinished += _killed_after(chance.uniform(0.0, 1.0), server, ids)
            with serving("--journal", folder, ends_with=None) as server:
                unfinished += _killed_after(chance.uniform(0.0, 1.0), server, ids)
            with serving("--journal", folder) as server:
                found = _ended(server, ids)
        misses += [miss for pair in zip(want, found, strict=True) if (miss := _difference(*pair))]
        progress.update()
    different = f"{len(misses) or 'none'} not to the byte"
    figure = f"{2 * trials} kills, {unfinished} times a response was unfinished, {different}"
    return judge(figure, misses, kills=2 * trials, accepted=trials * MANY, unfinished=unfinished)


def _killed_after(seconds: float, server: Server, ids: list[str]) -> int:
    """Kill the server; returns how many of the responses it had not finished."""
    time.sleep(seconds)
    left = [each for each in ids if _found(server, each)["status"] == "in_progress"]
    server.process.kill()
    server.process.wait()
    return len(left)


def _difference(want: dict[str, Any], found: dict[str, Any]) -> str:
    """Say how a response differs from the undisturbed one; "" if it does not."""
    for name, value in want.items():
        if name not in _NOT_COMPARED and found.get(name) != value:
            return f"{want['id']}: {name} is {str(found.get(name))[:100]}, not {str(value)[:100]}"
    return ""
