"""Makes a day of a fleet: drawn to match what is published about such days, or read from a trace.

The drawn day follows these sources:

- The day's curve: the load of services falls at night (Stojkovic et al., "DynamoLLM", 2024, plots it for two of
  Azure's). Here the curve is a cosine whose peak, at noon, is 2.3 times the load at midnight.
- Lengths: half of Azure's conversation prompts have up to 1,020 tokens, half of the answers up to 129 (Patel et al.,
  "Splitwise", 2024, the trace of 2023). In the drawn day half have up to about 1,000 and 128.
- Shared prefixes: with endless memory, 62 % of the prompt tokens of a chat service would hit the prefix cache, most of
  them within ten minutes; and few prefixes are shared by many requests (Wang et al., "KVCache Cache in the Wild", 2025,
  the trace that is published as Qwen-Bailian's). The drawn day has two messages a conversation, four minutes from an
  answer to the next message, and system prompts with Zipf-like shares; 65 % of its prompt tokens could hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet_sim.replica import ReplicaConfig
from fleet_sim.trace import BLOCK, DAY, TraceConfig, Turn
from penstock.core.block_keys import KeyChain, root_key
from penstock.foresight.arrivals import Arrival
from penstock.foresight.workloads import Workload

__all__ = ["DAY_REPLICA", "TracedMessages", "drawn_day"]

DAY_REPLICA = ReplicaConfig(
    tokens_per_second=100.0,
    slots=16,
    blocks=1000,
    token_seconds=0.042,
    step_tokens=256,
    step_target_ms=400,
    patience=120.0,
)
"""A model of eight billion weights on eight processors: an eighth of the prefill and decode speed of a model of one
billion on two (`bench/results/2026-11-24-compare-llama-1b-q4_k_m.json`), times four for the processors."""


def drawn_day(requests: int) -> TraceConfig:
    """Return a day with about `requests` messages."""
    return TraceConfig(
        seconds=DAY,
        requests_per_second=requests / DAY,
        tenants=5000,
        system_tokens=300,
        said_tokens=280,
        answer_tokens=129,
        turns=2.0,
        think_seconds=240.0,
        burst_every=3600.0,
        burst_seconds=300.0,
        burst_factor=2.0,
        night=1 / 2.3,
    )


class _Message:
    """One request of a trace, as a conversation of one turn."""

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.begins = arrival.at
        self.turns = (Turn(len(arrival.request.prompt), arrival.request.stop.max_tokens, 0.0),)
        self._arrival = arrival
        request = arrival.request
        self._chain = KeyChain(root_key(b"", request.cache_salt, request.adapter_digest), BLOCK)
        self._chain.follow(request.prompt)

    def tokens(self, turn: int) -> int:  # noqa: ARG002 (there is one)
        """See `fleet_sim.simulation.Talk`."""
        return len(self._arrival.request.prompt)

    def prompt(self, turn: int) -> tuple[int, ...]:  # noqa: ARG002
        """See `fleet_sim.simulation.Talk`."""
        return self._arrival.request.prompt

    def answer(self, turn: int) -> tuple[int, ...]:  # noqa: ARG002
        """See `fleet_sim.simulation.Talk`."""
        return self._arrival.answer

    def keys(self, tokens: int) -> Sequence[bytes]:
        """See `fleet_sim.simulation.Talk`."""
        return self._chain.keys[: tokens // BLOCK]


@dataclass(frozen=True, slots=True)
class TracedMessages:
    """Makes the requests of a workload one by one as they arrive: a day's prompts need not be in memory at once.

    Attributes:
        workload: the workload.
        context: most tokens of a request; longer ones are cut.
    """

    workload: Workload
    context: int

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return (len(self.workload) - 1) / self.workload.rate

    def __len__(self) -> int:
        return len(self.workload)

    def __iter__(self) -> Iterator[_Message]:
        for number, arrival in enumerate(self.workload.arrivals(self.context)):
            yield _Message(number, arrival)
