"""The engine's side of the compiling process: asks, and says what it means when the process exceeds its limits."""

from __future__ import annotations

import base64

from penstock.contract.grammar import Grammar
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Vocabulary
from penstock.workers import Exceeded, WorkerPool

__all__ = ["CPU_SECONDS", "WorkerClient"]

CPU_SECONDS = 2.0
WALL_SECONDS = 20.0
TOO_COSTLY = Verdict(error="the grammar takes too much time or memory to compile", code="grammar_too_complex")


class WorkerClient:
    """Has grammars judged, by as many processes as threads ask at once.

    A process that ends by its limits while it judges tells something of the grammar. One that was killed, or did not
    answer in time although its processor time is limited, does not.
    """

    def __init__(self, vocabulary: Vocabulary, wall_seconds: float = WALL_SECONDS) -> None:
        tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
        hello = {"tokens": tokens, "special": vocabulary.special, "eos": vocabulary.eos}
        program = ("-m", "penstock.grammar.worker")
        self._pool = WorkerPool("compiles grammars", program, hello, wall_seconds=wall_seconds)

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes there are."""
        return self._pool.pids

    def judge(self, grammar: Grammar, tight: bool = False) -> Verdict:
        """What the process says (see `worker.judge`); that it is too costly, if it exceeds the process's limits.

        Raises:
            Unavailable: processes were killed, or too slow on a busy machine, again and again.
        """
        order = {"kind": grammar.kind, "source": grammar.source, "tight": tight}
        try:
            return Verdict.read(self._pool.ask(order, CPU_SECONDS))
        except Exceeded:
            return TOO_COSTLY

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
