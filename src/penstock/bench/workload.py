"""What a load test sends, and when: arrivals, prompt lengths, shared prefixes, traces.

The whole workload is drawn from a seed before the first request is sent, so that the same options send the same bytes
at the same offsets to any server. Does not know HTTP or clocks.
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
"""Keys of Alibaba's published traces of Qwen's service (github.com/alibaba-edu/qwen-bailian-usagetraces-anon)."""

HASHED_BLOCK = 16
"""Tokens that each of a prompt's `hash_ids` stands for: equal ids, equal tokens."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send.

    Attributes:
        offset: when it is due, in seconds after the start.
        prompt: the prompt's token ids.
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
        """Parse `128`, or `64:256` for a range.

        Raises:
            ConfigError: the text is neither; names `option`.
        """
        match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
        if match is None:
            raise ConfigError(option, f"{text!r} is neither a number such as 128 nor a range such as 64:256")
        lowest, highest = int(match[1]), int(match[2] or match[1])
        if not 1 <= lowest <= highest:
            raise ConfigError(option, f"{text!r} must be at least 1, and a range must not fall")
        return cls(lowest, highest)

    def draw(self, randomness: random.Random) -> int:
        """Draw one length."""
        return randomness.randint(self.lowest, self.highest)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive.

    Attributes:
        rate: requests per second; 0 sends all at once.
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
        """Arrival times in seconds after the start, ascending; the first is 0."""
        at = 0.0
        for _ in range(count):
            yield at
            if self.rate:
                at += randomness.expovariate(self.rate) if self.poisson else 1 / self.rate


@dataclass(frozen=True, slots=True)
class _Size:
    """A call's sizes in a trace; `blocks` identify the prompt's first blocks of `HASHED_BLOCK` tokens."""

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
    """Draw random prompts at random or regular times.

    Args:
        count: number of calls.
        arrivals: when they arrive.
        prompts: lengths of the prompts.
        outputs: numbers of tokens asked for.
        shared_prefix: length of the prefix that prompts share, before the `prompts` tokens of their own.
        vocab_size: token ids are drawn uniformly from `range(vocab_size)`.
        seed: arrivals, lengths and contents each have their own random stream, so changing the rate keeps the prompts.
        prefixes: number of different shared prefixes; each call draws one of them.
    """
    lengths = random.Random(f"{seed}/lengths")  # noqa: S311 (a workload, not a secret)
    offsets = arrivals.offsets(count, random.Random(f"{seed}/arrivals"))  # noqa: S311
    sizes = [_Size(offset, prompts.draw(lengths), outputs.draw(lengths)) for offset in offsets]
    return _with_contents(sizes, shared_prefix, vocab_size, seed, prefixes)


def read_trace(
    path: Path, shared_prefix: int, vocab_size: int, seed: int, prefixes: int = 1, speed: float = 1.0
) -> list[Call]:
    """Read the calls of a recorded workload: JSON lines of `offset` (seconds), `prompt_tokens` and `output_tokens`.

    A trace has only sizes and times; contents are drawn as in `make_calls`. Lines may also have `HASHED_KEYS`; prompts
    then share a prefix if their hashes do. `speed` 2 sends the calls in half the time.

    Raises:
        ConfigError: the trace cannot be read, is empty or has an invalid line; names the file, and the line if one is
            invalid.
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
    """The tokens that a prompt's blocks stand for, cut to the prompt's length."""
    found: tuple[int, ...] = ()
    for block in size.blocks[: -(-size.prompt_tokens // HASHED_BLOCK)]:
        found += _tokens(random.Random(f"{seed}/block/{block}"), HASHED_BLOCK, vocab_size)  # noqa: S311
    return found[: size.prompt_tokens]


def _tokens(randomness: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(randomness.randrange(vocab_size) for _ in range(count))
