"""The engine's side of the compiling process: starts it when needed, asks, and kills it when it takes too long."""

from __future__ import annotations

import base64
import json
import select
import signal
import subprocess
import sys

from penstock.contract.errors import Unavailable
from penstock.contract.grammar import Grammar
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Vocabulary

__all__ = ["WorkerClient"]

WALL_SECONDS = 20.0
"""A last resort: the process limits its own processor time, but a busy machine or a stopped process uses none."""
ENDING_SECONDS = 1.0
"""Between the end of a process's output and its own."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that somebody else has killed: its own limits end it by other signals, or by an error."""
TRIES = 2
TOO_COSTLY = Verdict(error="the grammar takes too much time or memory to compile", code="grammar_too_complex")


class WorkerClient:
    """Owns the process. One thread at a time.

    A process that ends by its limits while it judges tells something of the grammar. One that was killed, or did not
    answer in time although its processor time is limited, does not: it is asked again, and the next grammar gets a new
    process either way.
    """

    def __init__(self, vocabulary: Vocabulary, wall_seconds: float = WALL_SECONDS) -> None:
        tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
        hello = {"tokens": tokens, "special": vocabulary.special, "eos": vocabulary.eos}
        self._hello = json.dumps(hello).encode() + b"\n"
        self._wall_seconds = wall_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def judge(self, grammar: Grammar, tight: bool = False) -> Verdict:
        """What the process says (see `worker.judge`); that it is too costly, if it exceeds the process's limits.

        Raises:
            Unavailable: processes were killed, or too slow on a busy machine, again and again.
        """
        for _ in range(TRIES):
            verdict = self._judge_once(grammar, tight)
            if verdict is not None:
                return verdict
        raise Unavailable("The process that compiles grammars was lost twice. Try again in a moment.")

    def _judge_once(self, grammar: Grammar, tight: bool) -> Verdict | None:
        """None where the process was lost."""
        line = json.dumps({"kind": grammar.kind, "source": grammar.source, "tight": tight}).encode() + b"\n"
        try:
            answer = self._asked(self._running(), line)
        except BaseException:  # Ctrl-C: the next grammar would be told the verdict on this one
            self.close()
            raise
        if answer.endswith(b"\n"):
            return Verdict.read(answer)
        how = self._ended()
        self.close()
        return None if how is None or how in KILLED else TOO_COSTLY

    def _ended(self) -> int | None:
        """How the process has ended; None where it goes on, and was only slow."""
        assert self._process is not None
        try:
            return self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was still to be sent has no reader any more
                    continue
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a panic's report; the verdict says what the caller needs
                start_new_session=True,  # a terminal's Ctrl-C is meant for us
            )
            self._send(self._process, self._hello)
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        if not self._send(process, line):
            return b""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._wall_seconds)
        return process.stdout.readline() if ready else b""

    @staticmethod
    def _send(process: subprocess.Popen[bytes], line: bytes) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return False
        return True
