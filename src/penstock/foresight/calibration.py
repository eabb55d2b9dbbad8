"""Measures a server on this machine: how long its steps take, and the time that passes between a client and its engine.

The server is `penstock serve` in a process of its own, with a record. It gets random prompts over HTTP, from 1 to 64 at
once, so that steps of many shapes are measured, together with whatever else a server does beside them. By default the
server keeps no KV blocks in files: the prompts are the same each time, and would be read from the files. Measurements
are kept in a folder, by model, options, version and machine, so that each is taken only once.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.bench.event_stream import Target
from penstock.bench.serving import Outcome, RequestOptions, drive
from penstock.bench.workload import Call
from penstock.contract.errors import EngineFault, PenstockError
from penstock.foresight.files import names_file, read_lines
from penstock.foresight.recorded import RecordedRun, read_record
from penstock.processor import cpus, processor_name
from penstock.version import __version__

__all__ = ["Calibration", "Driven", "Way", "calibrate", "drive_recorded", "recorded_server", "way_of"]

STREAMS = (1, 2, 4, 8, 16, 32, 64)
_VOCAB = 10_000
_READY_SECONDS = 600.0
_END_SECONDS = 60.0
_NAME = "calibrated"
_OPTIONS = ("--kv-store", "off")
"""Options of every server that is measured; the caller's options override them."""


@dataclass(frozen=True, slots=True)
class Way:
    """The time that passes between a client and the engine, in seconds.

    Attributes:
        there: from sending a request until it has arrived at the engine.
        back: from when a token leaves the engine until the client has read it.
        end: the same for an answer's end.
    """

    there: float
    back: float
    end: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and whether it was kept from an earlier calibration."""

    run: RecordedRun
    way: Way
    kept: bool


@dataclass(frozen=True, slots=True)
class Driven:
    """A load test.

    Attributes:
        began: when it began, by the clock of arrival times.
        calls, outcomes: what was sent, and the outcome of each call, in the same order.
    """

    began: float
    calls: Sequence[Call]
    outcomes: Sequence[Outcome]


def calibrate(
    model: str,
    options: Sequence[str],
    folder: Path,
    seconds: float = 60.0,
    *,
    anew: bool = False,
    announce: Callable[[str], object] = lambda line: None,  # noqa: ARG005
) -> Calibration:
    """Measure how long a server of this model takes, or return what was measured before.

    Args:
        model: the model, as given to `penstock serve`.
        options: further options of `penstock serve`.
        folder: where measurements are kept.
        seconds: how long to measure.
        anew: measure even if a measurement is kept.
        announce: called with a line for people before something that takes long.

    Raises:
        SetupError: the kept measurement cannot be read.
        EngineFault: the server did not start, or answered nothing.
    """
    kept = folder / _key(model, options)
    record, way = kept / "record.jsonl.gz", kept / "way.json"
    if not anew and record.exists() and way.exists():
        with names_file(record):
            run = read_record(read_lines(record))
        return Calibration(run, Way(**json.loads(way.read_text(encoding="utf-8"))), kept=True)
    announce(f"measuring the steps of {model} for {seconds:.0f} s; kept in {kept}")
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "record.jsonl"
        with recorded_server(model, options, file) as url:
            driven = asyncio.run(_load(url, seconds))
        with names_file(file):
            run = read_record(read_lines(file))
        measured = way_of(run, driven)
        kept.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as plain, gzip.open(record, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(plain, packed)
        way.write_text(json.dumps(asdict(measured)), encoding="utf-8")
    return Calibration(run, measured, kept=False)


def _key(model: str, options: Sequence[str]) -> str:
    """The name of the folder for a measurement; a model file that has changed counts as another model."""
    changed = Path(model).stat().st_mtime_ns if Path(model).exists() else 0
    named = json.dumps([model, changed, [*_OPTIONS, *options], __version__, processor_name(), cpus()])
    return hashlib.blake2b(named.encode(), digest_size=8).hexdigest()


@contextmanager
def recorded_server(model: str, options: Sequence[str], record: Path) -> Iterator[str]:
    """Run a server that writes `record`, under the model name `calibrated`, until the block ends; yields its base URL.

    The server computes every prompt that is not in its memory: `--kv-store off`, unless `options` say otherwise.

    Raises:
        EngineFault: the server ended before it was ready, or was not ready within ten minutes.
    """
    command = [sys.executable, "-m", "penstock", "serve", model, *_OPTIONS, *options]
    command += ["--host", "127.0.0.1", "--port", "0", "--record", str(record), "--served-model-name", _NAME]
    with (
        _sigterm_raises(),
        subprocess.Popen(  # noqa: S603 (ourselves, with what the caller wants of us)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        reader = _ServerOutput(process)
        try:
            yield f"{reader.url()}/v1"
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit inside the block, so that the server is ended before this process."""
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield
        return
    earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


class _ServerOutput:
    """Reads what a server prints, so that the server never waits for a reader. Owned by `recorded_server`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._url = ""
        self._known = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def url(self) -> str:
        """The URL on which the server listens; waits until it does."""
        if not self._known.wait(_READY_SECONDS) or not self._url:
            said = " ".join(self._lines[-3:])
            raise EngineFault(f"the server that was to be measured did not start: {said}")
        return self._url

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines = [*self._lines[-20:], line.strip()]
            if line.startswith("listening "):
                self._url = line.split()[1]
                self._known.set()
        self._known.set()


async def drive_recorded(url: str, calls: Sequence[Call], concurrency: int = 0) -> Driven:
    """Send calls to a server from `recorded_server`, and time the answers by the clock of arrival times."""
    began: list[float] = []

    def now() -> float:
        moment = time.monotonic()
        if not began:  # times of outcomes count from the first reading of the clock
            began.append(moment)
        return moment

    options = RequestOptions(Target.parse(url), _NAME)
    outcomes = await drive(calls, options, concurrency, now=now)
    return Driven(began[0], calls, outcomes)


async def _load(url: str, seconds: float) -> Driven:
    """Send requests in 1 to 64 streams at once, for an equal time with each number of streams."""
    rng = random.Random(0)  # noqa: S311 (no secret)
    calls: list[Call] = []
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for place, streams in enumerate(STREAMS, start=1):
        until = began + seconds * place / len(STREAMS)
        while time.monotonic() < until:
            batch = [_call(rng) for _ in range(2 * streams)]
            driven = await drive_recorded(url, batch, streams)
            late = driven.began - began
            calls += batch
            outcomes += [_later(outcome, late) for outcome in driven.outcomes]
    if all(outcome.error for outcome in outcomes):
        raise EngineFault(f"the server that was measured answered nothing: {outcomes[0].error}")
    return Driven(began, calls, outcomes)


def _call(rng: random.Random) -> Call:
    length = min(1000, max(8, round(rng.lognormvariate(5.0, 1.0))))
    return Call(0.0, tuple(rng.randrange(_VOCAB) for _ in range(length)), rng.randrange(8, 49))


def _later(outcome: Outcome, seconds: float) -> Outcome:
    return replace(
        outcome,
        due=outcome.due + seconds,
        sent=outcome.sent + seconds,
        content=tuple(moment + seconds for moment in outcome.content),
        ended=outcome.ended + seconds,
    )


def way_of(run: RecordedRun, driven: Driven) -> Way:
    """The times that passed between the client of a load test and the engine that recorded it: medians.

    Raises:
        PenstockError: no request of the test is in the record.
    """
    ids = {arrival.request.prompt: arrival.request.id for arrival in run.arrivals}
    served = {each.id: each for each in run.served}
    there, back, end = [], [], []
    for call, outcome in zip(driven.calls, driven.outcomes, strict=True):
        fact = served.get(ids.get(call.prompt, ""))
        if outcome.error or fact is None:
            continue
        late = driven.began - run.began  # the client counts seconds from its own beginning
        there.append(fact.arrived - (outcome.sent + late))
        back.append(outcome.content[0] + late - fact.times[0])
        end.append(outcome.ended + late - fact.ended)
    if not there:
        raise PenstockError("no request of the load test is in the record")
    return Way(*(max(0.0, statistics.median(each)) for each in (there, back, end)))
