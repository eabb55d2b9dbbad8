"""Ctrl-C in the middle of a step: the plan is taken back, nothing that was said is lost, and everything goes on."""

from __future__ import annotations

import signal
import threading

import engine_harness as harness
import pytest
from engine_harness import tokens_of

from penstock.core.replaying import replay
from penstock.engine import interrupts_held
from penstock.engine.interrupts import interruptible


class Interrupted:
    """A runner that is broken off in some of its steps, before or after it has written."""

    def __init__(self, runner, steps, error=KeyboardInterrupt):
        self._runner = runner
        self._steps = steps
        self._error = error
        self.depth = runner.depth

    def start(self, plan):
        self._runner.start(plan)

    def finish(self):
        how = self._steps.pop(0) if self._steps else ""
        if how == "before":
            raise self._error
        result = self._runner.finish()
        if how == "after":
            raise self._error
        return result

    def reset(self):
        return self._runner.reset()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_step_that_is_broken_off_is_computed_again(depth, error, tmp_path):
    trace = tmp_path / "trace.jsonl"
    steps = ["before", "", "after", "after", "", "", "before", "", "", "", "after"]
    bench = harness.build(
        record=trace, depth=depth, num_blocks=24, around=lambda runner: Interrupted(runner, list(steps), error)
    )
    prompts = [f"prompt {'x' * i}" for i in range(6)]
    asks = {prompt: bench.submit(prompt, max_tokens=15) for prompt in prompts}
    broken = 0
    while bench.engine.has_work:
        try:
            bench.step()
        except error:
            broken += 1
            bench.engine.scheduler.check()
    assert broken == sum(bool(step) for step in steps)
    for prompt, one in asks.items():
        assert tokens_of(bench.outputs[one]) == bench.expected(prompt, 15)
    assert bench.engine.health().free_blocks == 24
    bench.engine.close()
    assert replay(trace.read_text().splitlines(keepends=True)).same


def test_an_interrupt_is_held_until_the_outermost_block_ends():
    seen = []
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117, PT012 (what happens inside, and in which order, is the test)
        with interrupts_held():
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
                seen.append("inner")
            seen.append("outer")
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_was_held_is_raised_where_it_is_allowed():
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        seen.append("held")
        interruptible(lambda: seen.append("not reached"))
    assert seen == ["held"]


def test_an_interrupt_where_it_is_allowed_leaves_the_rest_held():
    with interrupts_held():
        with pytest.raises(KeyboardInterrupt):
            interruptible(lambda: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_another_thread_holds_is_nothing():
    def hold():
        with interrupts_held():
            handlers.append(interruptible(lambda: signal.getsignal(signal.SIGINT)))

    handlers = []
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_program_that_ignores_interrupts_goes_on_ignoring_them():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
