"""The engine's side of the compiling process: asks for verdicts, and turns exceeded limits into one."""

from __future__ import annotations

import base64

from penstock.contract.grammar import Grammar
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Vocabulary
from penstock.workers import Exceeded, WorkerPool

__all__ = ["CPU_SECONDS", "WorkerClient"]

CPU_SECONDS = 2.0
WALL_SECONDS = 20.0
"""How long a worker may get no processor time before it counts as lost."""
TOO_COSTLY = Verdict(error="the grammar takes too much time or memory to compile", code="grammar_too_complex")


class WorkerClient:
    """Has grammars judged, by one process for each thread that asks at the same time.

    A process that exceeds its limits proves the grammar too costly. One that was killed, or got no processor
    time, proves nothing about it.
    """

    def __init__(self, vocabulary: Vocabulary, wall_seconds: float = WALL_SECONDS) -> None:
        tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
        hello = {"tokens": tokens, "special": vocabulary.special, "eos": vocabulary.eos}
        program = ("-m", "penstock.grammar.worker")
        self._pool = WorkerPool("compiles grammars", program, hello, wall_seconds=wall_seconds)

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the current processes."""
        return self._pool.pids

    def judge(self, grammar: Grammar, tight: bool = False) -> Verdict:
        """The process's verdict (see `worker.judge`); `TOO_COSTLY` if the grammar exceeds the process's limits.

        Raises:
            Unavailable: two processes in a row were killed or got no processor time, or none can be started.
        """
        order = {"kind": grammar.kind, "source": grammar.source, "tight": tight}
        try:
            return Verdict.read(self._pool.ask(order, CPU_SECONDS))
        except Exceeded:
            return TOO_COSTLY

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
