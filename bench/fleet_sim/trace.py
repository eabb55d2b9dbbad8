"""Draws conversations that share prefixes from a seed: which tenant says what, and when.

Tenants have system prompts and Zipf-like shares of the conversations. Conversations arrive at random, now and then in a
burst, half of which belongs to one tenant. Each turn repeats everything said before. When the next turn comes depends
on when the answer ends, so a turn holds only the time to think and the lengths of the message and its answer.
"""

from __future__ import annotations

import math
import random
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["BLOCK", "DAY", "Conversation", "TraceConfig", "Turn", "conversations"]

BLOCK = 64
"""Tokens per block: more than the engine's 16, so that a simulation of thousands of requests takes minutes."""

DAY = 86_400.0
_OWN = 1 << 40
"""First made-up token of conversations; the tokens before it belong to system prompts."""
_MOST_TOKENS = 1 << 20
"""Number of made-up tokens that belong to each conversation or system prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Describes the conversations.

    Attributes:
        seconds: length of the time in which conversations begin.
        requests_per_second: turns a second on average, once as many conversations end as begin.
        tenants: number of tenants; each has a system prompt.
        zipf: the share of the tenant of rank r is in proportion to r to the power of minus this.
        system_tokens: median length of a system prompt.
        said_tokens: median length of a message.
        answer_tokens: median length of an answer.
        turns: mean number of turns of a conversation.
        think_seconds: mean time from an answer's end to the next message.
        burst_every: seconds from the beginning of a burst to the beginning of the next.
        burst_seconds: length of a burst.
        burst_factor: how many times as many conversations begin in a burst.
        night: how many conversations begin at the quietest moment of a day of `DAY` seconds, as a share of the most;
            1 for no night.
    """

    seconds: float
    requests_per_second: float
    tenants: int
    zipf: float = 1.1
    system_tokens: int = 1200
    said_tokens: int = 120
    answer_tokens: int = 150
    turns: float = 6.0
    think_seconds: float = 6.0
    burst_every: float = 60.0
    burst_seconds: float = 8.0
    burst_factor: float = 3.0
    night: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its length, the length of its answer, and the seconds of thinking before it (0.0 for the first)."""

    said: int
    answer: int
    think: float


@dataclass(slots=True)
class Conversation:
    """One conversation. Its prompt at a turn is the system prompt and everything said so far.

    Attributes:
        number: counts conversations from 0.
        tenant: the rank of its tenant.
        begins: second of the first message.
        system: length of the system prompt in tokens.
        turns: its turns in order.
    """

    number: int
    tenant: int
    begins: float
    system: int
    turns: list[Turn]
    _keys: list[bytes] = field(default_factory=list)

    def tokens(self, turn: int) -> int:
        """Return the length of the prompt of a turn."""
        return self.system + sum(each.said + each.answer for each in self.turns[:turn]) + self.turns[turn].said

    def prompt(self, turn: int) -> tuple[int, ...]:
        """Return made-up tokens of the prompt of a turn; a tenant's conversations share those of its system prompt."""
        tenant, own = self.tenant * _MOST_TOKENS, _OWN + self.number * _MOST_TOKENS
        tokens = self.tokens(turn)
        return (*range(tenant, tenant + self.system), *range(own + self.system, own + tokens))

    def answer(self, turn: int) -> tuple[int, ...]:
        """Return made-up tokens of a turn's answer, which later prompts repeat."""
        first = _OWN + self.number * _MOST_TOKENS + self.tokens(turn)
        return tuple(range(first, first + self.turns[turn].answer))

    def keys(self, tokens: int) -> list[bytes]:
        """Return the keys of the full blocks of its first `tokens` tokens; a tenant's conversations share the first."""
        shared = self.system // BLOCK
        for place in range(len(self._keys), tokens // BLOCK):
            owner = -1 - self.tenant if place < shared else self.number
            self._keys.append(struct.pack("<qI", owner, place))
        return self._keys[: tokens // BLOCK]


def conversations(config: TraceConfig, seed: int) -> list[Conversation]:
    """Draw conversations, in the order in which they begin."""
    rng = random.Random(seed)
    weights = list(accumulate((rank + 1) ** -config.zipf for rank in range(config.tenants)))
    systems = [_about(rng, config.system_tokens, 0.7, 64, 8000) for _ in range(config.tenants)]
    made: list[Conversation] = []
    for begins, hot in _beginnings(config, rng):
        tenant = hot if hot is not None and rng.random() < 0.5 else _draw(rng, weights)
        made.append(Conversation(len(made), tenant, begins, systems[tenant], _turns(config, rng)))
    return made


def _beginnings(config: TraceConfig, rng: random.Random) -> Iterator[tuple[float, int | None]]:
    """Yield when conversations begin, and, in a burst, the tenant that half of them belong to."""
    now, burst, hot = 0.0, -1, 0
    usual = config.requests_per_second / config.turns
    usual /= 1 + (config.burst_factor - 1) * config.burst_seconds / config.burst_every
    usual /= (1 + config.night) / 2  # the mean of the day's curve
    while True:
        now += rng.expovariate(usual * config.burst_factor)
        if now >= config.seconds:
            return
        number, into = divmod(now, config.burst_every)
        bursting = number > 0 and into < config.burst_seconds
        if number != burst:
            burst, hot = int(number), rng.randrange(config.tenants)
        if (bursting or rng.random() < 1 / config.burst_factor) and _awake(config.night, now, rng):
            yield now, hot if bursting else None


def _awake(night: float, now: float, rng: random.Random) -> bool:
    """Draw whether a conversation that would begin at the busiest moment, noon, begins now: the curve is a cosine."""
    if night >= 1.0:
        return True
    share = night + (1 - night) * (1 - math.cos(2 * math.pi * now / DAY)) / 2
    return rng.random() < share


def _turns(config: TraceConfig, rng: random.Random) -> list[Turn]:
    count = 1 + min(24, int(math.log(1 - rng.random()) / math.log(1 - 1 / config.turns)))
    return [
        Turn(
            _about(rng, config.said_tokens, 0.9, 4, 3000),
            _about(rng, config.answer_tokens, 0.7, 4, 1000),
            rng.expovariate(1 / config.think_seconds) if place else 0.0,
        )
        for place in range(count)
    ]


def _about(rng: random.Random, median: int, sigma: float, lowest: int, highest: int) -> int:
    return max(lowest, min(highest, int(rng.lognormvariate(math.log(median), sigma))))


def _draw(rng: random.Random, weights: list[float]) -> int:
    return min(len(weights) - 1, bisect_left(weights, rng.random() * weights[-1]))
