"""`best_of`: generate more choices than are returned, and return the best.

The best are the choices whose tokens have the highest mean log probability (OpenAI's definition); among equals, the
earlier. Tokens cut off by a stop string do not count. A choice without tokens comes last.

Invariant: the returned choices are numbered from 0, best first, and each comes as one delta and its end.
"""

from __future__ import annotations

import math

from penstock.contract.events import ChoiceDelta, ChoiceFinished, Output, RequestFinished, TokenPiece

__all__ = ["BestOfRanker", "mean_logprob"]


class BestOfRanker:
    """Holds back the choices of one request until all are complete, then ranks them. Owned by the engine's step."""

    def __init__(self, answered: int) -> None:
        self._answered = answered
        self._deltas: dict[int, ChoiceDelta] = {}
        self._ends: dict[int, ChoiceFinished] = {}

    def take(self, output: Output) -> list[Output]:
        """The outputs to pass on after `output`: none from the choices until the request is finished."""
        match output:
            case ChoiceDelta(choice):
                before = self._deltas.get(choice)
                self._deltas[choice] = output if before is None else before.then(output)
                return []
            case ChoiceFinished(choice):
                self._ends[choice] = output
                return []
            case RequestFinished():
                return [*self._best(), output]
        return [output]

    def _best(self) -> list[Output]:
        whole = {choice: self._deltas.get(choice, ChoiceDelta(choice, "", ())) for choice in self._ends}
        order = sorted(whole, key=lambda choice: (-mean_logprob(whole[choice].tokens), choice))
        outputs: list[Output] = []
        for place, choice in enumerate(order[: self._answered]):
            delta, end = whole[choice], self._ends[choice]
            outputs.append(ChoiceDelta(place, delta.text, delta.tokens, delta.reasoning, delta.calls))
            outputs.append(ChoiceFinished(place, end.reason, end.stop))
        return outputs


def mean_logprob(tokens: tuple[TokenPiece, ...]) -> float:
    """Mean log probability of a choice's tokens; -inf if there are none."""
    return math.fsum(token.logprob for token in tokens) / len(tokens) if tokens else -math.inf
