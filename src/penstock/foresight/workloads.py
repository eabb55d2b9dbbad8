"""Workloads: when requests arrive, how long they are, and which prefixes they share. Read from files or drawn.

Formats of files, recognised by their first line; any may be compressed with gzip:

    a record of `penstock serve --record`: the requests themselves
    Azure LLM inference traces of 2023 and 2024: CSV of TIMESTAMP, ContextTokens, GeneratedTokens
    Mooncake: JSON lines of timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
    Qwen-Bailian: JSON lines with chat_id, timestamp (s), input_length, output_length, hash_ids (blocks of 16 tokens)
    `penstock bench serve --trace`: JSON lines of offset (s), prompt_tokens, output_tokens

A trace holds no tokens. Made-up tokens are equal where the trace's hashes are equal, and different everywhere else;
they are not from any vocabulary. Hashes do not tell what an answer was: a later prompt that repeats an answer finds
only the blocks of the earlier prompt in the cache.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.contract.errors import SetupError
from penstock.contract.request import SequenceRequest, StopRules
from penstock.foresight.arrivals import Arrival
from penstock.foresight.files import names_file, read_lines
from penstock.foresight.recorded import read_record

__all__ = ["DRAWN", "Drawn", "Size", "Workload", "arrivals_of", "read_workload"]

_MOONCAKE_BLOCK = 512
_BAILIAN_BLOCK = 16
_OWN = 1 << 61
"""Made-up tokens that only one request has begin here."""

_MOST_TOKENS = 1 << 24
"""The most tokens of one request; as many made-up tokens are reserved for each."""


@dataclass(frozen=True, slots=True)
class Size:
    """One request of a workload.

    Attributes:
        at: when it arrives, in seconds after the first request.
        prompt_tokens, output_tokens: its lengths, at least 1.
        blocks: names of its prompt's leading blocks; equal names in two prompts mean equal tokens.
        block_tokens: tokens in each of these blocks.
        tenant: the tenant that it belongs to.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 1
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of time.

    Attributes:
        name: what it is called in reports.
        sizes: what a trace says, or what was drawn.
        recorded: the requests themselves, if they come from a record; then `sizes` is empty.
        rate: requests a second, on average.
    """

    name: str
    sizes: Sequence[Size]
    recorded: Sequence[Arrival] = ()

    @property
    def rate(self) -> float:
        """Requests a second on average; infinity if all arrive at once."""
        times = [each.at for each in self.recorded or self.sizes]
        over = times[-1] - times[0]
        return (len(times) - 1) / over if over > 0 else math.inf

    def __len__(self) -> int:
        return len(self.recorded or self.sizes)

    def arrivals(self, max_model_len: int, speed: float = 1.0) -> Iterator[Arrival]:
        """The requests at `speed` times their rate, each cut to what a model's context holds."""
        if not self.recorded:
            yield from arrivals_of(self.sizes, max_model_len, speed)
            return
        for each in self.recorded:
            request, at = each.request, each.at / speed
            prompt = request.prompt[: max_model_len - 1]
            stop = replace(request.stop, max_tokens=min(request.stop.max_tokens, max_model_len - len(prompt)))
            yield replace(each, at=at, request=replace(request, arrival=at, prompt=prompt, stop=stop))


def arrivals_of(sizes: Iterable[Size], max_model_len: int, speed: float = 1.0) -> Iterator[Arrival]:
    """Requests of these sizes with made-up tokens.

    Prompts are cut to one token less than the context, answers to the room that is left after the prompt.
    """
    for number, size in enumerate(sizes):
        prompt_tokens = min(size.prompt_tokens, max_model_len - 1)
        output_tokens = min(size.output_tokens, max_model_len - prompt_tokens)
        stop, at = StopRules(max_tokens=output_tokens), size.at / speed
        prompt = _prompt(size, prompt_tokens, number)
        yield Arrival(at, SequenceRequest(str(number), prompt, stop=stop, tenant=size.tenant, arrival=at))


def _prompt(size: Size, count: int, number: int) -> tuple[int, ...]:
    each = size.block_tokens
    named = size.blocks[: -(-count // each)]
    shared = chain.from_iterable(range(name * each, (name + 1) * each) for name in named)
    first = _OWN + number * _MOST_TOKENS
    return tuple(chain(shared, range(first, first + max(0, count - len(named) * each))))[:count]


def read_workload(path: Path, most: int = 0, progress: Callable[[int], object] = lambda count: None) -> Workload:  # noqa: ARG005
    """Read a workload from a file; see the module for formats.

    Args:
        path: the file.
        most: the most requests to read, from the beginning of the file; 0 for all.
        progress: as in `read_lines`.

    Raises:
        SetupError: the file cannot be read, has no known format, is empty or has an invalid line; names the line.
    """
    lines = read_lines(path, progress)
    first = next(lines, "")
    again = chain([first], lines)
    if '"penstock_trace"' in first:
        with names_file(path):
            run = read_record(again)
        return Workload(path.name, (), run.arrivals[: most or None])
    reader = _azure if first.strip().lower().startswith("timestamp,") else _json_sizes
    sizes: list[Size] = []
    for place, size in enumerate(reader(again, path), start=1):
        sizes.append(size)
        if place == most:
            break
    if not sizes:
        raise SetupError(f"{path}: it holds no requests")
    sizes.sort(key=lambda size: size.at)
    began = sizes[0].at
    return Workload(path.name, [replace(size, at=size.at - began) for size in sizes])


def _azure(lines: Iterable[str], path: Path) -> Iterator[Size]:
    table = csv.reader(lines)
    names = [name.strip() for name in next(table)]
    if names[:3] != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        raise SetupError(f"{path}: line 1: the columns of an Azure trace are TIMESTAMP,ContextTokens,GeneratedTokens")
    for number, row in enumerate(table, start=2):
        if not row:
            continue
        try:
            at = datetime.fromisoformat(row[0].strip())
            lengths = int(row[1]), int(row[2])
        except (ValueError, IndexError) as error:
            raise SetupError(f"{path}: line {number}: not a time and two numbers of tokens: {error}") from error
        # A time without a zone is taken as UTC: only differences count, and no hour is missing there.
        seconds = at.timestamp() if at.tzinfo else (at - datetime(1970, 1, 1)).total_seconds()
        yield _size(seconds, *lengths, (), 1, f"{path}: line {number}")


def _json_sizes(lines: Iterable[str], path: Path) -> Iterator[Size]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise SetupError(f"{place}: neither a record, nor an Azure trace, nor JSON: {error}") from error
        if not isinstance(record, dict):
            raise SetupError(f"{place}: not an object")
        yield _json_size(record, place)


def _json_size(record: dict[str, Any], place: str) -> Size:
    if "offset" in record:
        names = ("offset", "prompt_tokens", "output_tokens")
        return _size(*_numbers(record, names, place), (), 1, place)
    at, prompt_tokens, output_tokens = _numbers(record, ("timestamp", "input_length", "output_length"), place)
    blocks = record.get("hash_ids", [])
    if type(blocks) is not list or not all(type(block) is int and 0 <= block < 1 << 40 for block in blocks):
        raise SetupError(f"{place}: hash_ids: not a list of whole numbers from 0 on")
    if "chat_id" in record:
        return _size(at, prompt_tokens, output_tokens, tuple(blocks), _BAILIAN_BLOCK, place)
    return _size(at / 1000, prompt_tokens, output_tokens, tuple(blocks), _MOONCAKE_BLOCK, place)


def _numbers(record: dict[str, Any], names: Sequence[str], place: str) -> tuple[float, int, int]:
    values = [record.get(name) for name in names]
    if type(values[0]) not in (int, float):
        raise SetupError(f"{place}: {names[0]}: not a number: {values[0]!r}")
    for name, value in zip(names[1:], values[1:], strict=True):
        if type(value) is not int:
            raise SetupError(f"{place}: {name}: not a number of tokens: {value!r}")
    at, prompt_tokens, output_tokens = values
    return float(at), int(prompt_tokens), int(output_tokens)  # type: ignore[arg-type]  # as was just tested


def _size(at: float, prompt: int, output: int, blocks: tuple[int, ...], block_tokens: int, place: str) -> Size:
    if not math.isfinite(at):
        raise SetupError(f"{place}: its time is not finite")
    if not (0 <= prompt < _MOST_TOKENS and 0 <= output < _MOST_TOKENS):
        raise SetupError(f"{place}: {prompt} and {output} tokens: not within 0..{_MOST_TOKENS - 1}")
    return Size(at, max(1, prompt), max(1, output), blocks, block_tokens)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A workload to draw: arrivals at random (a Poisson process), lengths from lognormal distributions.

    Attributes:
        prompt, output: median lengths in tokens.
        prompt_sigma, output_sigma: standard deviations of their logarithms.
        prefixes: number of shared prefixes, of which each prompt has one; 0 for none.
        prefix_tokens: length of each prefix.
    """

    prompt: int
    output: int
    prompt_sigma: float = 0.8
    output_sigma: float = 0.7
    prefixes: int = 0
    prefix_tokens: int = 0

    def draw(self, name: str, rate: float, count: int, seed: int) -> Workload:
        """Draw `count` requests, `rate` a second; another rate gives the same requests at other times."""
        gaps, lengths = random.Random(f"{seed}/gaps"), random.Random(f"{seed}/lengths")  # noqa: S311 (no secrets)
        sizes, at = [], 0.0
        for _ in range(count):
            own = _length(lengths, self.prompt, self.prompt_sigma)
            output = _length(lengths, self.output, self.output_sigma)
            shared: tuple[int, ...] = ()
            if self.prefixes:
                first = lengths.randrange(self.prefixes) * self.prefix_tokens
                shared = tuple(range(first, first + self.prefix_tokens))
            sizes.append(Size(at, len(shared) + own, output, shared))
            at += gaps.expovariate(rate)
        return Workload(name, sizes)


DRAWN = {
    "chat": Drawn(prompt=160, output=100),
    "long": Drawn(prompt=1000, output=24, prompt_sigma=0.5),
    "shared": Drawn(prompt=48, output=64, prefixes=8, prefix_tokens=512),
}
"""Workloads that are drawn, by name: conversations, long prompts with short answers, and prompts that share prefixes of
512 tokens."""


def _length(rng: random.Random, median: int, sigma: float) -> int:
    """Draw a length of at most eight times the median, so that one request does not dominate all others."""
    return max(1, min(8 * median, round(rng.lognormvariate(math.log(median), sigma))))
