"""Choosing the next token of every row that samples, all rows at once.

Decides how the stages of `penstock.sampling` are run and how a token is drawn: by one compiled call where the logits
lie in the CPU's memory and a row's stages are those that the call knows, else stage by stage in torch. Knows no
parameter's maths and no sequence: a row is its logits, a `Draw` and a position.

Invariants: the bits of a row's outcome depend on that row alone, and so does which way it goes; a row pays only for the
stages that it uses; the device is waited for once in a step (and once more where top_p is used). Only operations that
work row by row are used here. In particular no `sum` of floats over a row: torch adds up a single row in another order
than one of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.contract.sampling import SamplingSpec
from penstock.kernels import native
from penstock.kernels.native_sampler import choose
from penstock.sampling import STAGES, uniform

__all__ = ["Draw", "Sampled", "sample"]

_STAGES = {name: stage.apply for name, stage in STAGES}  # in the order in which they run

_COLUMNS = {
    "temperature": (torch.float32, 1.0),
    "top_k": (torch.int32, 0),
    "top_p": (torch.float64, 1.0),
    "min_p": (torch.float32, 0.0),
}
"""The stages that the compiled call knows: the dtype of their column, and the value that changes nothing."""

_COMPILED = frozenset(_COLUMNS)


@dataclass(frozen=True, slots=True)
class Draw:
    """How one sequence chooses its tokens: its sampling parameters, made ready once at admission.

    Attributes:
        greedy: always the likeliest token; then the stages and the seed are not read.
        stages: name and value of the stages that it uses.
        seed: with `choice` and the position, the key of its randomness.
        wants_logprob: whether the log probability of the chosen token is computed.
    """

    greedy: bool
    stages: tuple[tuple[str, float], ...]
    seed: int
    choice: int
    wants_logprob: bool

    @classmethod
    def of(cls, spec: SamplingSpec, choice: int) -> Draw:
        """Read a specification; one that is random must carry its seed."""
        greedy = spec.get("temperature", 1.0) == 0
        assert greedy or spec.has("seed"), "a random sequence reached the runner without a seed"
        stages = () if greedy else tuple((name, float(spec.get(name, 0))) for name in _STAGES if spec.has(name))
        return cls(greedy, stages, int(spec.get("seed", 0)), choice, spec.has("logprobs"))

    @property
    def compiles(self) -> bool:
        """Whether the compiled call knows all that this row needs."""
        return all(name in _COMPILED for name, _ in self.stages)


class Sampled(NamedTuple):
    """What came of the rows, in their order.

    Attributes:
        tokens: one id a row; of no meaning where the row failed.
        logprobs: log probability of the token under the raw distribution, 0.0 where it was not asked for.
        failed: whether the row had no distribution to choose from: NaN or infinite logits, or nothing but -inf.
    """

    tokens: list[int]
    logprobs: list[float]
    failed: list[bool]


def sample(
    logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], masks: Mapping[int, Tensor] | None = None
) -> Sampled:
    """Choose one token for each row.

    Args:
        logits: `[S, V]` float32; changed only in rows that have a mask: what a mask rules out becomes -inf.
        draws: how each row chooses.
        positions: index in its sequence of the token that each row chooses.
        masks: by row, `[V]` bool on the host: the tokens that the row may choose; rows without an entry are free.
    """
    for row, mask in (masks or {}).items():
        logits[row].masked_fill_(~mask[: logits.shape[-1]].to(logits.device), -torch.inf)
    if not native.available() or logits.device.type != "cpu":
        return _sample_in_torch(logits, draws, positions)
    compiled = [row for row, draw in enumerate(draws) if draw.compiles]
    if len(compiled) == len(draws):
        return _sample_compiled(logits, draws, positions)
    others = [row for row, draw in enumerate(draws) if not draw.compiles]
    outcomes: dict[int, tuple[int, float, bool]] = {}
    for rows, way in ((compiled, _sample_compiled), (others, _sample_in_torch)):
        sampled = way(logits[rows], [draws[row] for row in rows], [positions[row] for row in rows])
        outcomes |= zip(rows, zip(*sampled, strict=True), strict=True)
    tokens, logprobs, failed = zip(*(outcomes[row] for row in range(len(draws))), strict=True)
    return Sampled(list(tokens), list(logprobs), list(failed))


def _sample_compiled(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Sampled:
    """`sample`, for rows whose stages are `_COMPILED`."""
    values = [{"temperature": 0.0} if draw.greedy else dict(draw.stages) for draw in draws]
    columns = {
        name: torch.tensor([given.get(name, neutral) for given in values], dtype=dtype)
        for name, (dtype, neutral) in _COLUMNS.items()
    }
    drawn = [
        0.0 if draw.greedy else uniform(draw.seed, draw.choice, at) for draw, at in zip(draws, positions, strict=True)
    ]
    chosen = choose(
        logits,
        **columns,
        uniform=torch.tensor(drawn, dtype=torch.float64),
        wants_logprob=torch.tensor([draw.wants_logprob for draw in draws], dtype=torch.bool),
    )
    return Sampled(chosen.tokens.tolist(), chosen.logprobs.tolist(), chosen.failed.tolist())


def _sample_in_torch(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Sampled:
    """`sample`, for any rows on any device."""
    failed = ~logits.amax(-1).isfinite()  # [S]; NaN and +inf win the maximum, and -inf only if there is nothing else
    tokens = logits.argmax(-1)  # [S]; of equal logits the lowest id
    random = [row for row, draw in enumerate(draws) if not draw.greedy]
    if random:
        at = _index(random, logits)
        tokens[at] = _draw(logits[at], [draws[row] for row in random], [positions[row] for row in random])
    logprobs = _logprobs(logits, tokens, [row for row, draw in enumerate(draws) if draw.wants_logprob])
    # Token ids are exact in float64, so that one copy to the host brings everything.
    host = torch.stack((tokens.double(), logprobs.double(), failed.double())).tolist()
    return Sampled([int(token) for token in host[0]], host[1], [bool(flag) for flag in host[2]])


def _draw(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Tensor:
    """One token `[R]` for each of the random rows `[R, V]`, by the inverse of the distribution function.

    The tokens stand in the order of the vocabulary, and the chosen one is the first at which the summed probability
    exceeds the row's uniform number times the sum of all.
    """
    probabilities = _staged(logits, draws).softmax(-1)
    sums = probabilities.cumsum(-1, dtype=torch.float64)  # [R, V]
    drawn = [uniform(draw.seed, draw.choice, at) for draw, at in zip(draws, positions, strict=True)]
    targets = torch.tensor(drawn, dtype=torch.float64).to(logits.device)[:, None] * sums[:, -1:]  # [R, 1]
    chosen = torch.searchsorted(sums, targets, right=True).squeeze(-1)  # [R]
    return chosen.clamp(max=logits.shape[-1] - 1)  # out of range only in rows of NaN, which have failed


def _staged(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`[R, V]` after every stage, each applied at once to the rows that use it."""
    for name, apply in _STAGES.items():
        values = {row: value for row, draw in enumerate(draws) for used, value in draw.stages if used == name}
        if not values:
            continue
        column = torch.tensor(list(values.values()), dtype=torch.float64)[:, None]  # [R', 1] on the host
        if len(values) == len(draws):
            logits = apply(logits, column)
        else:
            at = _index(list(values), logits)
            logits = logits.index_copy(0, at, apply(logits[at], column))
    return logits


def _logprobs(logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> Tensor:
    """`[S]` log probabilities of `tokens` under the raw distribution in the rows `wanted`, 0.0 elsewhere."""
    logprobs = torch.zeros(len(tokens), device=logits.device)
    if wanted:
        at = _index(wanted, logits)
        logprobs[at] = logits[at].log_softmax(-1).gather(-1, tokens[at, None]).squeeze(-1)
    return logprobs


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
