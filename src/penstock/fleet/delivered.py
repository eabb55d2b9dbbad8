"""How much of an answer its reader has, so that of another engine's run only what is new is passed on.

Delivered output is counted as in `contract.places`, since two runs of one request are cut into pieces differently
although the pieces add up to the same answer. The tokens are compared to check this: an engine that answers differently
(another model, another kind of processor) must not continue a sentence that it did not begin.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract.events import (
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    FinishReason,
    Output,
    PromptTokens,
    RequestFailed,
    RequestFinished,
    Usage,
)
from penstock.contract.places import START, Place, split

__all__ = ["AnswerDiffers", "Delivered"]


class AnswerDiffers(Exception):
    """The answer that was generated again differs from the part that its reader already has."""


class Delivered:
    """What the reader of one request has. Owned by the code that passes outputs on.

    Attributes:
        began: whether the reader has anything.
        ended: whether the reader has everything.
    """

    def __init__(self, num_choices: int) -> None:
        self.began = False
        self.ended = False
        self._choices = [_Choice(index) for index in range(num_choices)]
        self._once: set[type] = set()  # kinds of outputs that come only once, and have come

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The token ids that the reader has, by choice."""
        return tuple(tuple(choice.tokens) for choice in self._choices)

    def begin_again(self) -> None:
        """Expect the outputs of another run, from its beginning."""
        for choice in self._choices:
            choice.begin_again()

    def take(self, outputs: Iterable[Output]) -> list[Output]:
        """Return the new part of the outputs of this run.

        Raises:
            AnswerDiffers: the outputs differ from what the reader has.
        """
        new = [passed for output in outputs if (passed := self._take(output)) is not None]
        self.began = self.began or bool(new)
        return new

    def aborted(self, prompt_tokens: int) -> list[Output]:
        """The end of the request, in the outputs that an engine gives when it is asked to abort."""
        ends: list[Output] = []
        for choice in self._choices:
            if not choice.finished:
                choice.finished = True
                ends.append(ChoiceFinished(choice.index, FinishReason.ABORT))
        self.began = self.ended = True
        return [*ends, RequestFinished(self.usage(prompt_tokens))]

    def usage(self, prompt_tokens: int) -> Usage:
        """The usage as far as it is known without an engine."""
        told = sum(len(choice.tokens) for choice in self._choices)
        return Usage(prompt_tokens, told, reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices))

    def _take(self, output: Output) -> Output | None:
        match output:
            case ChoiceDelta(index):  # nearly every output
                return self._choices[index].take(output)
            case ChoiceFinished(index):
                return self._choices[index].finish(output)
            case PromptTokens() | Embedding():
                if type(output) in self._once:
                    return None
                self._once.add(type(output))
            case RequestFinished() | RequestFailed():
                self.ended = True
        return output


class _Choice:
    """One choice of the answer: what its reader has, and how much of that a later run has repeated."""

    __slots__ = ("_again", "finished", "index", "place", "reasoning_tokens", "tokens")

    def __init__(self, index: int) -> None:
        self.index = index
        self.place = START
        self.tokens: list[int] = []
        self.reasoning_tokens = 0
        self.finished = False
        self._again: _Again | None = None  # until a later run has caught up

    def begin_again(self) -> None:
        """See `Delivered.begin_again`."""
        self._again = _Again(self.index, self.place, self.tokens) if self.place != START else None

    def take(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """The part of `delta` that is new."""
        if self._again is not None:
            rest = self._again.take(delta)
            if rest is None:
                return None
            delta = rest._replace(reasoning_tokens=rest.reasoning_tokens - self.reasoning_tokens)
            self._again = None
            if delta.empty and not delta.reasoning_tokens:
                return None
        if self.finished:
            return None
        self.place = self.place.past(delta)
        self.tokens += [token.id for token in delta.tokens]
        self.reasoning_tokens += delta.reasoning_tokens
        return delta

    def finish(self, finished: ChoiceFinished) -> ChoiceFinished | None:
        """The end of the choice; None if the reader has it."""
        if self._again is not None:
            raise AnswerDiffers
        if self.finished:
            return None
        self.finished = True
        return finished


class _Again:
    """The beginning of a choice in a later run, until it is as long as what the reader has.

    Args:
        place: how much the reader has.
        tokens: the token ids that the reader has.
    """

    __slots__ = ("_choice", "_come", "_held", "_passed", "_place", "_reasoning_tokens", "_tokens")

    def __init__(self, choice: int, place: Place, tokens: list[int]) -> None:
        self._choice = choice
        self._place = place
        self._tokens = tokens
        self._come = START
        self._passed = START  # where the dropped deltas end
        self._held: list[ChoiceDelta] = []  # deltas from there on
        self._reasoning_tokens = 0

    def take(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """Add a delta; once the reader's part is complete, return what follows it. Then do not call it again.

        The `reasoning_tokens` of the result are those of the whole choice so far.
        """
        before, self._come = self._come.tokens, self._come.past(delta)
        known = self._tokens[before : self._come.tokens]
        if [token.id for token in delta.tokens[: len(known)]] != known:
            raise AnswerDiffers
        self._reasoning_tokens += delta.reasoning_tokens
        if not self._held and self._place.reaches(self._come) and self._place != self._come:
            self._passed = self._come
            return None
        self._held.append(delta)
        if not self._come.reaches(self._place):
            return None
        _, rest = split(self._choice, self._held, self._place.behind(self._passed))
        return rest._replace(reasoning_tokens=self._reasoning_tokens)
