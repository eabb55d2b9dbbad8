"""An interpreter that ends while an engine computes, and nobody has closed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE = 120.0
LEFT_ALONE = """
import asyncio
import sys
import threading

import engine_harness as harness
import torch

from penstock.engine import EngineLoop, LocalClient
from penstock.engine.admission import QueueLimits

computing = threading.Event()


class Native:
    # Its steps are C++ without Python's lock, nearly all of the time, as a model's are.

    def __init__(self, runner):
        self._runner = runner
        self._numbers = torch.ones(1000, 1000)

    def run(self, plan):
        computing.set()
        self._numbers @ self._numbers
        return self._runner.run(plan)

    def reset(self):
        return self._runner.reset()


async def leave():
    global reading
    reading = asyncio.ensure_future(anext(client.generate(request)))
    while not computing.is_set():
        await asyncio.sleep(0.001)
    await asyncio.sleep(float(sys.argv[1]))


bench = harness.build(around=Native)
loop = EngineLoop(bench.engine, bench.clock, QueueLimits())
loop.start()
client = LocalClient(bench.intake, loop)
request = harness.request_of("left", bench.text, "hello", max_tokens=120)
asyncio.new_event_loop().run_until_complete(leave())
print("left alone", bench.engine.scheduler.num_running)
"""


@pytest.mark.parametrize("pause", [0.013, *(pytest.param(each, marks=pytest.mark.deep) for each in (0.0, 0.029, 0.05))])
def test_an_engine_that_was_left_alone_is_stopped_before_the_interpreter_ends(pause):
    """A thread that asks for Python's lock after that would be unwound through C++, which ends the process."""
    command = [sys.executable, "-c", LEFT_ALONE, str(pause)]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert "terminate" not in done.stderr
    assert (done.returncode, done.stdout) == (0, "left alone 1\n"), done.stderr
