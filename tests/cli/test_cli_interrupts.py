"""Ctrl-C under a pseudo-terminal: every command soon says so, exits with 130, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from terminal import Terminal

SMALL = ("--kv-cache-memory", "400MB", "--threads", "1", "--dtype", "float32")
LONG = ("--max-tokens", "300000", "--ignore-eos")


def ended_well(terminal: Terminal, code: int = 130) -> None:
    """The command said so and ended, without a traceback and with nothing left running."""
    assert terminal.ends() == code, terminal.screen
    if code:
        assert terminal.screen.rstrip().endswith("interrupted"), terminal.screen
    assert "Traceback" not in terminal.screen
    assert "Exception ignored" not in terminal.screen
    assert terminal.left_running() == []


def test_generate(endless):
    with Terminal("generate", endless, "-p", "abc", *SMALL, *LONG) as terminal:
        terminal.expect("<")  # made-up words look like this
        terminal.interrupt()
        ended_well(terminal)


@pytest.mark.model
def test_generate_with_a_grammar_leaves_no_worker(default_model):
    form = json.dumps({"regex": "abc[a-z ]+"})
    with Terminal("generate", "-p", "abc", "--max-tokens", "8000", "--structured-outputs", form) as terminal:
        terminal.expect("abc")
        assert len(terminal.left_running()) == 3, "itself, and workers for the template and the grammar"
        terminal.interrupt()
        ended_well(terminal)


def test_a_file_of_prompts_keeps_what_was_finished(endless, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {"ignore_eos": True, "max_tokens": 300_000}
    source.write_text(
        "".join(json.dumps(each) + "\n" for each in [{"prompt": "a", "max_tokens": 2}, {"prompt": "b"} | long])
    )
    with Terminal("generate", endless, "--input", str(source), "--output", str(target), *SMALL) as terminal:
        terminal.expect("Generating")
        while not target.exists() or not target.read_text():
            time.sleep(0.1)
        terminal.interrupt()
        ended_well(terminal)
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == ["1"]


def test_run_batch(endless, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "abc", "max_tokens": 300_000, "ignore_eos": True}
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    with Terminal("run-batch", endless, "-i", str(source), "-o", str(target), *SMALL) as terminal:
        terminal.expect("Answering")
        while not target.exists():
            time.sleep(0.1)
        terminal.interrupt()
        ended_well(terminal)
    assert target.read_text() == ""


WAITS_FOR_A_SOCKET = """
import os, signal, socket, threading, time
from penstock.cli.interrupts import ends_when_interrupted, interrupts_taken

def press():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

ours, theirs = socket.socketpair()
ours.settimeout(20)
with ends_when_interrupted(), interrupts_taken():
    threading.Thread(target=press).start()  # takes the signal: the main thread's wait goes on
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ours.recv(1)
    except KeyboardInterrupt:
        print("heard")
"""


def test_one_that_does_not_end_a_wait_for_a_socket_is_heard_all_the_same():
    """Like a signal between Python's last check for signals and the wait, which no test can hit reliably."""
    ran = subprocess.run([sys.executable, "-c", WAITS_FOR_A_SOCKET], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "heard\n", ran.stderr


@pytest.mark.deep
def test_bench_batch(endless):
    sizes = ("--streams", "2", "--prompt-tokens", "8", "--new-tokens", "5000", "--repeats", "50", "--no-limits")
    with Terminal("bench", "batch", endless, *SMALL, *sizes) as terminal:
        terminal.expect("Measuring")
        terminal.interrupt()
        ended_well(terminal)


def test_chat_goes_on_after_an_answer_was_stopped(endless):
    with Terminal("chat", endless, *SMALL, *LONG) as terminal:
        for question in ("abc", "def"):
            terminal.expect("> ")
            terminal.type(f"{question}\r")
            terminal.expect("<")
            terminal.interrupt()
            terminal.expect("[stopped]")
            terminal.expect("first after")
        terminal.expect("> ")
        time.sleep(0.5)  # until it reads input
        terminal.interrupt()
        terminal.expect("/exit")
        time.sleep(2)  # a conversation that goes on is not ended
        terminal.type("/exit\r")
        ended_well(terminal, 0)


@pytest.mark.deep
def test_verify(endless):
    with Terminal("verify", endless, "--threads", "1", "--schedules", "5000") as terminal:
        terminal.expect("Verifying")
        terminal.interrupt()
        ended_well(terminal)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["serve", "chat", "generate -p abc", "verify", "show"])
def test_while_libraries_are_imported_and_the_model_is_loaded(endless, command):
    name, *more = command.split()
    with Terminal(name, endless, *more, PYTHONVERBOSE="1") as terminal:
        terminal.expect("import 'torch._C")
        terminal.interrupt()
        assert terminal.ends() == 130
        assert "\ninterrupted" in terminal.screen.replace("\r", "")
        assert terminal.left_running() == []


def test_serve_ends_in_order(endless):
    with Terminal("serve", endless, "--port", "0", *SMALL) as terminal:
        terminal.expect("listening")
        terminal.interrupt()
        ended_well(terminal, 0)


DEAF = """
import sys, time, click
from penstock.cli import run

class Sinks:
    def __del__(self):
        for _ in range(20):
            time.sleep(0.1)

@click.command()
def command():
    print("ready", flush=True)
    {body}

run(command, "deaf")
"""


@pytest.mark.parametrize(
    "body",
    [
        "__import__('re').match('(a+)+$', 'a' * 60 + 'b')",  # compiled code that would take for ever
        "\n    try: time.sleep(60)\n    except BaseException: raise ImportError('made of it')",
        "\n    while True:\n        try: time.sleep(0.01)\n        except BaseException: pass",
        "Sinks(); time.sleep(60)",  # the interrupt comes in a destructor
    ],
)
def test_code_that_hears_no_interrupt_is_ended(body):
    code = DEAF.replace("{body}", body)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        try:
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()  # code that hears nothing at all would never end
    assert (process.returncode, said.strip()) == (130, "interrupted")


def test_a_command_that_makes_an_error_of_an_interrupt_ends_at_once():
    """Not when the watch loses patience: it would then say the word in the same moment as the command."""
    patient = "import penstock.cli.interrupts\npenstock.cli.interrupts.GRACE_SECONDS = 600\n"
    body = "\n    try: time.sleep(600)\n    except BaseException: time.sleep(0.1); raise ImportError('made of it')"
    with subprocess.Popen(
        [sys.executable, "-c", patient + DEAF.replace("{body}", body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said.strip()) == (130, "interrupted")


def test_an_interrupt_in_the_making_of_a_class_ends_with_the_exit_code_all_the_same(tmp_path):
    """Dataclasses execute text; under `python -m` the process would otherwise end by a signal."""
    (tmp_path / "module.py").write_text(DEAF.replace("{body}", "exec('raise KeyboardInterrupt')"))
    done = subprocess.run([sys.executable, "-m", "module"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
