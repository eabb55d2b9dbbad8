"""An `EngineClient` that plays a script: no model, no scheduler, only outputs, delays and errors in a fixed order.

It records its requests and which of them were left before their end, so that tests can tell an abort from a finish.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from penstock.contract.adapter import AdapterFacts
from penstock.contract.engine_views import NO_PREFIXES, PrefixTree, RecentSteps, StepView, TenantShare
from penstock.contract.errors import EngineDead, InvalidParameter, Overloaded, RequestError, UnknownModel
from penstock.contract.events import (
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    FinishReason,
    Output,
    RequestFailed,
    RequestFinished,
    TokenPiece,
    Usage,
)
from penstock.contract.measurements import AdaptersInUse, AnswerCacheUse, DraftCount, Histogram, Measurements
from penstock.contract.ports import Health, Tokenized
from penstock.contract.request import ChatPrompt, EngineRequest, Prompt, TextPrompt, TokenPrompt


@dataclass(frozen=True)
class Wait:
    """Do nothing for `seconds`; for ever by default."""

    seconds: float = 1e9


@dataclass(frozen=True)
class Until:
    """Do nothing until the test sets the event."""

    event: threading.Event


Step = Output | Wait | Until | Exception
Script = Callable[[EngineRequest], Iterable[Step]]


def delta(
    text: str, choice: int = 0, token: int = 7, logprob: float = -0.5, raw: bytes | None = None, start: int = 0
) -> ChoiceDelta:
    """One token's worth of text."""
    return ChoiceDelta(choice, text, (TokenPiece(token, text.encode() if raw is None else raw, logprob, start=start),))


def stop(choice: int = 0, by: str | int | None = None) -> ChoiceFinished:
    return ChoiceFinished(choice, FinishReason.STOP, by)


def length(choice: int = 0) -> ChoiceFinished:
    return ChoiceFinished(choice, FinishReason.LENGTH)


def finished(prompt: int = 5, completion: int = 2, cached: int = 0) -> RequestFinished:
    return RequestFinished(Usage(prompt, completion, cached))


def failed(message: str = "The logits are not finite.") -> RequestFailed:
    return RequestFailed(message, Usage(5, 1, 0))


def always(*steps: Step) -> Script:
    return lambda request: steps


def vector(*values: float) -> Embedding:
    return Embedding(struct.pack(f"<{len(values)}f", *values))


def HELLO(request: EngineRequest) -> Iterable[Step]:
    """The script unless a test gives another."""
    if request.embedding is not None:
        return vector(0.6, -0.8), stop(), finished(completion=0)
    return delta("Hel"), delta("lo", start=3), stop(), finished()


HEALTHY = Health(
    alive=True,
    reason="",
    running=1,
    waiting=2,
    steps=9,
    preemptions=0,
    free_blocks=30,
    cached_blocks=0,
    total_blocks=40,
    query_tokens=0,
    hit_tokens=0,
    slots=0,
    computed_tokens=0,
    generated_tokens=0,
)


def nothing_measured(**known: object) -> Measurements:
    """Measurements of ones and empty histograms, except for the fields in `known`."""
    empty = Histogram((1.0,), (0, 0), 0.0)
    fields = {each.name: empty if each.type == "Histogram" else 1 for each in dataclasses.fields(Measurements)}
    counted = {"finished": (("stop", 1),), "drafts": (("suffix", DraftCount(1, 4, 3)),)}
    counted |= {"answer_cache": AnswerCacheUse(4, 3, 2048, 1)}
    return Measurements(**fields | counted | {"adapters": AdaptersInUse(4, ("poet",), ("clerk", "poet"))} | known)


@dataclass
class ScriptedEngine:
    """See the module. `script` may be exchanged between requests."""

    script: Script = HELLO
    state: Health = HEALTHY
    requests: list[EngineRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    yielded: int = 0
    resets: int = 0
    profiling: bool = False
    stuck: bool = False
    loaded: dict[str, AdapterFacts] = field(default_factory=dict)
    full: dict[str, Overloaded] = field(default_factory=dict)
    steps: list[StepView] = field(default_factory=list)
    prefixes: PrefixTree = NO_PREFIXES
    tenants: tuple[TenantShare, ...] = ()
    looks: list[str] = field(default_factory=list)

    def reset(self) -> None:
        self.script, self.state, self.yielded = HELLO, HEALTHY, 0
        self.resets, self.stuck, self.profiling = 0, False, False
        self.prefixes, self.tenants = NO_PREFIXES, ()
        for record in (self.requests, self.live, self.left, self.full, self.loaded, self.steps, self.looks):
            record.clear()

    async def generate(self, request: EngineRequest) -> AsyncIterator[Output]:
        self.requests.append(request)
        self.live.add(request.id)
        ended = False
        try:
            for step in self.script(request):
                ended = isinstance(step, RequestFinished | RequestFailed | Exception)
                match step:
                    case Wait():
                        await asyncio.sleep(step.seconds)
                    case Until():
                        while not step.event.is_set():
                            await asyncio.sleep(0.002)
                    case Exception():
                        raise step
                    case _:
                        await asyncio.sleep(0)  # as in any engine, the event loop runs between two outputs
                        self.yielded += 1
                        yield step
        finally:
            self.live.discard(request.id)
            if not ended:
                self.left.append(request.id)

    def check_queue(self, tenant: str) -> None:
        if tenant in self.full:
            raise self.full[tenant]

    async def abort(self, request_id: str) -> None:
        self.left.append(request_id)

    def health(self) -> Health:
        return self.state

    def measurements(self) -> Measurements:
        return nothing_measured()

    async def heartbeat(self) -> None:
        if self.stuck:
            await asyncio.sleep(1e9)
        if not self.state.alive:
            raise EngineDead(self.state.reason)

    async def reset_prefix_cache(self) -> None:
        await self.heartbeat()
        self.resets += 1

    def adapters(self) -> dict[str, AdapterFacts]:
        return dict(self.loaded)

    async def load_adapter(self, name: str, path: str) -> AdapterFacts:
        await self.heartbeat()
        if name in self.loaded:
            raise InvalidParameter("lora_name", "an adapter of this name is loaded already", code="adapter_loaded")
        self.loaded[name] = AdapterFacts(name, path, "00", rank=8, modules=3, bytes=640, created=1_700_000_001)
        return self.loaded[name]

    async def unload_adapter(self, name: str) -> None:
        await self.heartbeat()
        if name not in self.loaded:
            raise UnknownModel(name)
        del self.loaded[name]

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:
        await self.heartbeat()
        self.looks.append("steps")
        known = any(each.id in requests for each in self.requests)
        if requests:
            return RecentSteps(tuple(each for each in self.steps if known and each.own is not None))
        return RecentSteps(tuple(each._replace(own=None) for each in self.steps if each.step > after))

    async def cached_prefixes(self) -> PrefixTree:
        await self.heartbeat()
        self.looks.append("prefixes")
        return self.prefixes

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        await self.heartbeat()
        self.looks.append("tenants")
        return self.tenants

    async def start_profile(self) -> None:
        await self.heartbeat()
        if self.profiling:
            raise RequestError("A profile is running.", code="profile_running")
        self.profiling = True

    async def stop_profile(self) -> tuple[str, ...]:
        await self.heartbeat()
        if not self.profiling:
            raise RequestError("No profile is running.", code="profile_not_running")
        self.profiling = False
        return ("p-steps.json", "p-torch.json")

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """One token a character, its id the character's place in ASCII, from "!" = 1 on."""
        match prompt:
            case TokenPrompt(token_ids):
                return Tokenized(token_ids, tuple(bytes([32 + token]) for token in token_ids), "")
            case TextPrompt(text):
                rendered = text
            case ChatPrompt():
                rendered = "".join(f"{message.role}>{message.content};" for message in prompt.messages)
        if not rendered.isascii():
            raise InvalidParameter("messages", "This toy knows ASCII only.")
        return Tokenized(tuple(ord(c) - 32 for c in rendered), tuple(c.encode() for c in rendered), rendered)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(32 + token) for token in token_ids)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 3.0) -> None:
        """Wait, in the test's thread, for something the server does in its own."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the server did not get there in time"
            time.sleep(0.005)
