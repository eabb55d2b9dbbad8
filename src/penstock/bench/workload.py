"""What a load test sends, and when: arrivals, prompt lengths, shared prefixes, traces.

The whole workload is drawn from a seed before the first request leaves, so that the same options send the same bytes at
the same offsets to any server. Knows neither HTTP nor clocks.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError

__all__ = ["Arrivals", "Call", "Lengths", "make_calls", "read_trace"]

TRACE_KEYS = ("offset", "prompt_tokens", "output_tokens")
HASHED_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
"""Of the traces that Alibaba published of Qwen's service (github.com/alibaba-edu/qwen-bailian-usagetraces-anon)."""

HASHED_BLOCK = 16
"""Tokens that each of a prompt's `hash_ids` stands for: equal ids, equal tokens."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to come.

    Attributes:
        offset: seconds after the start at which it is due.
        prompt: its token ids.
        output_tokens: how many tokens it asks for.
    """

    offset: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn uniformly from `lowest..highest`, both included."""

    lowest: int
    highest: int

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """`128`, or `64:256` for a range.

        Raises:
            ConfigError: naming `option`.
        """
        match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
        if match is None:
            raise ConfigError(option, f"{text!r} is neither a number such as 128 nor a range such as 64:256")
        lowest, highest = int(match[1]), int(match[2] or match[1])
        if not 1 <= lowest <= highest:
            raise ConfigError(option, f"{text!r} must be at least 1, and a range must not fall")
        return cls(lowest, highest)

    def draw(self, randomness: random.Random) -> int:
        """One of them."""
        return randomness.randint(self.lowest, self.highest)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come.

    Attributes:
        rate: requests a second; 0 sends all at once.
        poisson: exponential gaps with that mean (a Poisson process) instead of equal ones.
    """

    rate: float = 0.0
    poisson: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate < float("inf"):
            raise ConfigError("rate", f"must be a number of requests a second, at least 0, got {self.rate}")
        if self.poisson and not self.rate:
            raise ConfigError("poisson", "needs --rate, the mean number of requests a second")

    def offsets(self, count: int, randomness: random.Random) -> Iterator[float]:
        """Seconds after the start, rising; the first is 0."""
        at = 0.0
        for _ in range(count):
            yield at
            if self.rate:
                at += randomness.expovariate(self.rate) if self.poisson else 1 / self.rate


@dataclass(frozen=True, slots=True)
class _Size:
    """What a trace tells of a call; `blocks` name what the prompt begins with, in tokens of `HASHED_BLOCK`."""

    offset: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def make_calls(
    count: int,
    arrivals: Arrivals,
    prompts: Lengths,
    outputs: Lengths,
    shared_prefix: int,
    vocab_size: int,
    seed: int,
    prefixes: int = 1,
) -> list[Call]:
    """Random prompts at random or regular times.

    Args:
        count: how many.
        arrivals: when.
        prompts: lengths of the prompts.
        outputs: numbers of tokens asked for.
        shared_prefix: tokens that prompts begin with alike, before the `prompts` tokens of their own.
        vocab_size: token ids are drawn uniformly from those below it.
        seed: arrivals, lengths and contents each have their own stream of randomness, so changing the rate keeps the
            prompts.
        prefixes: how many different shared prefixes there are; each call draws one of them.
    """
    lengths = random.Random(f"{seed}/lengths")  # noqa: S311 (a workload, not a secret)
    offsets = arrivals.offsets(count, random.Random(f"{seed}/arrivals"))  # noqa: S311
    sizes = [_Size(offset, prompts.draw(lengths), outputs.draw(lengths)) for offset in offsets]
    return _with_contents(sizes, shared_prefix, vocab_size, seed, prefixes)


def read_trace(
    path: Path, shared_prefix: int, vocab_size: int, seed: int, prefixes: int = 1, speed: float = 1.0
) -> list[Call]:
    """Calls of a recorded workload: JSON lines of `offset` (seconds), `prompt_tokens` and `output_tokens`.

    Only sizes and times are in a trace; contents are drawn as in `make_calls`. Lines may also be of the kind that has
    `HASHED_KEYS`; their prompts begin alike where their hashes do. `speed` 2 sends them in half the time.

    Raises:
        ConfigError: naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("trace", f"{path} cannot be read: {error}") from error
    sizes = [_trace_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not sizes:
        raise ConfigError("trace", f"{path} holds no requests")
    paced = [replace(size, offset=size.offset / speed) for size in sorted(sizes, key=lambda size: size.offset)]
    return _with_contents(paced, shared_prefix, vocab_size, seed, prefixes)


def _trace_line(line: str, place: str) -> _Size:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError("trace", f"{place} is not JSON: {error}") from error
    if isinstance(record, dict) and set(HASHED_KEYS) <= set(record):
        keys, blocks = HASHED_KEYS[:3], record["hash_ids"]
        if type(blocks) is not list or not all(type(block) is int for block in blocks):
            raise ConfigError("trace", f"{place}: hash_ids must be a list of whole numbers")
    elif isinstance(record, dict) and set(record) == set(TRACE_KEYS):
        keys, blocks = TRACE_KEYS, []
    else:
        raise ConfigError("trace", f"{place} must be an object of {', '.join(TRACE_KEYS)}, and nothing else")
    offset, prompt_tokens, output_tokens = (record[key] for key in keys)
    if type(offset) not in (int, float) or not 0 <= offset < float("inf"):
        raise ConfigError("trace", f"{place}: {keys[0]} must be a number of seconds, at least 0")
    for key, value in zip(keys[1:], (prompt_tokens, output_tokens), strict=True):
        if type(value) is not int or value < 1:
            raise ConfigError("trace", f"{place}: {key} must be a whole number, at least 1")
    return _Size(float(offset), prompt_tokens, output_tokens, tuple(blocks))


def _with_contents(sizes: Sequence[_Size], shared: int, vocab_size: int, seed: int, prefixes: int) -> list[Call]:
    contents = random.Random(f"{seed}/contents")  # noqa: S311 (a workload, not a secret)
    choices = random.Random(f"{seed}/prefixes")  # noqa: S311
    common = [_tokens(contents, shared, vocab_size) for _ in range(prefixes)]
    calls = []
    for size in sizes:
        named = _named_tokens(size, vocab_size, seed)
        own = named + _tokens(contents, size.prompt_tokens - len(named), vocab_size)
        calls.append(Call(size.offset, choices.choice(common) + own, size.output_tokens))
    return calls


def _named_tokens(size: _Size, vocab_size: int, seed: int) -> tuple[int, ...]:
    """The tokens that a prompt's blocks stand for, cut to its length."""
    found: tuple[int, ...] = ()
    for block in size.blocks[: -(-size.prompt_tokens // HASHED_BLOCK)]:
        found += _tokens(random.Random(f"{seed}/block/{block}"), HASHED_BLOCK, vocab_size)  # noqa: S311
    return found[: size.prompt_tokens]


def _tokens(randomness: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(randomness.randrange(vocab_size) for _ in range(count))
