"""Compare an answer that was certified with the same answer computed again: equal, or the first place that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from penstock.certificates.certificate import CertifiedChoice
from penstock.certificates.trail import MARK_CHARS
from penstock.contract.answer_contract import AnswerContract

__all__ = ["Difference", "contract_differences", "first_difference"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers differ.

    Attributes:
        choice: index of the choice; -1 if they differ in the number of choices.
        position: index of the token in the choice, from 0; -1 for a difference in the choice as a whole.
        what: what differs there.
        certified: what the certificate says.
        computed: what was computed.
    """

    choice: int
    position: int
    what: str
    certified: str
    computed: str

    def explain(self) -> str:
        """The place and both values, in words."""
        place = "" if self.choice < 0 else f"choice {self.choice}, "
        place += "" if self.position < 0 else f"token {self.position}, "
        return f"{place}{self.what}: certified {self.certified}, computed {self.computed}"


def contract_differences(certified: AnswerContract, here: AnswerContract) -> list[tuple[str, str, str]]:
    """(field, certified value, value here), for each field in which two contracts differ."""
    values = [(each.name, str(getattr(certified, each.name)), str(getattr(here, each.name))) for each in fields(here)]
    return [(name, theirs, ours) for name, theirs, ours in values if theirs != ours]


def first_difference(
    certified: Sequence[CertifiedChoice], computed: Sequence[CertifiedChoice], *, tokens_only: bool = False
) -> Difference | None:
    """The first place where two answers differ; None if they are equal.

    Args:
        certified: the choices of the certificate.
        computed: the choices that were computed from its request.
        tokens_only: ignore log probabilities, because other arithmetic rounds them differently.
    """
    if len(certified) != len(computed):
        return Difference(-1, -1, "number of choices", str(len(certified)), str(len(computed)))
    for index, (theirs, ours) in enumerate(zip(certified, computed, strict=True)):
        found = _in_choice(index, theirs, ours, tokens_only=tokens_only)
        if found is not None:
            return found
    return None


def _in_choice(
    index: int, certified: CertifiedChoice, computed: CertifiedChoice, *, tokens_only: bool
) -> Difference | None:
    for position in range(min(len(certified.tokens), len(computed.tokens))):
        theirs, ours = certified.tokens[position], computed.tokens[position]
        if theirs != ours:
            return Difference(index, position, "token", str(theirs), str(ours))
        if not tokens_only and (found := _mark(certified, position)) != (mark := _mark(computed, position)):
            return Difference(index, position, "log probability (mark)", found, mark)
    if len(certified.tokens) != len(computed.tokens):
        return Difference(index, -1, "number of tokens", str(len(certified.tokens)), str(len(computed.tokens)))
    if certified.finish_reason is not computed.finish_reason:
        return Difference(index, -1, "finish reason", certified.finish_reason.value, computed.finish_reason.value)
    if certified.stop != computed.stop or type(certified.stop) is not type(computed.stop):
        return Difference(index, -1, "what stopped it", repr(certified.stop), repr(computed.stop))
    if not tokens_only and certified.logprobs != computed.logprobs:
        return Difference(index, -1, "hash of the log probabilities", certified.logprobs, computed.logprobs)
    return None


def _mark(choice: CertifiedChoice, position: int) -> str:
    return choice.marks[position * MARK_CHARS : (position + 1) * MARK_CHARS]
