"""The text of an answer outside its calls, as a parser emits it.

Decides what happens to white space: next to a call it is dropped, so it is held back until text follows.
"""

from __future__ import annotations

__all__ = ["TextBesideCalls"]


class TextBesideCalls:
    """Collects final text until it is taken. Owned by one parser.

    Attributes:
        chars: number of characters emitted so far, which gives a call's position in the text.
    """

    def __init__(self) -> None:
        self.chars = 0
        self._space = ""  # white space, emitted only if no call follows
        self._after_call = False
        self._pieces: list[str] = []

    def say(self, text: str) -> None:
        """Emit text outside calls; hold back white space at its end, because a call may follow."""
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._space += text
            return
        if not self._after_call:
            self._let_out(self._space)
        self._let_out(body)
        self._space, self._after_call = text[len(body) :], False

    def call_begins(self) -> None:
        """Drop the white space that was held back: a call follows it."""
        self._space, self._after_call = "", True

    def end(self) -> None:
        """End the answer: emit white space that was held back, unless it follows a call."""
        if not self._after_call:
            self._let_out(self._space)
        self._space = ""

    def take(self) -> str:
        """Take the text emitted since the last `take`."""
        text, self._pieces = "".join(self._pieces), []
        return text

    def _let_out(self, text: str) -> None:
        self._pieces.append(text)
        self.chars += len(text)
