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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.contract.plan import TopLogprobs
from penstock.contract.sampling import SamplingSpec
from penstock.kernels import native
from penstock.kernels.native_sampler import Terms, choose
from penstock.sampling import STAGES, RowStage, RowViews, Stage, uniform
from penstock.sampling.parameters.logprobs_mode import PROCESSED, RAW

__all__ = ["NOTHING", "Draw", "Look", "Sampled", "likeliest", "log_probabilities", "ranks_of", "sample", "score_again"]

_STAGES = dict(STAGES)  # in the order in which they run

_SHIFTS = frozenset(list(_STAGES)[: list(_STAGES).index("temperature")])
"""The stages before temperature: they may change which token is the likeliest."""

_COLUMNS = {
    "temperature": (torch.float32, 1.0),
    "top_k": (torch.int32, 0),
    "top_p": (torch.float64, 1.0),
    "min_p": (torch.float32, 0.0),
}
"""The stages that the compiled call knows: the dtype of their column, and the value that changes nothing."""

_COMPILED = frozenset(_COLUMNS)


Look = Callable[[Sequence[int]], RowViews]
"""What some of the rows are; asked for only where a stage must know."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """How one sequence chooses its tokens: its sampling parameters, made ready once at admission.

    Equal only to itself: what is worked out for a batch of rows is found again while it is the same batch.

    Attributes:
        greedy: always the likeliest token; then only stages before temperature are used, and no seed is read.
        stages: name and value of the stages that it uses and that are led by one number.
        row_stages: names of the others that it uses.
        seed: with `choice` and the position, the key of its randomness.
        wants_logprob: whether the log probability of the chosen token is computed.
        top: how many of the likeliest tokens are reported with theirs.
        prompt_top: how many are reported for each token of the prompt; -1 where its scores are not asked for.
        processed: whether log probabilities are those after the stages.
        spec: where all of this was read from.
    """

    greedy: bool
    stages: tuple[tuple[str, float], ...]
    row_stages: tuple[str, ...]
    seed: int
    choice: int
    wants_logprob: bool
    top: int
    processed: bool
    prompt_top: int
    spec: SamplingSpec

    @classmethod
    def of(cls, spec: SamplingSpec, choice: int) -> Draw:
        """Read a specification; one that is random must carry its seed."""
        greedy = spec.get("temperature", 1.0) == 0
        assert greedy or spec.has("seed"), "a random sequence reached the runner without a seed"
        used = {name: stage for name, stage in _STAGES.items() if spec.has(name) and (name in _SHIFTS or not greedy)}
        return cls(
            greedy=greedy,
            stages=tuple((name, float(spec.get(name, 0))) for name in used if isinstance(used[name], Stage)),
            row_stages=tuple(name for name in used if isinstance(used[name], RowStage)),
            seed=int(spec.get("seed", 0)),
            choice=choice,
            wants_logprob=spec.has("logprobs"),
            top=spec.get("logprobs", 0),
            processed=spec.get("logprobs_mode", RAW) == PROCESSED,
            prompt_top=spec.get("prompt_logprobs", -1),
            spec=spec,
        )

    @property
    def compiles(self) -> bool:
        """Whether the compiled call knows all that this row needs."""
        known = not self.row_stages and all(name in _COMPILED for name, _ in self.stages)
        return known and not (self.wants_logprob and self.processed)


class Sampled(NamedTuple):
    """What came of the rows, in their order.

    Attributes:
        tokens: one id a row; of no meaning where the row failed.
        logprobs: log probability of the token, 0.0 where it was not asked for.
        failed: whether the row had no distribution to choose from: NaN or infinite logits, or nothing but -inf.
        tops: the likeliest tokens with theirs, as many as were asked for.
        ranks: the token's place among all by likelihood, from 1; 0 where the log probability was not asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    failed: list[bool]
    tops: list[TopLogprobs]
    ranks: list[int]


NOTHING = Sampled([], [], [], [], [])


def _see_nothing(rows: Sequence[int]) -> RowViews:
    raise AssertionError(f"rows {rows} use a stage that looks back, and there is nothing to look at")


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    look: Look = _see_nothing,
) -> Sampled:
    """Choose one token for each row.

    Args:
        logits: `[S, V]` float32; not changed.
        draws: how each row chooses.
        positions: index in its sequence of the token that each row chooses.
        look: shows rows, by their index, to the stages that must know more of them.
    """
    if not native.available() or logits.device.type != "cpu":
        return _sample_in_torch(logits, draws, positions, look)
    compiled = _rows_that_compile(tuple(draws))
    if len(compiled) == len(draws):
        return _sample_compiled(logits, draws, positions)
    others = [row for row, draw in enumerate(draws) if not draw.compiles]
    outcomes: dict[int, tuple[int, float, bool, TopLogprobs, int]] = {}
    if compiled:
        part = _sample_compiled(logits[list(compiled)], *_pick(compiled, draws, positions))
        outcomes |= zip(compiled, zip(*part, strict=True), strict=True)
    part = _sample_in_torch(
        logits[others], *_pick(others, draws, positions), lambda rows: look([others[row] for row in rows])
    )
    outcomes |= zip(others, zip(*part, strict=True), strict=True)
    tokens, logprobs, failed, tops, ranks = zip(*(outcomes[row] for row in range(len(draws))), strict=True)
    return Sampled(list(tokens), list(logprobs), list(failed), list(tops), list(ranks))


def _pick(rows: Sequence[int], draws: Sequence[Draw], positions: Sequence[int]) -> tuple[list[Draw], list[int]]:
    return [draws[row] for row in rows], [positions[row] for row in rows]


def _sample_compiled(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Sampled:
    """`sample`, for rows whose stages are `_COMPILED`."""
    terms, drawn = _terms(tuple(draws)), None
    if terms.random:
        where = zip(draws, positions, strict=True)
        numbers = [0.0 if draw.greedy else uniform(draw.seed, draw.choice, at) for draw, at in where]
        drawn = torch.tensor(numbers, dtype=torch.float64)
    chosen = choose(logits, terms, drawn)
    sampled = _without_places(chosen.tokens.tolist(), chosen.logprobs.tolist(), chosen.failed.tolist())
    return _with_places(sampled, logits, draws, [row for row, draw in enumerate(draws) if draw.wants_logprob])


@lru_cache(maxsize=16)
def _rows_that_compile(draws: tuple[Draw, ...]) -> tuple[int, ...]:
    return tuple(row for row, draw in enumerate(draws) if draw.compiles)


@lru_cache(maxsize=16)
def _terms(draws: tuple[Draw, ...]) -> Terms:
    values = [{"temperature": 0.0} if draw.greedy else dict(draw.stages) for draw in draws]
    columns = {
        name: torch.tensor([given.get(name, neutral) for given in values], dtype=dtype)
        for name, (dtype, neutral) in _COLUMNS.items()
    }
    return Terms(**columns, wants_logprob=torch.tensor([draw.wants_logprob for draw in draws], dtype=torch.bool))


def _sample_in_torch(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], look: Look) -> Sampled:
    """`sample`, for any rows on any device."""
    failed = ~logits.amax(-1).isfinite()  # [S]; NaN and +inf win the maximum, and -inf only if there is nothing else
    staged = _staged(logits, draws, look)
    if staged is not logits:
        failed |= staged.amax(-1) == float("-inf")  # the caller allowed only tokens that the model rules out
    tokens = staged.argmax(-1)  # [S]; of equal logits the lowest id
    random = [row for row, draw in enumerate(draws) if not draw.greedy]
    if random:
        at = _index(random, logits)
        tokens[at] = _draw(staged[at], *_pick(random, draws, positions))
    raw = [row for row, draw in enumerate(draws) if draw.wants_logprob and not draw.processed]
    processed = [row for row, draw in enumerate(draws) if draw.wants_logprob and draw.processed]
    logprobs = _logprobs(logits, tokens, raw) + _logprobs(staged, tokens, processed)
    # Token ids are exact in float64, so that one copy to the host brings everything.
    host = torch.stack((tokens.double(), logprobs.double(), failed.double())).tolist()
    sampled = _without_places([int(token) for token in host[0]], host[1], [bool(flag) for flag in host[2]])
    return _with_places(_with_places(sampled, logits, draws, raw), staged, draws, processed)


def score_again(sampled: Sampled, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    """Report the tokens of `rows` with log probabilities and ranks under other `logits`, `[len(rows), V]`; in place."""
    part = Sampled(*([column[row] for row in rows] for column in sampled))
    part = _with_tops(part, logits, [draws[row] for row in rows], range(len(rows)))
    ranks = ranks_of(logits, torch.tensor(part.tokens))
    for at, row in enumerate(rows):
        sampled.logprobs[row], sampled.tops[row], sampled.ranks[row] = part.logprobs[at], part.tops[at], ranks[at]


def _draw(staged: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Tensor:
    """One token `[R]` for each of the random rows `[R, V]`, by the inverse of the distribution function.

    The tokens stand in the order of the vocabulary, and the chosen one is the first at which the summed probability
    exceeds the row's uniform number times the sum of all.
    """
    sums = staged.softmax(-1).cumsum(-1, dtype=torch.float64)  # [R, V]
    drawn = [uniform(draw.seed, draw.choice, at) for draw, at in zip(draws, positions, strict=True)]
    targets = torch.tensor(drawn, dtype=torch.float64).to(staged.device)[:, None] * sums[:, -1:]  # [R, 1]
    chosen = torch.searchsorted(sums, targets, right=True).squeeze(-1)  # [R]
    return chosen.clamp(max=staged.shape[-1] - 1)  # out of range only in rows of NaN, which have failed


def _staged(logits: Tensor, draws: Sequence[Draw], look: Look) -> Tensor:
    """`[R, V]` after every stage, each applied at once to the rows that use it."""
    for name, stage in _STAGES.items():
        if isinstance(stage, Stage):
            values = {row: value for row, draw in enumerate(draws) for used, value in draw.stages if used == name}
            rows, argument = list(values), [[value] for value in values.values()]
            apply = partial(_by_number, stage, argument)
        else:
            rows = [row for row, draw in enumerate(draws) if name in draw.row_stages]
            apply = partial(_by_row, stage, rows, look)
        if not rows:
            continue
        if len(rows) == len(draws):
            logits = apply(logits)
        else:
            at = _index(rows, logits)
            logits = logits.index_copy(0, at, apply(logits[at]))
    return logits


def _by_number(stage: Stage, values: list[list[float]], logits: Tensor) -> Tensor:
    return stage.apply(logits, torch.tensor(values, dtype=torch.float64))  # [R, 1] on the host


def _by_row(stage: RowStage, rows: Sequence[int], look: Look, logits: Tensor) -> Tensor:
    return stage.apply(logits, look(rows))


def _logprobs(logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> Tensor:
    """`[S]` log probabilities of `tokens` in the rows `wanted`, 0.0 elsewhere."""
    logprobs = torch.zeros(len(tokens), device=logits.device)
    if wanted:
        at = _index(wanted, logits)
        logprobs[at] = log_probabilities(logits[at]).gather(-1, tokens[at, None]).squeeze(-1)
    return logprobs


def _without_places(tokens: list[int], logprobs: list[float], failed: list[bool]) -> Sampled:
    return Sampled(tokens, logprobs, failed, [()] * len(tokens), [0] * len(tokens))


def _with_places(sampled: Sampled, logits: Tensor, draws: Sequence[Draw], wanted: Sequence[int]) -> Sampled:
    """`sampled` with the ranks of the rows `wanted`, and with the likeliest tokens of those that want some."""
    if not wanted:
        return sampled
    ranks = ranks_of(logits[_index(wanted, logits)], torch.tensor([sampled.tokens[row] for row in wanted]))
    for row, rank in zip(wanted, ranks, strict=True):
        sampled.ranks[row] = rank
    return _with_tops(sampled, logits, draws, [row for row in wanted if draws[row].top])


def _with_tops(sampled: Sampled, logits: Tensor, draws: Sequence[Draw], wanted: Sequence[int]) -> Sampled:
    """`sampled` with the likeliest tokens of the rows `wanted`; what both ways say of a token is then the same."""
    if not wanted:
        return sampled
    of = logits[_index(wanted, logits)]  # [R, V]
    logprobs = log_probabilities(of)
    chosen = torch.tensor([sampled.tokens[row] for row in wanted], device=logits.device)
    own = logprobs.gather(-1, chosen[:, None]).squeeze(-1).tolist()
    tops = likeliest(of, logprobs, [draws[row].top for row in wanted])
    for row, logprob, top in zip(wanted, own, tops, strict=True):
        sampled.logprobs[row], sampled.tops[row] = logprob, top
    return sampled


def log_probabilities(logits: Tensor) -> Tensor:
    """`[R, V]` float32, from sums in float64: in float32 those over a large vocabulary are off by up to 1e-5."""
    return logits.double().log_softmax(-1).float()


def ranks_of(logits: Tensor, tokens: Tensor) -> list[int]:
    """The place of each of `tokens` `[R]` in its row of `[R, V]` by likelihood, from 1.

    Of equals the lower id comes first. Counts, so that no row is sorted; a sum of integers is the same in any order.
    """
    tokens = tokens.to(logits.device)[:, None]  # [R, 1]
    own = logits.gather(-1, tokens)
    equal_before = (logits == own) & (torch.arange(logits.shape[-1], device=logits.device) < tokens)
    ranks: list[int] = (1 + ((logits > own) | equal_before).sum(-1)).tolist()
    return ranks


def likeliest(logits: Tensor, logprobs: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """The `counts[r]` likeliest tokens of each row of `[R, V]`, equals by ascending id; none that is ruled out."""
    width = min(max(counts) + 1, logits.shape[-1])  # one more: it shows whether the last one was chosen among equals
    values, ids = logits.topk(width, dim=-1)
    found = logprobs.gather(-1, ids).tolist()
    tops: list[TopLogprobs] = []
    for row, (count, of, at, theirs) in enumerate(zip(counts, values.tolist(), ids.tolist(), found, strict=True)):
        if 0 < count < width and of[count] == of[count - 1] > -torch.inf:
            order = logits[row].argsort(descending=True, stable=True)[:count]
            pairs = list(zip(order.tolist(), logprobs[row, order].tolist(), strict=True))
        else:
            ordered = sorted(zip(of, at, theirs, strict=True), key=_likelier)[:count]
            pairs = [(token, logprob) for _, token, logprob in ordered]
        tops.append(tuple(pair for pair in pairs if pair[1] > -torch.inf))
    return tops


def _likelier(entry: tuple[float, int, float]) -> tuple[float, int]:
    return -entry[0], entry[1]


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
