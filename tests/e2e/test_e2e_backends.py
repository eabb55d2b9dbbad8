"""Engines with different backends in one process: each computes with its own, and none sees the others."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import write_checkpoint

from needs import COMPILED
from penstock.contract.config import EngineConfig
from penstock.contract.plan import StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.loading import LoadedModel, find_model, load_model
from penstock.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

BLOCKS, BLOCK = 40, 16
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("backends"), "llama", "wide_heads_untied")


@pytest.fixture(autouse=True)
def _torch_threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(directory: Path, monkeypatch: pytest.MonkeyPatch, threads: int, isa: str = "") -> LoadedModel:
    monkeypatch.setenv("PENSTOCK_ISA", isa)
    config = EngineConfig(model=str(directory), dtype="float32", threads=threads)
    return load_model(config, find_model(config), lambda line: None)


class Steps:
    """One engine: its scheduler and runner over a model, step by step."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = SchedulerConfig(BLOCKS, BLOCK, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64)
        self.runner = loaded.runner(loaded.kv_store(BLOCKS, BLOCK), 4, 64)
        self.scheduler, self.results = Scheduler(config), []
        for index in range(4):
            prompt = tuple((7 * at + index) % 90 for at in range(11 + 9 * index))
            rules = StopRules(max_tokens=12)
            self.scheduler.submit(SequenceRequest(str(index), prompt, sampling=DRAWN.spec(), stop=rules, choice=index))

    def __iter__(self) -> Iterator[StepResult]:
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            result = self.runner.run(plan)
            self.scheduler.commit(plan, result)
            self.results.append(result)
            yield result


def told(steps: Steps) -> list[object]:
    """All results of an engine's steps, without the time that they took."""
    return [replace(result, seconds=0.0) for result in steps.results]


def test_engines_on_one_and_two_threads_and_by_torch_are_stepped_in_turns(directory, monkeypatch):
    one, two = load(directory, monkeypatch, 1), load(directory, monkeypatch, 2)
    by_torch = load(directory, monkeypatch, 1, "torch")
    assert [each.backend.threads for each in (one, two, by_torch)] == [1, 2, 0]
    assert [each.isa for each in (one, two, by_torch)] == [native.isas()[0]] * 2 + ["torch"]
    alone = Steps(one)
    list(alone)
    engines = [Steps(each) for each in (one, two, by_torch)]
    for _ in zip_longest(*engines):  # a step of each in turn
        pass
    assert told(engines[0]) == told(engines[1]) == told(alone)
    assert len(engines[2].results) == len(alone.results)


def test_engines_may_be_stepped_from_threads_of_their_own(directory, monkeypatch):
    models = [load(directory, monkeypatch, threads) for threads in (1, 2, 2)]
    engines = [Steps(each) for each in models]
    threads = [threading.Thread(target=list, args=(each,)) for each in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = Steps(models[0])
    list(alone)
    assert all(told(each) == told(alone) for each in engines)


def test_two_instruction_sets_run_side_by_side(directory, monkeypatch):
    models = {isa: load(directory, monkeypatch, 2, isa) for isa in native.isas()}
    before = {isa: Steps(loaded) for isa, loaded in models.items()}
    for steps in before.values():
        list(steps)
    engines = {isa: Steps(loaded) for isa, loaded in models.items()}
    for _ in zip_longest(*engines.values()):
        pass
    assert all(told(engines[isa]) == told(before[isa]) for isa in models)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not show a process's threads")
def test_a_backend_has_threads_of_its_own_which_end_with_it():
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    gc.collect()
    others = threads()  # one of these may end at any time, so only what is started here is counted
    one, three, four = CpuBackend(threads=1), CpuBackend(threads=3), CpuBackend(threads=4)
    started = threads() - others
    assert len(started) == 2 + 3
    assert [each.threads for each in (one, three, four)] == [1, 3, 4]
    del three
    gc.collect()
    assert len(started & threads()) == 3
    x = torch.randn(40, 64)
    assert torch.equal(four.rms_norm(x, torch.ones(64), 1e-5), one.rms_norm(x, torch.ones(64), 1e-5))


def test_a_model_may_move_to_another_backend(directory, monkeypatch):
    one = load(directory, monkeypatch, 1)
    moved = one.on(CpuBackend(one.isa, 3))
    assert (moved.backend.threads, one.backend.threads, moved.program is one.program) == (3, 1, True)
    engines = Steps(one), Steps(moved)
    for steps in engines:
        list(steps)
    assert told(engines[0]) == told(engines[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_may_use_its_parents_backend_alone_or_open_its_own():
    source = """
import os
import torch
from penstock.kernels.cpu_backend import CpuBackend
backend, x, ones = CpuBackend(threads=3), torch.randn(40, 64), torch.ones(64)
wanted = backend.rms_norm(x, ones, 1e-5)
child = os.fork()
if child == 0:
    same = torch.equal(backend.rms_norm(x, ones, 1e-5), wanted)
    del backend
    same &= torch.equal(CpuBackend(threads=2).rms_norm(x, ones, 1e-5), wanted)
    os._exit(0 if same else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
