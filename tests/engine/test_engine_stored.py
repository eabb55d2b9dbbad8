"""An engine with a store: it asks what is there, and a recorded run replays without one."""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.plan import StoreCounts
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.core.replaying import replay
from penstock.engine import Engine, Recorder
from penstock.sim.fake_runner import FakeRunner

from engine_harness import text_model  # isort: skip

CONFIG = SchedulerConfig(num_blocks=16, block_size=4, storing=True)
PROMPT = tuple(range(1, 20))


class Stored:
    """What a runner's store has."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.asked = 0

    def leading(self, keys) -> int:
        self.asked += 1
        return next((at for at, key in enumerate(keys) if key not in self._runner.stored), len(keys))


class Saying(FakeRunner):
    """Says how saving goes, once."""

    def finish(self):
        return replace(super().finish(), store=StoreCounts(written=3, bytes=9) if self._step == 1 else None)


def run(path, stored=()):
    runner = Saying(CONFIG, 20)
    runner.stored.update(stored)
    there = Stored(runner)
    engine = Engine(Scheduler(CONFIG), runner, text_model(), Recorder(path, CONFIG), stored=there)
    request = SequenceRequest("s", PROMPT, stop=StopRules(max_tokens=3))
    engine.scheduler.submit(request)
    engine._recorder.submitted(request)
    while engine.has_work:
        engine.step()
    assert there.asked == 1
    measured = engine.measurements()
    engine.close()
    report = replay(path.read_text().splitlines(keepends=True))
    assert report.same, report.explain()
    return runner, measured


def test_it_asks_once_and_tells_what_it_was_told(tmp_path):
    runner, measured = run(tmp_path / "first")
    assert len(runner.stored) == (len(PROMPT) + 2) // 4, (
        "the last blocks are saved too, when there is nothing else to do"
    )
    assert (measured.sought_tokens, measured.restored_tokens) == (16, 0)
    assert (measured.store_written, measured.store_bytes) == (3, 9)
    _, measured = run(tmp_path / "second", runner.stored)
    assert (measured.sought_tokens, measured.restored_tokens) == (16, 16)
