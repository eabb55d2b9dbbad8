"""R28: forms of answers and prompts that are meant to be costly: no other request waits for them."""

from __future__ import annotations

import asyncio
import json
import statistics
from math import inf
from typing import Any

from harness.canary import Canary, singing
from harness.client import Answer, ask, now
from harness.processes import processor_seconds, wait_until
from harness.requests import CHAT, COMPLETIONS, Request
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving

__all__ = ["BOMBS", "grammar_bombs"]

AT_ONCE = 8
GIANT_CHARS = 500_000
GIANTS = 16
MOST_TOKENS = 7900
VERDICT_SECONDS = 120.0
"""Most seconds to a verdict: forms wait for one another, and get the processor time that streams and chats leave."""
ANSWER_SECONDS = 12.0
"""Seconds of a long answer after which its client leaves."""
STALL_SECONDS = 0.2


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def _required(of: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a schema of thousands of tokens, with every name required: costly to compile, or to find an ending in."""
    names = {f"p{index}": of for index in range(count)}
    return {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}


def _bombs() -> tuple[dict[str, Any], ...]:
    text = {"type": "string", "pattern": "^(a|ab|abc)*(x+x+)+y$", "maxLength": 5000}
    many = {f"p{index}": {"type": "string", "maxLength": 900} for index in range(400)}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    tree = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    return (
        {"regex": "(a+)+$"},
        {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"},
        {"regex": "(a|a?)*b" * 200},
        {"regex": ".{1,1000000}"},
        {"regex": "(?:" + "|".join(f"{'x' * (index % 40)}{index}" for index in range(6000)) + ")+"},
        {"regex": r"([\u0000-\uffff]*[^\n]{200,400}){50}"},
        {"json": {"enum": [f"value {index}" for index in range(5000)]}},
        {"json": _nested(400)},
        {"json": loop},
        {"json": tree},
        {"json": {"allOf": [text] * 40}},
        {"json": {"oneOf": [{"type": "object", "properties": many} for _ in range(3)]}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}},
        {"json": {"type": "string", "minLength": 900_000, "maxLength": 1_000_000}},
        {"json": {"type": "integer", "multipleOf": 999_983, "minimum": 10**12}},
        {"grammar": 'start: a\na: a a a a a a | "x"\n'},
        {"grammar": "start: " + " ".join(f"r{i}" for i in range(300)) + "\n" + _lark_rules(300)},
        {"grammar": 'root ::= root root | "a"?\n'},
        {"choice": [f"{'choice ' * 8}{index}" for index in range(990)]},
        {"regex": "((.{0,40}x){0,40}y){0,40}"},
        {"json": _required({"type": "string", "maxLength": 30}, 900)},
        {"json": _required({"type": "string", "format": "uri"}, 800)},
        {"json": _required({"type": "object", "properties": {"q": {"type": "number"}, "r": {"type": "number"}}}, 400)},
        {"json": _required({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 99}, 500)},
    )


def _lark_rules(count: int) -> str:
    return "".join(f'r{i}: r{(i + 1) % count}? "x{i}" | r{(i + 7) % count}* "y"\n' for i in range(count))


BOMBS = _bombs()


def grammar_bombs(depth: Depth, progress: Progress) -> Measured:
    """Send eight forms at once, changed each time so that none is cached, beside a stream and chats without a form."""
    rounds = depth.of(10)
    progress.expect(rounds * len(BOMBS))
    with serving(*APART, "--kv-cache-memory", "256MiB") as server:
        return asyncio.run(_measure(server, rounds, progress))


async def _measure(server: Server, rounds: int, progress: Progress) -> Measured:
    chat = Canary(Request("chat", CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1}))
    for _ in range(8):
        await chat.sing(server.url)
    alone, chat.firsts = statistics.median(chat.firsts), []
    body = {"prompt": "A stream", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    stream, answers = Canary(Request("stream", COMPLETIONS, body)), []
    await stream.sing(server.url)
    still, stream.gaps = max(stream.gaps), []
    async with singing(stream, server.url), singing(chat, server.url, pause=0.3):
        room = asyncio.Semaphore(AT_ONCE)
        answers = await asyncio.gather(
            *(_bomb(server, room, form, round_, progress) for round_ in range(rounds) for form in BOMBS)
        )
        answers += await asyncio.gather(*(_giant(server, room, number) for number in range(GIANTS)))
    await asyncio.to_thread(wait_until, server.idle, 60.0)
    await asyncio.sleep(1.0)
    used = processor_seconds(server.pid)
    await asyncio.sleep(1.0)
    used = processor_seconds(server.pid) - used
    return _judge_bombs(answers, stream, chat, alone, still, used)


async def _bomb(
    server: Server, room: asyncio.Semaphore, form: dict[str, Any], round_: int, progress: Progress
) -> tuple[float, Answer]:
    """Send a form for the first time; returns the seconds to its verdict: the first byte of an answer or a refusal."""
    anew = json.loads(json.dumps(form).replace("x", f"x{round_}x")) if round_ else form
    async with room:
        began = now()
        long = "required" in str(form)  # such a document cannot have fewer tokens
        body = {"prompt": "x", "structured_outputs": anew, "stream": True, "temperature": 1, "seed": round_}
        body["max_tokens"] = MOST_TOKENS if long else 8
        leaves = ANSWER_SECONDS if long else inf
        answer = await ask(server.url, COMPLETIONS, body, seconds=VERDICT_SECONDS, leaves_after=leaves)
        if long and answer.events:
            answer.broken = ""  # its client left
        progress.update()
        return (answer.began or answer.ended) - began, answer


async def _giant(server: Server, room: asyncio.Semaphore, number: int) -> tuple[float, Answer]:
    """Send a prompt of the greatest length that is tokenised; returns the seconds to its tokens, or to a refusal."""
    async with room:
        began = now()
        answer = await ask(
            server.url, "/tokenize", {"prompt": f"{number} " + "word " * (GIANT_CHARS // 5)}, seconds=120
        )
        return answer.ended - began, answer


def _judge_bombs(
    answers: list[tuple[float, Answer]], stream: Canary, chat: Canary, alone: float, still: float, used: float
) -> Measured:
    misses = [*stream.wrong, *chat.wrong]
    misses += [f"a form: {each.describe()}" for _, each in answers if each.status >= 500 and each.status != 503]
    misses += [f"a form: {each.describe()}" for _, each in answers if each.broken]
    slowest, gap, beside = max(each for each, _ in answers), max(stream.gaps), statistics.median(chat.firsts)
    if gap > max(STALL_SECONDS, still):
        misses.append(f"a stream stood still for {gap * 1000:.0f} ms")
    if beside > 2 * alone:
        misses.append(
            f"a chat's first token comes after {beside * 1000:.0f} ms, alone after {alone * 1000:.0f} ms (medians)"
        )
    if used > 0.2:
        misses.append(f"{used:.1f} s of a processor are used a second after the last")
    refused = sum(each.status == 400 for _, each in answers)
    figure = (
        f"{len(answers)} forms, {refused} refused, the slowest verdict after {slowest:.1f} s; chat's first token"
        f" {beside / alone:.1f} times alone; longest pause of a stream {gap * 1000:.0f} ms ({still * 1000:.0f} alone)"
    )
    values = {"chat_alone": alone, "chat_beside": beside, "stream_gap": gap, "stream_gap_alone": still}
    return judge(figure, misses, **values, slowest=slowest, processor_after=used)
