"""The text of an answer that is no part of a call, as a parser lets it out.

Decides what becomes of blank space beside calls: it is let out only once text follows that no call stands in front of.
"""

from __future__ import annotations

__all__ = ["TextBesideCalls"]


class TextBesideCalls:
    """Gathers final text until it is taken. Owned by one parser.

    Attributes:
        chars: how many were let out so far, which says where in the text a call stands.
    """

    def __init__(self) -> None:
        self.chars = 0
        self._space = ""  # blank, and text only if no call follows
        self._after_call = False
        self._pieces: list[str] = []

    def say(self, text: str) -> None:
        """Let out text that is no call, but for the space at its end, which a call may follow."""
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
        """The space that was held back stood in front of a call."""
        self._space, self._after_call = "", True

    def end(self) -> None:
        """No call follows any more."""
        if not self._after_call:
            self._let_out(self._space)
        self._space = ""

    def take(self) -> str:
        """What is new."""
        text, self._pieces = "".join(self._pieces), []
        return text

    def _let_out(self, text: str) -> None:
        self._pieces.append(text)
        self.chars += len(text)
