"""Several replicas behind the `EngineClient` port: requests are resolved here and computed there.

Resolving fixes everything that an answer depends on (token ids, seed, sampling), so the replica that computes it can
change at any moment. When a link is lost, the request goes to another replica, with the tokens that its reader has;
what the reader has is not sent again (`Delivered`). A request that a full replica refused is offered to the other
replicas before it fails. Does not decide which replica is best: the `Ranking` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace

from penstock.contract.adapter import AdapterFacts
from penstock.contract.engine_views import PrefixTree, RecentSteps, TenantShare
from penstock.contract.errors import EngineFault, Overloaded, PenstockError, RequestError, RequestPoisoned, Unavailable
from penstock.contract.events import Output, RequestFailed, RequestFinished
from penstock.contract.measurements import NO_PARTS, UNTIMED, Measurements, Timings
from penstock.contract.ports import Clock, Health, Tokenized
from penstock.contract.request import EngineRequest, Prompt, SequenceRequest
from penstock.engine import Intake, IntakeThreads, OutputQueue, ResolvedRequest, WaitingRoom
from penstock.fleet.delivered import AnswerDiffers, Delivered
from penstock.fleet.replica import Ranking, Replica, ReplicaLost, Replicas
from penstock.fleet.totals import FleetTotals

__all__ = ["FleetClient"]

log = logging.getLogger(__name__)

MOST_LOSSES = 5
"""How many replicas in a row a request may lose without progress of its answer; then the request is to blame."""

NEW_PATIENCE_SECONDS = 30.0
"""How long a request without output waits for a replica: its client tries again by itself."""

BEGUN_PATIENCE_SECONDS = 300.0
"""How long a request with output waits for a replica: longer than a replica takes to load."""

LOOK_SECONDS = 0.05
"""How often a request that waits for a replica looks for one."""

AGAIN_SECONDS = 0.5
"""Seconds until a request may ask a replica again that had no room for it, or whose link was lost."""

_ONE_ENGINE = "is for one engine; a fleet has several"


class _Stream:
    """A request on its way: what its reader has, and which replicas were tried. Owned by its task.

    Attributes:
        aborted: whether it is to end.
        keys: keys of the full blocks of its prompt.
        replica: the replica that computes it now.
        refusals: the refusals of replicas that had no room for it, by replica name.
        lost: the names of the replicas that were lost while they computed it, since its last progress.
        again: when each replica that refused it or was lost may be asked again, by name.
        trouble: since when there was no replica for it; None while there is one.
    """

    def __init__(self, resolved: ResolvedRequest, keys: tuple[bytes, ...], queue: OutputQueue, arrived: float) -> None:
        self.resolved = resolved
        self.keys = keys
        self.queue = queue
        self.arrived = arrived
        self.delivered = Delivered(len(resolved.sequences))
        self.aborted = False
        self.replica: Replica | None = None
        self.refusals: dict[str, Overloaded] = {}
        self.lost: set[str] = set()
        self.again: dict[str, float] = {}
        self.trouble: float | None = None

    def request(self) -> ResolvedRequest:
        """The request as it is sent to the next replica."""
        if self.resolved.answered < len(self.resolved.sequences):  # `best_of` delivers nothing until the end
            return self.resolved
        return replace(self.resolved, expected=self.delivered.tokens)

    def pass_on(self, outputs: list[Output], now: float) -> None:
        """Give the reader the new part of `outputs`."""
        new = self.delivered.take(outputs)
        if not new:
            return
        self.lost.clear()
        self.trouble = None
        if isinstance(new[-1], RequestFinished | RequestFailed):
            new[-1] = replace(new[-1], timings=_seen_from_here(new[-1].timings, self.arrived, now))
        self.queue.put(new)

    def end(self) -> None:
        """End the stream as aborted."""
        self.queue.put(self.delivered.aborted(self.resolved.prompt_tokens))

    def fail(self, error: PenstockError) -> None:
        """End the stream with an error: raised if the reader has nothing yet, else the last output."""
        if not self.delivered.began:
            self.queue.fail(error)
            return
        poisoned = isinstance(error, RequestPoisoned)
        usage = self.delivered.usage(self.resolved.prompt_tokens)
        self.queue.put([RequestFailed(str(error), usage, poisoned=poisoned)])


class FleetClient:
    """See `EngineClient`. Confined to one event loop, except for methods that answer without waiting.

    Args:
        intake: resolves requests.
        replicas: the replicas that exist now.
        router: ranks the replicas.
        keys: gives the keys of the full blocks of a sequence's prompt, as engines compute them.
        clock: the clock of this process.
        like: the measurements of any engine of the same kind, for their shape.
        room: bounds what waits for readers; None for no bound.
        adapters: the adapters that every replica has loaded.
    """

    def __init__(
        self,
        intake: Intake,
        replicas: Replicas,
        router: Ranking,
        keys: Callable[[SequenceRequest], tuple[bytes, ...]],
        clock: Clock,
        like: Measurements,
        room: WaitingRoom | None = None,
        adapters: Mapping[str, AdapterFacts] | None = None,
    ) -> None:
        self._intake = IntakeThreads(intake)
        self._replicas = replicas
        self._router = router
        self._keys = keys
        self._clock = clock
        self._room = room
        self._adapters = dict(adapters or {})
        self._totals = FleetTotals(replicas, like)
        self._live: dict[str, _Stream] = {}
        self._reported: dict[str, object] = {}  # the state that the router knows, by replica
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """See `EngineClient.generate`."""
        arrived = self._clock.now()
        resolved = await self._intake.resolve(request)
        queue = OutputQueue(self._room, lambda: self._stop(task))
        stream = _Stream(resolved, self._keys(resolved.sequences[0]), queue, arrived)
        stream.aborted = self._intake.take_abort(request.id)
        self._live[request.id] = stream
        task = asyncio.create_task(self._carry(stream))
        try:
            while not queue.drained:
                for output in await queue.take():
                    yield output
        finally:
            queue.leave()
            self._stop(task)
            if self._live.get(request.id) is stream:
                del self._live[request.id]

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if self._intake.note_abort(request_id):
            return
        stream = self._live.get(request_id)
        if stream is not None:
            stream.aborted = True
            if stream.replica is not None:
                await stream.replica.abort(request_id)

    def check_queue(self, tenant: str) -> None:  # noqa: ARG002 - replicas know how much of a queue is whose
        """See `EngineClient.check_queue`: the queue of a fleet is full if the queues of all replicas are."""
        waits = [0 if state is None else state.retry_after for state in self._totals.states().values()]
        if waits and all(waits):
            raise Overloaded("The queues of all replicas are full.", retry_after=min(waits))

    def health(self) -> Health:
        """See `EngineClient.health`: all replicas as one engine. Without replicas it is alive, and has no slots."""
        return self._totals.health()

    def measurements(self) -> Measurements:
        """See `EngineClient.measurements`: sums over all replicas, including those that are gone."""
        return self._totals.measurements()

    async def heartbeat(self) -> None:
        """See `EngineClient.heartbeat`: returns when any replica has answered; waits until one does."""
        while True:
            beats = [asyncio.create_task(each.heartbeat()) for each in self._replicas.present().values()]
            try:
                for beat in asyncio.as_completed(beats):
                    try:
                        await beat
                    except ReplicaLost:
                        continue
                    return
            finally:
                for each in beats:
                    each.cancel()
                await asyncio.gather(*beats, return_exceptions=True)
            await asyncio.sleep(LOOK_SECONDS)

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`: of all replicas; one that is lost meanwhile has no cache any more."""
        resets = [each.reset_prefix_cache() for each in self._replicas.present().values()]
        for result in await asyncio.gather(*resets, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ReplicaLost):
                raise result

    def adapters(self) -> Mapping[str, AdapterFacts]:
        """See `EngineClient.adapters`."""
        return self._adapters

    async def load_adapter(self, name: str, path: str) -> AdapterFacts:  # noqa: ARG002 - as in `EngineClient`
        """Refuse: a replica that starts later would lack the adapter."""
        message = "A fleet has the adapters that it was started with (--lora); start it again with others."
        raise RequestError(message, code="adapters_off")

    async def unload_adapter(self, name: str) -> None:
        """Refuse; see `load_adapter`."""
        await self.load_adapter(name, "")

    async def start_profile(self) -> None:
        """Refuse; see `EngineClient.start_profile`."""
        raise RequestError(f"A profile {_ONE_ENGINE}.", code="profiling_off")

    async def stop_profile(self) -> tuple[str, ...]:
        """Refuse; see `EngineClient.stop_profile`."""
        raise RequestError(f"A profile {_ONE_ENGINE}.", code="profiling_off")

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:  # noqa: ARG002
        """Refuse; see `EngineViews.recent_steps`."""
        raise RequestError(f"A view of steps {_ONE_ENGINE}.", code="views_off")

    async def cached_prefixes(self) -> PrefixTree:
        """Refuse; see `EngineViews.cached_prefixes`."""
        raise RequestError(f"A view of the prefix cache {_ONE_ENGINE}.", code="views_off")

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        """Refuse; see `EngineViews.tenant_shares`."""
        raise RequestError(f"A view of tenants' shares {_ONE_ENGINE}.", code="views_off")

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """See `EngineClient.tokenize`."""
        return await self._intake.tokenize(prompt, tenant)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return await self._intake.detokenize(token_ids)

    def close(self) -> None:
        """Take no more requests."""
        self._intake.close()

    def _stop(self, task: asyncio.Task[None]) -> None:
        """Cancel a request's task; before it is done it ends the request at the replica."""
        if not task.done():
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    async def _carry(self, stream: _Stream) -> None:
        """Bring the answer to its reader, from as many replicas as needed."""
        try:
            while not stream.delivered.ended:
                await self._advance(stream)
        except PenstockError as error:
            stream.fail(error)
        except AnswerDiffers:
            log.error("request %s: a replica does not answer as the one before it did", stream.resolved.id)
            stream.fail(EngineFault("Another replica answers this request differently; it cannot be continued."))
        except Exception:
            log.exception("request %s failed in the fleet's client", stream.resolved.id)
            stream.fail(EngineFault("An internal error ended this request."))

    async def _advance(self, stream: _Stream) -> None:
        """Have one replica answer, as far as it gets."""
        name = await self._choose(stream)
        if not name:
            stream.end()
            return
        try:
            await self._serve(stream, name)
        except Overloaded as full:
            stream.refusals[name] = full
            stream.again[name] = self._clock.now() + AGAIN_SECONDS
        except ReplicaLost as lost:
            log.warning("request %s lost replica %s: %s", stream.resolved.id, name, lost)
            stream.lost.add(name)
            stream.again[name] = self._clock.now() + AGAIN_SECONDS
            if name not in self._replicas.present():
                self._router.lost(name)
            if len(stream.lost) > MOST_LOSSES:
                message = f"Computing this request has ended {len(stream.lost)} replicas in a row."
                raise RequestPoisoned(message) from lost
        finally:
            stream.replica = None

    async def _serve(self, stream: _Stream, name: str) -> None:
        """Pass on what a replica answers, until the end of the answer.

        Raises:
            ReplicaLost: the replica was lost before the end.
            PenstockError: the replica refuses the request.
        """
        replica, tokens = self._replicas.present().get(name), stream.resolved.prompt_tokens
        if replica is None:
            raise ReplicaLost("it has left")
        stream.replica = replica
        stream.delivered.begin_again()
        self._router.sent(name, stream.keys, tokens, self._clock.now())
        try:
            async with aclosing(replica.generate(stream.request())) as batches:
                async for outputs in batches:
                    stream.pass_on(outputs, self._clock.now())
                    if stream.delivered.ended:
                        return
        finally:
            self._router.ended(name, tokens, self._clock.now())
        raise ReplicaLost("its answer had no end")

    async def _choose(self, stream: _Stream) -> str:
        """The name of the replica to ask next; "" if the request is to end. Waits for a replica, within limits.

        Raises:
            Overloaded: no replica has room for the request, and it has no output yet.
            Unavailable: there was no replica for too long.
        """
        patience = BEGUN_PATIENCE_SECONDS if stream.delivered.began else NEW_PATIENCE_SECONDS
        while not stream.aborted:
            now = self._clock.now()
            may_be_asked = self._may_be_asked(stream, now)
            if may_be_asked:
                self._tell_router()
                return self._router.rank(stream.keys, stream.resolved.prompt_tokens, now, may_be_asked)[0]
            if stream.refusals and not stream.delivered.began:
                raise min(stream.refusals.values(), key=lambda full: full.retry_after)
            stream.trouble = now if stream.trouble is None else stream.trouble
            if now - stream.trouble > patience:
                raise Unavailable("No replica answers; try again.", retry_after=5)
            await asyncio.sleep(LOOK_SECONDS)
        return ""

    def _may_be_asked(self, stream: _Stream, now: float) -> list[str]:
        """Replicas not asked yet; else those that may be asked again. Only a begun answer waits for full queues."""
        present = self._replicas.present()
        new = [name for name in present if name not in stream.again]
        if new or (stream.refusals and not stream.delivered.began):
            return new
        return [name for name in present if stream.again[name] <= now]

    def _tell_router(self) -> None:
        """Tell the router which replicas exist, and what each has reported since the last time."""
        states = self._totals.states()
        self._router.set_replicas(tuple(states))
        now = self._clock.now()
        for name, state in states.items():
            if state is not None and self._reported.get(name) is not state:
                self._router.report(name, state.load, now)
        self._reported = dict(states)


def _seen_from_here(timings: Timings, arrived: float, now: float) -> Timings:
    """A replica's instants on this process's clock: the end is now, and the arrival is that at this process."""
    if timings == UNTIMED:
        return timings
    shift = now - timings.ended

    def here(instant: float) -> float:
        return max(arrived, instant + shift)

    parts = timings.parts
    if parts != NO_PARTS:
        parts = replace(parts, transport=parts.transport + max(0.0, now - arrived - parts.total))
    return replace(
        timings,
        arrived=arrived,
        admitted=here(timings.admitted),
        first_token=here(timings.first_token),
        last_token=here(timings.last_token),
        ended=now,
        parts=parts,
    )
