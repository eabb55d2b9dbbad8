"""A runner in a process of its own that is killed, crashes, hangs and raises: the engine goes on, to the token."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import engine_harness
import fake_program
import pytest

from penstock.contract.config import EngineConfig
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.errors import ConfigError, EngineFault, RunnerLost, SetupError
from penstock.contract.events import RequestFailed
from penstock.contract.model import HuggingFaceText, ModelFacts
from penstock.contract.plan import Admit, Row, StepPlan
from penstock.contract.request import EngineRequest, StopRules, TokenPrompt
from penstock.contract.sampling import NEUTRAL
from penstock.core import Scheduler
from penstock.engine import Engine
from penstock.remote import ProcessRunner, hang_limit
from penstock.remote import runner as module
from penstock.remote import zygote as zygote_module

PROGRAM = (sys.executable, str(Path(__file__).parent / "fake_program.py"))
CONFIG = EngineConfig(model="fake", block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
PATIENCE = 30.0

on_linux = pytest.mark.skipif(not zygote_module.can_fork(), reason="the runner's process is started, and not forked")


@pytest.fixture
def open_runner():
    """Start runners; they are ended with the test."""
    opened = []

    def start(trouble="", config=CONFIG, cache_dir=""):
        runner = loaded(trouble, config, cache_dir)
        opened.append(runner)
        return runner

    yield start
    for runner in opened:
        runner.close()


def loaded(trouble="", config=CONFIG, cache_dir=""):
    runner = ProcessRunner(PROGRAM)
    runner.load(replace(config, model=trouble or "fake"), cache_dir)
    runner.await_found(silent)
    runner.await_ready(silent)
    return runner


def silent(_line):
    pass


def first_plan():
    admit = Admit(slot=0, seq_id="s", tokens=(1, 2, 3), blocks=(0,), computed=0, sampling=NEUTRAL, choice=0)
    return StepPlan(0, (), (admit,), (Row(0, 0, 3, (), True),))


def next_plan(step):
    return StepPlan(step, (), (), (Row(0, 2 + step, 1, (), True),))


def run(runner, plan):
    runner.start(plan)
    return runner.finish()


def lose_runner(runner, number=signal.SIGKILL):
    """Send the runner's process a signal, and let the runner find its end: the error that is raised."""
    os.kill(runner.pid, number)
    with pytest.raises(RunnerLost) as lost:
        run(runner, next_plan(1))
    return lost.value


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone(pid):
    """Whether a process has ended, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=PATIENCE):
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


def test_it_computes_and_says_what_it_is(open_runner):
    said, runner = [], ProcessRunner(PROGRAM)
    try:
        runner.load(CONFIG, "")
        found = runner.await_found(said.append)
        facts = runner.await_ready(said.append)
        assert said == [f"sizes as they come, imported by {runner.zygote_pid or runner.pid}"]
        assert found == ModelFacts("fake", HuggingFaceText("nowhere"), EmbeddingSpec(), (("top_k", 5),), "a file")
        assert (facts.vocab_size, facts.memory.num_blocks) == (fake_program.VOCABULARY, 64)
        assert len(run(runner, first_plan()).rows[0].tokens) == 1
    finally:
        runner.close()
    assert gone(runner.pid)


def test_what_is_kept_is_saved_before_the_end(open_runner, tmp_path):
    """Also in the middle of a step whose result is no longer wanted."""
    runner = open_runner("keeps", cache_dir=str(tmp_path / "kept"))
    runner.start(first_plan())
    runner.close()
    assert (tmp_path / "kept").exists()
    assert gone(runner.pid)
    other = open_runner(cache_dir=str(tmp_path / "other"))
    other.close()
    assert not (tmp_path / "other").exists(), "nothing is kept, so that nobody waits for it"


def test_saving_is_not_waited_for_for_ever(open_runner, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SAVING_SECONDS", 1.0)
    runner = open_runner("keeps on", cache_dir=str(tmp_path / "kept"))
    began = time.monotonic()
    runner.close()
    assert time.monotonic() - began < PATIENCE
    assert gone(runner.pid)


def test_a_reset_forgets_and_keeps_the_process(open_runner):
    runner = open_runner()
    assert len(run(runner, first_plan()).rows[0].tokens) == 1
    assert runner.reset() is False
    assert len(run(runner, first_plan()).rows[0].tokens) == 1


def test_a_killed_process_is_told_and_another_takes_the_same_plans(open_runner):
    runner = open_runner()
    want = run(runner, first_plan()).rows
    before = runner.pid
    os.kill(before, signal.SIGKILL)
    with pytest.raises(RunnerLost, match="SIGKILL") as lost:
        run(runner, next_plan(1))
    assert lost.value.killed
    assert runner.reset() is True
    assert runner.pid != before
    assert run(runner, first_plan()).rows == want


def test_a_crash_is_nobody_elses_doing(open_runner):
    runner = open_runner()
    run(runner, first_plan())
    os.kill(runner.pid, signal.SIGSEGV)
    with pytest.raises(RunnerLost, match="SIGSEGV") as lost:
        run(runner, next_plan(1))
    assert not lost.value.killed


def test_a_step_that_raises_is_told_and_the_process_goes_on(open_runner):
    runner = open_runner("raises")
    run(runner, first_plan())
    before = runner.pid
    with pytest.raises(EngineFault, match="MemoryError: planted"):
        run(runner, StepPlan(3, (), (), ()))
    assert runner.reset() is False
    assert runner.pid == before
    assert run(runner, first_plan()).rows


def test_a_process_that_hangs_is_ended(open_runner, monkeypatch):
    monkeypatch.setattr(hang_limit, "_LEAST", 2.0)
    runner = open_runner("hangs")
    run(runner, first_plan())
    began = time.monotonic()
    with pytest.raises(RunnerLost, match="said nothing for 2 s") as lost:
        run(runner, StepPlan(3, (), (), ()))
    assert not lost.value.killed
    assert time.monotonic() - began < PATIENCE
    assert runner.reset() is True
    assert run(runner, first_plan()).rows


def test_a_wait_that_is_broken_off_leaves_nothing_behind(open_runner):
    runner = open_runner()
    run(runner, first_plan())
    runner.start(next_plan(1))  # its result is never taken
    assert runner.reset() is False
    again = run(runner, first_plan())
    assert again.step == 0


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ("refuses", ConfigError, "kv_cache_memory: is not enough"),
        ("dies", SetupError, "SIGABRT, while it loaded the model"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_and_no_process_is_left(trouble, error, words, caplog):
    runner = ProcessRunner(PROGRAM)
    runner.load(replace(CONFIG, model=trouble), "")
    with pytest.raises(error, match=words):
        runner.await_found(silent)
    assert gone(runner.pid)
    runner.close()
    assert runner.zygote_pid is None or gone(runner.zygote_pid)
    assert "zygote" not in caplog.text, "it did nothing wrong"


@on_linux
def test_a_killed_process_is_followed_by_one_that_imported_nothing_anew(open_runner, caplog):
    caplog.set_level("DEBUG", module.__name__)
    runner = open_runner()
    zygote, killed = runner.zygote_pid, runner.pid
    assert parent_of(killed) == zygote
    want = run(runner, first_plan()).rows
    lose_runner(runner)
    assert runner.reset() is True
    assert run(runner, first_plan()).rows == want
    assert (runner.zygote_pid, parent_of(runner.pid)) == (zygote, zygote)
    assert f"sizes as before, imported by {zygote}" in caplog.messages
    assert not Path(f"/proc/{killed}").exists(), "it was asked for how it ended"


@on_linux
def test_kills_in_quick_succession_are_each_recovered_from_without_imports(open_runner, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_IMPORTS", str(tmp_path / "imported"))  # imports would hang a second time
    runner = open_runner()
    want = run(runner, first_plan()).rows
    pids = {runner.pid}
    for _ in range(3):
        lose_runner(runner)
        assert runner.reset() is True
        assert run(runner, first_plan()).rows == want
        pids.add(runner.pid)
    assert len(pids) == 4


@on_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_the_signal_that_ended_a_forked_process_is_known(open_runner, number):
    runner = open_runner()
    lost = lose_runner(runner, number)
    assert f"process {runner.pid} is gone: signal {signal.Signals(number).name}" in str(lost)
    assert lost.killed == (number == signal.SIGKILL)


@on_linux
def test_the_exit_status_of_a_forked_process_is_known(open_runner):
    runner = open_runner("exits")
    run(runner, first_plan())
    with pytest.raises(RunnerLost, match="is gone: exit status 7") as lost:
        run(runner, StepPlan(3, (), (), ()))
    assert not lost.value.killed


@on_linux
def test_nobody_misses_a_zygote_before_another_process_is_needed(open_runner, caplog):
    """Without a zygote nobody can tell how the runner ended: it counts as killed."""
    runner = open_runner()
    zygote, killed = runner.zygote_pid, runner.pid
    want = run(runner, first_plan()).rows
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: gone(zygote))
    for _ in range(3):
        assert runner.reset() is False
        assert run(runner, first_plan()).rows == want
    assert runner.pid == killed
    lost = lose_runner(runner, signal.SIGSEGV)
    assert "nobody knows how" in str(lost)
    assert lost.killed
    assert f"the zygote is lost: the runner's process {zygote} is gone: signal SIGKILL" in caplog.messages
    assert runner.reset() is True
    assert runner.zygote_pid != zygote
    assert parent_of(runner.pid) == runner.zygote_pid
    assert run(runner, first_plan()).rows == want


@on_linux
def test_a_zygote_that_stands_still_is_ended_and_followed_by_another(open_runner, monkeypatch):
    monkeypatch.setattr(zygote_module, "_ANSWER_SECONDS", 1.0)
    runner = open_runner()
    stopped = runner.zygote_pid
    want = run(runner, first_plan()).rows
    os.kill(stopped, signal.SIGSTOP)
    assert lose_runner(runner).killed
    assert gone(stopped)
    assert runner.reset() is True
    assert run(runner, first_plan()).rows == want


@on_linux
def test_no_process_is_left_when_the_zygote_was_killed_first():
    runner = loaded()
    pids = runner.zygote_pid, runner.pid
    os.kill(runner.zygote_pid, signal.SIGKILL)
    runner.close()
    assert all(map(gone, pids))


@on_linux
def test_imports_that_end_are_told_as_they_ended(monkeypatch):
    monkeypatch.setenv("FAKE_IMPORTS", "end")
    runner = ProcessRunner(PROGRAM)
    runner.load(CONFIG, "")
    with pytest.raises(SetupError, match="is gone: exit status 7, while it loaded"):
        runner.await_found(silent)
    runner.close()
    assert gone(runner.zygote_pid)


@on_linux
def test_imports_that_stand_still_are_found(monkeypatch):
    monkeypatch.setattr(zygote_module, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setenv("FAKE_IMPORTS", "stand still")
    runner = ProcessRunner(PROGRAM)
    runner.load(CONFIG, "")
    with pytest.raises(SetupError, match="has said nothing for 1 s"):
        runner.await_found(silent, 1.0)
    runner.close()
    assert gone(runner.zygote_pid)


@pytest.mark.parametrize("standby", [True, False])
def test_imports_are_not_waited_for_at_the_end(monkeypatch, standby, caplog):
    monkeypatch.setenv("FAKE_IMPORTS", "stand still")
    runner, began = ProcessRunner(PROGRAM), time.monotonic()
    runner.load(replace(CONFIG, standby=standby), "")
    runner.close()
    assert time.monotonic() - began < 4.0
    assert not caplog.text
    assert gone(runner.pid)


def test_without_a_process_of_its_own_there_is_none_to_follow():
    with pytest.raises(ConfigError, match="standby: would do nothing"):
        EngineConfig(model="fake", runner="in-process", standby=False)


def test_no_process_is_forked_where_nobody_wants_it_or_the_system_is_another(open_runner, monkeypatch):
    runner = open_runner(config=replace(CONFIG, standby=False))
    assert runner.zygote_pid is None
    want = run(runner, first_plan()).rows
    lose_runner(runner)
    assert runner.reset() is True
    assert run(runner, first_plan()).rows == want
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert open_runner().zygote_pid is None


def test_processes_that_end_again_and_again_are_given_up(open_runner, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.001)
    runner = open_runner("dies later")
    run(runner, first_plan())
    os.kill(runner.pid, signal.SIGKILL)
    with pytest.raises(RunnerLost):
        run(runner, next_plan(1))
    with pytest.raises(EngineFault, match="5 times in a row"):
        runner.reset()


def test_a_process_that_stands_still_while_it_loads_is_followed_by_another(open_runner, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_PAUSE", 0.001)
    monkeypatch.setattr(module, "_LOADING_SECONDS", 3.0)
    monkeypatch.setattr(module, "_LOADING_TIMES", 0.0)
    runner = open_runner("stands still", cache_dir=str(tmp_path / "stood"))
    want = run(runner, first_plan()).rows
    os.kill(runner.pid, signal.SIGKILL)
    with pytest.raises(RunnerLost):
        run(runner, next_plan(1))
    assert runner.reset() is True
    assert (tmp_path / "stood").exists()
    assert run(runner, first_plan()).rows == want


def test_requests_that_crash_steps_one_after_another_end_alone_and_the_engine_lives(open_runner):
    bench = engine_harness.build(max_num_seqs=4)
    options = {"block_size": bench.config.block_size, "max_num_seqs": bench.config.max_num_seqs}
    options["max_num_batched_tokens"] = bench.config.max_num_batched_tokens
    bench.engine = Engine(Scheduler(bench.config), open_runner("poisoned", config=EngineConfig(**options)), bench.text)
    for number in range(3):
        rules = StopRules(max_tokens=4, ignore_eos=True)
        one = EngineRequest(f"poison {number}", TokenPrompt((fake_program.POISON, 1)), stop=rules)
        bench.submit_request(one)
        bench.run()
        assert engine_harness.terminal_of(bench.outputs[one.id]).poisoned
    good = bench.submit("good", max_tokens=8)
    bench.run()
    assert engine_harness.tokens_of(bench.outputs[good]) == bench.expected("good", 8)
    assert bench.engine.measurements().lost_runners == 6


def pids_of_a_killed_engine(tmp_path, then):
    """Run an engine that prints the ids of its processes and kills itself."""
    script = tmp_path / "engine.py"
    script.write_text(
        "import os, signal\n"
        "from penstock.contract.config import EngineConfig\n"
        "from penstock.remote import ProcessRunner\n"
        f"runner = ProcessRunner({PROGRAM!r})\n"
        "runner.load(EngineConfig(model='fake', block_size=4, max_num_seqs=4), '')\n"
        f"{then}\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return list(map(int, done.stdout.split()))


def test_processes_end_with_the_one_that_started_them(tmp_path):
    say = "print(runner.pid, runner.zygote_pid or '', flush=True)"
    wait = "runner.await_found(lambda line: None)\nrunner.await_ready(lambda line: None)"
    for pid in pids_of_a_killed_engine(tmp_path, f"{wait}\n{say}"):
        wait_until(lambda pid=pid: gone(pid), seconds=10)


def test_imports_end_with_the_process_that_started_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_IMPORTS", "stand still")
    pids = pids_of_a_killed_engine(tmp_path, "print(runner.zygote_pid or runner.pid, flush=True)")
    wait_until(lambda: gone(pids[0]), seconds=10)


@on_linux
def test_a_runner_whose_zygote_is_gone_ends_with_the_engine_all_the_same(tmp_path):
    kill = "print(runner.pid, runner.zygote_pid, flush=True)\nos.kill(runner.zygote_pid, signal.SIGKILL)"
    for pid in pids_of_a_killed_engine(tmp_path, f"runner.await_found(lambda line: None)\n{kill}"):
        wait_until(lambda pid=pid: gone(pid), seconds=10)


def kill(pid: int) -> None:
    """Kill a process that may be gone: on a busy machine a timer fires late, when another kill has come before it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_answers_are_what_they_would_have_been_whatever_is_killed(open_runner):
    bench = engine_harness.build(max_num_seqs=4)
    options = {"block_size": bench.config.block_size, "max_num_seqs": bench.config.max_num_seqs}
    options["max_num_batched_tokens"] = bench.config.max_num_batched_tokens
    runner = open_runner(config=EngineConfig(**options))
    bench.engine = Engine(Scheduler(bench.config), runner, bench.text)
    requests = {f"prompt {i}": bench.submit(f"prompt {i}", max_tokens=20) for i in range(6)}
    chance, kills, step = random.Random(0), 0, 0
    while bench.engine.has_work:
        if step % 5 == 3 and kills < 8:
            threading.Timer(chance.random() * 0.002, kill, (runner.pid,)).start()
            kills += 1
            time.sleep(chance.random() * 0.004)
        bench.step()
        step += 1
    for prompt, one in requests.items():
        assert not isinstance(engine_harness.terminal_of(bench.outputs[one]), RequestFailed)
        assert engine_harness.tokens_of(bench.outputs[one]) == bench.expected(prompt, 20)
    measured = bench.engine.measurements()
    assert 0 < measured.lost_runners <= kills
    assert measured.failed_steps >= measured.lost_runners
    assert bench.engine.health().free_blocks == bench.config.num_blocks


@pytest.fixture
def nursery():
    shared = zygote_module.Nursery(PROGRAM)
    yield shared
    shared.close()
    assert gone(shared.pid)


def from_nursery(nursery):
    runner = ProcessRunner(PROGRAM, nursery)
    runner.load(CONFIG, "")
    runner.await_found(silent)
    runner.await_ready(silent)
    return runner


@on_linux
def test_runners_in_threads_of_their_own_share_a_zygote(nursery):
    """Each starts, is killed, replaced and closed at its own time, and is told how its own process ended."""
    want, wrong = [], []

    def live(number):
        signals = [signal.SIGKILL, signal.SIGSEGV][number % 2]
        for _ in range(6):
            runner = from_nursery(nursery)
            rows = run(runner, first_plan()).rows
            want.append(rows)
            same = parent_of(runner.pid) == nursery.pid == runner.zygote_pid
            lost = lose_runner(runner, signals)
            runner.reset()
            if not same or lost.killed != (signals == signal.SIGKILL) or run(runner, first_plan()).rows != rows:
                wrong.append((number, str(lost)))
            pid = runner.pid
            runner.close()
            if not gone(pid):
                wrong.append((number, "is left"))

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong
    assert len(want) == 24
    assert all(each == want[0] for each in want)


@on_linux
def test_a_shared_zygote_that_was_killed_is_followed_by_another(nursery):
    first, second = from_nursery(nursery), from_nursery(nursery)
    killed = nursery.pid
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: gone(killed))
    assert len(run(first, first_plan()).rows) == 1, "whoever computes goes on"
    lose_runner(first)
    assert first.reset() is True
    assert nursery.pid != killed
    lose_runner(second)
    assert second.reset() is True
    assert parent_of(first.pid) == parent_of(second.pid) == nursery.pid
    first.close()
    second.close()
