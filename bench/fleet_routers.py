"""Compares routers of a fleet on Ray itself, with real replicas on this machine, real prompts and real time.

    python bench/fleet_routers.py --json bench/results/FILE.json

Two engines serve conversations with shared system prompts (`fleet_sim`). Their prefix caches are so small that one
alone could not hold all conversations. Every router gets the same conversations, and new replicas:

- ours: `penstock fleet` without its HTTP side, which names the replica for each request;
- Ray's: the same replicas and the same client, which sees them as one, because Ray's router chooses behind its handle.
  Ray's prefix router reads the `prompt` of a request, so it is given the text; Ray's hash router reads the session,
  which is the conversation.

With as many replicas as processors, the measurement includes whatever else runs: use a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fleet_sim.live import conversation_of, hold
from fleet_sim.trace import TraceConfig, conversations
from penstock.app import model_card
from penstock.bench.machine import load_average, provenance
from penstock.bench.quality import CORPUS
from penstock.contract.config import EngineConfig
from penstock.contract.errors import SetupError
from penstock.contract.events import Output
from penstock.contract.fleet_config import FleetConfig
from penstock.contract.measurements import Measurements
from penstock.engine import ResolvedRequest
from penstock.fleet import FleetClient, ReplicaLost, Replicas, ReplicaState
from penstock.fleet.description import Description, Options
from penstock.fleet.ray_replicas import RayReplicas, read_stream
from penstock.fleet.wire import read_state, write_request
from penstock.fleet_cluster import cluster, deployment, run_replicas
from penstock.fleet_server import first_replica, fleet_client, open_text
from penstock.routing import Router
from penstock.weights.locate import default_cache_dir

__all__ = ["CONTENDERS", "Contender", "main", "measure", "table"]

PREFIX = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
"""Not imported through `ray.serve.llm`, which needs vLLM."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One of Ray's routers.

    Attributes:
        path: the path of its class, as Ray's configuration takes it.
        arguments: its arguments.
    """

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)


CONTENDERS: dict[str, Contender | None] = {
    "ours": None,
    "Ray's prefix router": Contender(PREFIX),
    "Ray's prefix router, threshold 8": Contender(PREFIX, {"imbalanced_threshold": 8, "do_eviction": True}),
    "two choices": Contender("ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter"),
    "hash of conversation": Contender("ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"),
}
"""None is the router of `penstock fleet`."""


class Prompted(bytes):
    """A message with its prompt's text as an attribute, for Ray's router to read; the replica gets plain bytes."""

    prompt: str

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


class RayChooses:
    """See `Replica`: stands for all replicas behind Ray's handle, among which Ray's router chooses for each request.

    Args:
        handle: the handle of the deployment.
        state: the state that one replica reported at the beginning.
    """

    def __init__(self, handle: Any, state: ReplicaState) -> None:
        self._handle = handle
        self._state = state

    async def generate(self, request: ResolvedRequest) -> AsyncGenerator[list[Output], None]:
        """See `Replica.generate`."""
        message = Prompted(write_request(request))
        message.prompt = request.prompt_text
        handle = self._handle.options(stream=True, session_id=conversation_of(request.id))
        async with aclosing(read_stream(handle.generate.remote(message))) as batches:
            async for outputs in batches:
                yield outputs

    async def abort(self, request_id: str) -> None:
        """Never called: a client that leaves closes the stream."""
        raise ReplicaLost(request_id)

    async def heartbeat(self) -> None:
        """See `Replica.heartbeat`."""
        await self._handle.heartbeat.remote()

    async def reset_prefix_cache(self) -> None:
        """Never called: only one of the replicas would get the call."""
        raise ReplicaLost("which?")

    def state(self) -> ReplicaState:
        """See `Replica.state`."""
        return self._state

    def present(self) -> Mapping[str, RayChooses]:
        """See `Replicas.present`."""
        return {"any": self}


def measure(
    name: str, trace: TraceConfig, warm: float, config: EngineConfig, replicas: int, seed: int
) -> dict[str, Any]:
    """Run a trace with one router and return its figures. Starts a cluster, and ends it.

    Args:
        name: the router's name.
        trace: the conversations.
        warm: seconds after which messages count.
        config: the configuration of every replica.
        replicas: how many replicas there are.
        seed: seeds the conversations.

    Raises:
        RuntimeError: the replicas cannot be started.
    """
    talks = conversations(trace, seed)
    book = CORPUS.read_text(encoding="utf-8")
    try:
        with _client(name, config, replicas) as client:
            held = asyncio.run(
                hold(client, talks, book, warm=warm, ends=trace.seconds, most_tokens=config.max_model_len)
            )
    except SetupError as error:
        raise RuntimeError(str(error)) from error  # an error that another process can raise again
    return held.figures()


@contextmanager
def _client(name: str, config: EngineConfig, replicas: int) -> Iterator[FleetClient]:
    """The client of a fleet of new replicas behind the router of that name."""
    contender = CONTENDERS[name]
    fleet = FleetConfig(replicas=str(replicas), replica_cpus=0.5)
    options = Options(config, str(default_cache_dir(os.environ)), tenants=False)
    with cluster(fleet, lambda _: None):
        wanted = deployment(config, fleet)
        if contender is None:
            with RayReplicas(run_replicas("bench", wanted, options)) as ours:
                while len(ours.present()) < replicas:
                    time.sleep(0.05)
                first = first_replica(ours)
                yield _client_of(first.description, ours, first.state().measurements)
            return
        from ray.serve.config import RequestRouterConfig  # imported only after `cluster` has configured Ray

        router = RequestRouterConfig(request_router_class=contender.path, request_router_kwargs=contender.arguments)
        handle = run_replicas("bench", wanted.options(request_router_config=router), options)
        description = msgspec.msgpack.decode(handle.describe.remote().result(), type=Description)
        state = read_state(handle.state.remote().result())
        yield _client_of(description, RayChooses(handle, state), state.measurements)


def _client_of(description: Description, replicas: Replicas, like: Measurements) -> FleetClient:
    text = open_text(description)
    card = model_card(description.facts, description.found.facts, text)
    return fleet_client(description, text, card, replicas, Router(), like)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| router | requests | prompt tokens found | first token p50 | p90 | p99 | whole answer, mean | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = [row[name] for name in ("first_token_p50", "first_token_p90", "first_token_p99", "whole_mean")]
        times = " | ".join(f"{each * 1e3:,.0f} ms" for each in seconds)
        lines.append(f"| {row['router']} | {row['requests']} | {row['cached_share']:.1%} | {times} | {row['failed']} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--cache", type=int, default=100_000_000, help="bytes of each replica's KV cache")
    parser.add_argument("--seconds", type=float, default=80.0, help="in which messages are sent, to each router")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of these that do not count")
    parser.add_argument("--rate", type=float, default=3.0, help="messages a second")
    parser.add_argument("--tenants", type=int, default=16, help="that have a system prompt each")
    parser.add_argument(
        "--repeats", type=int, default=1, help="how often everybody's turn comes, with other conversations"
    )
    parser.add_argument("--router", action="append", choices=list(CONTENDERS), help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    trace = TraceConfig(
        seconds=options.seconds,
        requests_per_second=options.rate,
        tenants=options.tenants,
        system_tokens=200,
        said_tokens=30,
        answer_tokens=12,
        turns=5.0,
        think_seconds=2.0,
        burst_every=20.0,
        burst_seconds=3.0,
    )
    config = EngineConfig(
        model=options.model,
        max_model_len=2048,
        kv_cache_memory=options.cache,
        max_num_seqs=16,
        threads=options.threads,
        standby=False,
    )
    head = provenance()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for seed in range(options.repeats):
            for name in options.router or list(CONTENDERS):
                found = pool.submit(measure, name, trace, options.warm, config, options.replicas, seed).result()
                rows.append({"router": name, "seed": seed, "load_average": load_average()} | found)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}", flush=True)
    if options.json is not None:
        import ray

        record = head | {
            "kind": "fleet routers",
            "ray": ray.__version__,
            "replicas": options.replicas,
            "warm": options.warm,
            "trace": asdict(trace),
            "engine": asdict(config),
            "contenders": {name: each and asdict(each) for name, each in CONTENDERS.items()},
            "rows": rows,
        }
        text = json.dumps(record | {"load_average_after": load_average()}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
