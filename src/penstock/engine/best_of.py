"""The best of an ask's choices, where more are generated than answered.

Decides which are best: those whose tokens have the highest mean log probability (OpenAI's `best_of`), of equals the
earlier. The tokens are those that are answered: what a stop string cut off does not count, and a choice without any is
the last. Knows neither scheduler nor HTTP. Invariant: the answered choices are numbered from 0, best first, and each
comes as one delta and its end.
"""

from __future__ import annotations

import math

from penstock.contract.events import AskFinished, ChoiceDelta, ChoiceFinished, Output, TokenPiece

__all__ = ["BestOf", "mean_logprob"]


class BestOf:
    """Holds back the choices of one ask until all are complete. Owned by the engine's step."""

    def __init__(self, answered: int) -> None:
        self._answered = answered
        self._deltas: dict[int, ChoiceDelta] = {}
        self._ends: dict[int, ChoiceFinished] = {}

    def take(self, output: Output) -> list[Output]:
        """What may be told now that `output` came: of choices nothing until the ask is finished."""
        match output:
            case ChoiceDelta(choice):
                before = self._deltas.get(choice)
                self._deltas[choice] = output if before is None else before.then(output)
                return []
            case ChoiceFinished(choice):
                self._ends[choice] = output
                return []
            case AskFinished():
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
    """Log probability per token; -inf of no tokens."""
    return math.fsum(token.logprob for token in tokens) / len(tokens) if tokens else -math.inf
