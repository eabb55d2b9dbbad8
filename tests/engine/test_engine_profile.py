"""Profiles of a running engine: steps and rows in Chrome's trace events, errors, bounds, and the end of the engine."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager

import pytest
from test_engine_calls import Running

from penstock.contract.errors import EngineFault, RequestError
from penstock.engine import LocalClient, Profiles
from penstock.engine import profile as room

PROMPT = "hello there, you"


class Recorded:
    """A profiler that notes the spans that it is told of."""

    def __init__(self, failing: bool = False) -> None:
        self.failing = failing
        self.open = False
        self.spans: list[str] = []

    def start(self):
        if self.failing:
            raise EngineFault("It cannot.")
        assert not self.open
        self.open = True
        self.spans = []

    @contextmanager
    def span(self, name):
        assert self.open
        self.spans.append(name)
        yield

    def stop(self):
        assert self.open
        self.open = False
        spans = self.spans
        return lambda path: path.write_text(json.dumps(spans))


class Profiled(Running):
    """A running engine whose profiles go to a folder."""

    def __init__(self, folder, profiler=None, **options) -> None:
        super().__init__(**options)
        self.profiler = profiler or Recorded()
        self.folder = folder
        self.client = LocalClient(self.harness.intake, self.loop, Profiles(folder, self.profiler, self.harness.clock))

    async def profile(self):
        """Both files of a profile that is stopped now."""
        steps, computed = await self.client.stop_profile()
        assert (steps.endswith("-steps.json"), computed.endswith("-torch.json")) == (True, True)
        return (json.loads((self.folder / name).read_text()) for name in (steps, computed))


def spans_of(trace, track):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == track]


async def test_steps_rows_and_counts_are_on_tracks(tmp_path):
    with Profiled(tmp_path) as running:
        await running.answer("before", PROMPT)
        await running.client.start_profile()
        await running.answer("a", "what is this? who", n=2)
        steps, computed = await running.profile()
        await running.answer("after", PROMPT)
    parts = [span["name"] for span in spans_of(steps, 0)]
    assert parts == computed == ["plan", "run", "commit"] * (len(parts) // 3)
    assert len(parts) // 3 >= 5  # two chunks of a prompt, then a token each
    names = {event["tid"]: event["args"]["name"] for event in steps["traceEvents"] if event["name"] == "thread_name"}
    assert names == {0: "engine", 1: "slot 0", 2: "slot 1"}
    first = [row["name"] for row in spans_of(steps, 1)]
    assert first[0].startswith("prompt, ")
    assert first[-1] == "decode"
    rows = sum(len(spans_of(steps, track)) for track in (1, 2))
    runs = [span["args"] for span in spans_of(steps, 0) if span["name"] == "run"]
    assert rows == sum(int(run["plan"].partition(": ")[2].partition(" rows")[0]) for run in runs)
    assert [run["step"] for run in runs] == list(range(runs[0]["step"], runs[0]["step"] + len(runs)))
    counts = [event["args"] for event in steps["traceEvents"] if event["ph"] == "C" and event["name"] == "sequences"]
    assert max(each["running"] for each in counts) == 2
    assert counts[-1] == {"running": 0, "waiting": 0}


async def test_times_are_microseconds_since_the_beginning(tmp_path):
    with Profiled(tmp_path) as running:
        clock = running.harness.clock
        clock.advance(3)
        await running.client.start_profile()
        clock.advance(0.25)
        await running.answer("a", PROMPT)
        steps, _ = await running.profile()
    times = [event["ts"] for event in steps["traceEvents"] if "ts" in event]
    assert min(times) == 250_000
    assert all(span["dur"] >= 0 for span in spans_of(steps, 0))


async def test_two_at_once_and_a_stop_without_a_start_are_refused_and_harm_nothing(tmp_path):
    with Profiled(tmp_path) as running:
        with pytest.raises(RequestError) as refused:
            await running.client.stop_profile()
        assert refused.value.code == "profile_not_running"
        await running.client.start_profile()
        with pytest.raises(RequestError) as refused:
            await running.client.start_profile()
        assert refused.value.code == "profile_running"
        await running.answer("a", PROMPT)
        steps, _ = await running.profile()
        assert spans_of(steps, 0)
        with pytest.raises(RequestError):
            await running.client.stop_profile()
        await running.client.start_profile()
        await running.client.stop_profile()
    assert len(list(tmp_path.iterdir())) == 4


async def test_without_a_folder_there_are_none():
    with Running() as running:
        with pytest.raises(RequestError, match="--profile-dir") as refused:
            await running.client.start_profile()
        assert refused.value.code == "profiling_off"
        await running.client.heartbeat()


async def test_a_profiler_that_fails_and_a_folder_that_is_gone_leave_the_engine_alive(tmp_path):
    with Profiled(tmp_path, Recorded(failing=True)) as running:
        with pytest.raises(EngineFault, match="It cannot"):
            await running.client.start_profile()
        assert await running.answer("a", PROMPT)
    folder = tmp_path / "gone"
    folder.mkdir()
    with Profiled(folder) as running:
        await running.client.start_profile()
        folder.rmdir()
        with pytest.raises(EngineFault, match="--profile-dir") as failed:
            await running.client.stop_profile()
        assert str(tmp_path) not in str(failed.value)
        assert await running.answer("a", PROMPT)


async def test_one_that_is_forgotten_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MAX_STEPS", 3)
    with Profiled(tmp_path) as running:
        await running.client.start_profile()
        await running.answer("a", PROMPT)
        assert not running.profiler.open
        with pytest.raises(RequestError):
            await running.client.start_profile()
        steps, computed = await running.profile()
    assert [span["name"] for span in spans_of(steps, 0)] == computed == ["plan", "run", "commit"] * 3


async def test_one_that_runs_when_the_engine_ends_is_kept(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Profiled(tmp_path) as running:
        await running.client.start_profile()
        await running.answer("a", PROMPT)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert all(name in caplog.text for name in names)
    assert not running.profiler.open
