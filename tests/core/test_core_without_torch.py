"""Deciding needs no tensors: contract, core and sim run where torch and numpy are not installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
for room in ("contract", "core", "sim"):
    package = importlib.import_module(f"penstock.{room}")
    for module in pkgutil.iter_modules(package.__path__, f"penstock.{room}."):
        importlib.import_module(module.name)
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.contract.request import SequenceRequest, StopRules
from penstock.core import Scheduler
from penstock.sim import FakeRunner
config = SchedulerConfig(8)
scheduler, runner = Scheduler(config), FakeRunner(config)
scheduler.submit(SequenceRequest("a", (1, 2, 3), stop=StopRules(max_tokens=2)))
while scheduler.has_work:
    plan = scheduler.plan()
    scheduler.commit(plan, runner.run(plan))
print(sorted({"torch", "numpy"} & sys.modules.keys()))
"""


def test_core_and_sim_run_without_torch_and_numpy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
