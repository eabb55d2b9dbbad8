"""Answers by request id, for requests that were added one by one: while they run and for a while after.

Decides how long a finished answer is kept, and when a listener hears of new text. Invariant: memory does not grow with
the number of past requests: only the last `KEPT` finished answers are kept, and none that the caller took out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.contract.errors import InvalidParameter
from penstock.llm.outputs import Answer

__all__ = ["KEPT", "RequestBook"]

KEPT = 1024


@dataclass(slots=True)
class _Entry:
    """One request. Owned by the book."""

    answer: Answer
    on_text: Callable[[str], None] | None
    told: int = 0
    """Pieces of text that the listener has heard."""


class RequestBook:
    """The answers of one engine's requests. Owned by an `LLM`; not thread-safe."""

    def __init__(self) -> None:
        self._live: dict[str, _Entry] = {}
        self._ended: dict[str, _Entry] = {}

    def add(self, answer: Answer, on_text: Callable[[str], None] | None) -> None:
        """Start keeping an answer; `on_text` is called with the new text of its first choice."""
        self._live[answer.id] = _Entry(answer, on_text)

    def moved(self, answers: Iterable[Answer]) -> list[Callable[[], None]]:
        """File answers that have ended; return the listener calls that are due, for the caller to make."""
        calls: list[Callable[[], None]] = []
        for answer in answers:
            entry = self._live.get(answer.id)
            if entry is None:
                continue
            pieces = answer.pieces[entry.told :]
            entry.told += len(pieces)
            if entry.on_text is not None and (text := "".join(pieces)):
                calls.append(_call(entry.on_text, text))
            if answer.finished:
                self._ended[answer.id] = self._live.pop(answer.id)
                while len(self._ended) > KEPT:
                    del self._ended[next(iter(self._ended))]
        return calls

    def find(self, request_id: str) -> Answer:
        """The answer so far.

        Raises:
            InvalidParameter: there never was such a request, it was taken out, or it ended too long ago.
        """
        entry = self._live.get(request_id) or self._ended.get(request_id)
        if entry is None:
            message = f"{request_id!r} is unknown: never added, taken out, or not among the last {KEPT} that finished"
            raise InvalidParameter("request_id", message)
        return entry.answer

    def drop(self, request_id: str) -> None:
        """Forget an answer; if it still runs, its listener is not called any more."""
        self._live.pop(request_id, None)
        self._ended.pop(request_id, None)


def _call(on_text: Callable[[str], None], text: str) -> Callable[[], None]:
    return lambda: on_text(text)
