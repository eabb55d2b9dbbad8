"""The engine's thread: steps while there is work, and sleeps otherwise.

The thread owns the `Engine`; all other threads send it messages. No lock is held across a step, and sending a message
costs an append. Outputs go back to each event loop in one call a step, after the next step has begun: otherwise the
readers that they wake would take CPU time from the computation.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from weakref import WeakSet

from penstock.contract.adapter import AdapterFacts
from penstock.contract.errors import EngineDead, EngineFault, Overloaded, PenstockError
from penstock.contract.events import Output, RequestFailed, RequestFinished
from penstock.contract.measurements import Measurements
from penstock.contract.ports import Clock, Health
from penstock.engine.admission import Admission, QueueLimits
from penstock.engine.engine import Engine, StepOutputs
from penstock.engine.intake import ResolvedRequest
from penstock.engine.output_queue import OutputQueue
from penstock.engine.recent_queue import RecentQueue
from penstock.freed_memory import REST_SECONDS

__all__ = ["EngineLoop"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """The destination of a request's outputs: a queue and the event loop that it belongs to."""

    queue: OutputQueue
    event_loop: asyncio.AbstractEventLoop

    def refuse(self, error: PenstockError) -> None:
        """Tell the reader that there will be no outputs."""
        _call(self.event_loop, self.queue.fail, error)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call to make between two steps, and the future of its result."""

    work: Callable[[Engine], None]
    done: asyncio.Future[None]
    event_loop: asyncio.AbstractEventLoop

    def settle(self, error: PenstockError | None) -> None:
        """Resolve the future."""
        _call(self.event_loop, _settle, self.done, error)


@dataclass(frozen=True, slots=True)
class _Submit:
    resolved: ResolvedRequest
    reader: Reader


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_END_SECONDS = 30.0
"""How long a hanging step may delay the interpreter's exit."""

_STARTED: WeakSet[EngineLoop] = WeakSet()


def _stop_all() -> None:
    """Stop engines that are still running before the interpreter exits.

    While it exits, Python before 3.14 unwinds a thread that asks for Python's lock by `pthread_exit`. C++ frames
    (kernels, torch) do not survive that: "terminate called without an active exception". This runs before Python waits
    for side threads, which an engine with guided rows keeps alive: `atexit` would be too late.
    """
    for loop in list(_STARTED):
        loop.stop(_END_SECONDS)


threading._register_atexit(_stop_all)  # type: ignore[attr-defined] # as `concurrent.futures.thread` does


_Message = _Submit | _Abort | EngineCall | _Stop


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        limits: how much may wait for admission; further requests are refused as `Overloaded`.
        on_death: called once, by the engine's thread, when the engine dies; not when it is stopped.
        on_rest: called by the engine's thread after some idle seconds, once per idle period.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        limits: QueueLimits,
        on_death: Callable[[], None] = lambda: None,
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_death = on_death
        self._on_rest = on_rest
        self._clock = clock
        self._rest_at = math.inf  # when the engine will have been idle for long enough
        self._told_death = False
        self._admission = Admission(engine.scheduler, limits)
        self._recent = RecentQueue(limits)
        self._taken: list[ResolvedRequest] = []  # from the inbox, since the queue was last shown
        self._held: StepOutputs = []  # of the last step, until the next one has begun
        engine.before_waiting = self._before_waiting
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._readers: dict[str, Reader] = {}
        self._inbox_lock = threading.Lock()
        self._ended = False
        self._stopping = False
        self._health = engine.health()
        self._measurements = engine.measurements()
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. If it is still running when the interpreter exits, it is stopped first."""
        _STARTED.add(self)
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """End every request, then the thread; returns when it has ended, or after `seconds`. Safe to call twice."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(seconds)

    def submit(self, resolved: ResolvedRequest, reader: Reader) -> None:
        """Hand over a request; its outputs, or its refusal, arrive in the reader's queue.

        Raises:
            Overloaded: the queue was full a moment ago.
        """
        with self._inbox_lock:  # held for one append, never for a step
            if not self._ended:
                if self._health.alive:
                    self._recent.add(resolved)
                self._inbox.put(_Submit(resolved, reader))
                return
        reader.refuse(EngineDead(self._health.reason))

    def check_queue(self, tenant: str) -> None:
        """Check that the queue had room for this tenant a moment ago. Does not wait for a step.

        Raises:
            Overloaded: it had no room.
        """
        if self._health.alive:
            self._recent.check(tenant)

    def abort(self, request_id: str) -> None:
        """End a request soon: before the next step begins."""
        self._inbox.put(_Abort(request_id))

    def run_between_steps(self, call: EngineCall) -> None:
        """Have the engine's thread make a call before the next step; the call's future gets its result."""
        with self._inbox_lock:
            if not self._ended:
                self._inbox.put(call)
                return
        call.settle(EngineDead(self._health.reason))

    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests may name now."""
        return self._engine.adapters.known

    def waiting_seconds(self) -> tuple[float, float]:
        """See `Admission.waiting_seconds`; for the engine's thread alone."""
        return self._admission.waiting_seconds()

    def health(self) -> Health:
        """The state after the last step, or at the death of the thread."""
        return self._health

    def measurements(self) -> Measurements:
        """The measurements until the last step, or until the death of the thread."""
        return self._measurements

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain()
                if self._engine.has_work:
                    self._step()
                    self._rest_at = self._clock.now() + REST_SECONDS
                    self._show()
                    self._tell_death()
        except Exception:
            log.exception("the engine's thread failed")
            self._publish(self._engine.die("the engine failed"))
            self._show()
            self._tell_death()
        else:
            self._publish(self._engine.die("the engine was stopped"))
            self._show()
        self._close_inbox()
        self._keep_profile()

    def _step(self) -> None:
        outputs = self._engine.step()  # publishes the outputs of the step before
        self._held += outputs
        if not self._engine.has_work:
            self._publish([])

    def _before_waiting(self) -> None:
        self._publish([])
        self._show_queue()

    def _keep_profile(self) -> None:
        """Write a profile that was not stopped."""
        if not self._engine.profiled:
            return
        try:
            log.info("the profile was written to %s", ", ".join(self._engine.stop_profile().write()))
        except EngineFault as error:
            log.error("the profile was lost: %s", error)

    def _tell_death(self) -> None:
        if not self._health.alive and not self._told_death:
            self._told_death = True
            self._on_death()

    def _show(self) -> None:
        """Publish new values for other threads, which read them without a lock."""
        self._health = self._engine.health()
        self._measurements = self._engine.measurements()

    def _show_queue(self) -> None:
        """Publish the queue after a message or a plan may have changed it."""
        refused = self._recent.show(*self._admission.look(), self._taken)
        self._taken = []
        if refused:
            self._engine.metrics.rejected(refused)

    def _drain(self) -> None:
        """Handle all messages; without work, wait for one."""
        if not self._engine.has_work:
            self._show_queue()
            self._show()
            self._receive(self._await_message())
        while not self._inbox.empty():
            self._receive(self._inbox.get_nowait())
        if self._taken:
            self._show_queue()

    def _await_message(self) -> _Message:
        if self._rest_at < math.inf:
            with suppress(queue.Empty):
                return self._inbox.get(timeout=max(0.0, self._rest_at - self._clock.now()))
            self._rest_at = math.inf
            self._engine.scheduler.check()  # for leaks; it reads every block, so not when the next request may come
            self._on_rest()
        return self._inbox.get()

    def _receive(self, message: _Message) -> None:
        self._publish([])  # held outputs come before those of this message
        match message:
            case _Submit(resolved, reader):
                self._taken.append(resolved)
                self._accept(resolved, reader)
            case _Abort(request_id):
                self._publish(self._engine.abort(request_id))
            case EngineCall():
                self._run_call(message)
            case _Stop():
                self._stopping = True

    def _accept(self, resolved: ResolvedRequest, reader: Reader) -> None:
        try:
            self._admission.check(resolved)
            self._engine.submit(resolved)
        except PenstockError as error:
            if isinstance(error, Overloaded):
                self._engine.metrics.rejected()
            reader.refuse(error)
            return
        except Exception:  # nothing of this request is queued: all others go on
            log.exception("request %s failed while it was admitted: a defect of the engine", resolved.id)
            reader.refuse(EngineFault("An internal error of the engine ended this request before it began."))
            return
        self._readers[resolved.id] = reader

    def _run_call(self, call: EngineCall) -> None:
        if not self._health.alive:
            call.settle(EngineDead(self._health.reason))
            return
        try:
            call.work(self._engine)
        except PenstockError as error:  # refused, or failed on its own: the engine goes on
            call.settle(error)
            return
        except Exception:
            call.settle(EngineDead("the engine failed"))
            raise
        call.settle(None)

    def _publish(self, outputs: StepOutputs) -> None:
        """Send held outputs, then these: one call to each event loop, however many requests there are."""
        held, self._held = self._held, []
        by_request: dict[str, list[Output]] = defaultdict(list)
        for request_id, output in (*held, *outputs):
            by_request[request_id].append(output)
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = defaultdict(list)
        for request_id, its_outputs in by_request.items():
            reader = self._readers[request_id]
            by_loop[reader.event_loop].append((reader.queue, its_outputs))
            if isinstance(its_outputs[-1], RequestFinished | RequestFailed):
                del self._readers[request_id]
                self._admission.ended(its_outputs[-1].timings)
        for event_loop, deliveries in by_loop.items():
            _call(event_loop, _deliver, deliveries, self._clock)

    def _close_inbox(self) -> None:
        """Refuse the messages that arrived while the thread ended, and all later ones."""
        with self._inbox_lock:
            self._ended = True
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, _Submit):
                message.reader.refuse(EngineDead(self._health.reason))
            if isinstance(message, EngineCall):
                message.settle(EngineDead(self._health.reason))


_Delivery = tuple[OutputQueue, list[Output]]


def _settle(done: asyncio.Future[None], error: PenstockError | None) -> None:
    if done.done():  # the caller has stopped waiting
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _deliver(deliveries: list[_Delivery], clock: Clock) -> None:
    for output_queue, outputs in deliveries:
        if isinstance(outputs[-1], RequestFinished | RequestFailed):
            outputs[-1] = replace(outputs[-1], timings=outputs[-1].timings.delivered(clock.now()))
        output_queue.put(outputs)


def _call(event_loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call on an event loop from this thread; a closed loop has no reader left."""
    try:
        event_loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        log.debug("a reader's event loop was closed before its last output")
