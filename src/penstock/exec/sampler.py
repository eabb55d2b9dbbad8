"""Chooses the next token of every row that samples, all rows at once.

Decides how the stages of `penstock.sampling` are run and how a token is drawn: in one compiled call if the logits are
in CPU memory and the call knows all stages of the row, otherwise stage by stage in torch. Does not know the maths of a
parameter, nor sequences: a row is its logits, a `RowSampling` and a position.

Invariants: a row's result and the path it takes depend on that row alone; the log probability of its token has the same
bits however many top tokens are requested; a row pays only for the stages that it uses; a step waits for the device
once (and once more for top_p). Only operations that work row by row are used. In particular there is no `sum` of floats
over a row: torch adds up a single row in another order than a row among several.
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
from penstock.kernels.backend import Choose
from penstock.kernels.native_sampler import SamplingMetadata
from penstock.sampling import STAGES, RowStage, RowViews, Stage, uniform
from penstock.sampling.parameters.logprobs_mode import PROCESSED, RAW
from penstock.sampling.row_sums import running_sums

__all__ = [
    "RowSampling",
    "Sampled",
    "ViewRows",
    "log_probabilities",
    "ranks_of",
    "sample",
    "score_again",
    "see_nothing",
    "top_tokens",
]

_STAGES = dict(STAGES)  # in the order in which they run

_SHIFTS = frozenset(list(_STAGES)[: list(_STAGES).index("temperature")])
"""The stages before temperature: they may change which token is the top one."""

_COLUMNS = {
    "temperature": (torch.float32, 1.0),
    "top_k": (torch.int32, 0),
    "top_p": (torch.float64, 1.0),
    "min_p": (torch.float32, 0.0),
}
"""The stages that the compiled call knows: for each, the dtype of its column, and its neutral value."""

_COMPILED = frozenset(_COLUMNS)

ViewRows = Callable[[Sequence[int]], RowViews]
"""Shows some of the rows; called only if a stage needs to see them."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """How one sequence chooses its tokens: its sampling parameters, prepared once at admission.

    Equal only to itself, so that metadata derived from a batch of rows can be reused for the same batch.

    Attributes:
        greedy: always the top token; then only stages before temperature are used, and no seed is read.
        stages: name and value of the used stages with a single number.
        row_stages: names of the other used stages.
        seed: together with `choice` and the position, the key of its random numbers.
        wants_logprob: whether the log probability of the chosen token is computed.
        top: how many top tokens are reported with their log probabilities.
        prompt_top: how many are reported for each token of the prompt; -1 if its scores are not requested.
        processed: whether log probabilities are computed after the stages.
        spec: the specification that this was read from.
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
    def of(cls, spec: SamplingSpec, choice: int) -> RowSampling:
        """Read a specification; a random one must carry its seed."""
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
    """The results of the rows in order: five columns, changed in place while rows choose and are scored.

    Attributes:
        tokens: one id a row; undefined if the row failed.
        logprobs: log probability of the token, 0.0 if not requested.
        failed: whether the row had no distribution: its logits held NaN or +inf, or were all -inf.
        top_logprobs: the top tokens with their log probabilities, as many as requested.
        ranks: the token's rank by likelihood, from 1; 0 if the log probability was not requested.
    """

    tokens: list[int]
    logprobs: list[float]
    failed: list[bool]
    top_logprobs: list[TopLogprobs]
    ranks: list[int]

    @classmethod
    def unscored(cls, tokens: list[int], logprobs: list[float], failed: list[bool]) -> Sampled:
        """Rows whose ranks and top tokens are not known yet."""
        return cls(tokens, logprobs, failed, [()] * len(tokens), [0] * len(tokens))

    def select(self, rows: Sequence[int]) -> Sampled:
        """A copy of some rows."""
        return Sampled(*([column[row] for row in rows] for column in self))

    def put(self, rows: Sequence[int], part: Sampled) -> None:
        """Set `rows` to the entries of `part`, in this order."""
        for column, given in zip(self, part, strict=True):
            for row, value in zip(rows, given, strict=True):
                column[row] = value


def see_nothing(rows: Sequence[int]) -> RowViews:
    """Row views for stages that look at logits alone."""
    raise AssertionError(f"rows {rows} use a stage that looks back, and there is nothing to look at")


def sample(
    logits: Tensor,
    samplings: Sequence[RowSampling],
    positions: Sequence[int],
    row_views: ViewRows = see_nothing,
    choose: Choose | None = None,
) -> Sampled:
    """Choose one token for each row.

    Args:
        logits: `[S, V]` float32; not changed.
        samplings: how each row chooses.
        positions: index in its sequence of the token that each row chooses.
        row_views: shows rows, by index, to stages that need more than logits.
        choose: the backend's compiled call; with None torch does every row.
    """
    if choose is None:
        return _sample_in_torch(logits, samplings, positions, row_views)
    samplings = tuple(samplings)
    compiled, others = _ways(samplings)
    if not others:
        return _sample_compiled(choose, logits, samplings, positions)
    if not compiled:
        return _sample_in_torch(logits, samplings, positions, row_views, choose)
    count = len(samplings)
    sampled = Sampled.unscored([0] * count, [0.0] * count, [False] * count)
    sampled.put(compiled, _sample_compiled(choose, logits[compiled], *_pick(compiled, samplings, positions)))
    part = _pick(others, samplings, positions)
    views = partial(_views_of, row_views, others)
    sampled.put(others, _sample_in_torch(logits[others], *part, views, choose))
    return sampled


def _views_of(row_views: ViewRows, others: Sequence[int], rows: Sequence[int]) -> RowViews:
    return row_views([others[row] for row in rows])


def _pick(
    rows: Sequence[int], samplings: Sequence[RowSampling], positions: Sequence[int]
) -> tuple[tuple[RowSampling, ...], list[int]]:
    return tuple(samplings[row] for row in rows), [positions[row] for row in rows]


def _sample_compiled(
    choose: Choose, logits: Tensor, samplings: tuple[RowSampling, ...], positions: Sequence[int]
) -> Sampled:
    """`sample`, for rows whose stages are `_COMPILED`."""
    metadata, drawn = _metadata(samplings), None
    if metadata.random:
        drawn = torch.tensor(_uniforms(samplings, positions), dtype=torch.float64)
    chosen = choose(logits, metadata, drawn)
    sampled = Sampled.unscored(chosen.tokens.tolist(), chosen.logprobs.tolist(), chosen.failed.tolist())

    def logprobs_of(rows: Sequence[int]) -> Tensor:
        at = _index(rows, logits)
        return _normalized(logits[at], chosen.normalizers[at])

    _score(sampled, logits, samplings, _scored(samplings), logprobs_of)
    return sampled


@lru_cache(maxsize=16)
def _scored(samplings: tuple[RowSampling, ...]) -> list[int]:
    """The rows that want the log probability of their token."""
    return [row for row, sampling in enumerate(samplings) if sampling.wants_logprob]


@lru_cache(maxsize=16)
def _ways(samplings: tuple[RowSampling, ...]) -> tuple[list[int], list[int]]:
    """The rows that the compiled call serves, and the others."""
    ways: tuple[list[int], list[int]] = [], []
    for row, sampling in enumerate(samplings):
        ways[not sampling.compiles].append(row)
    return ways


@lru_cache(maxsize=16)
def _metadata(samplings: tuple[RowSampling, ...]) -> SamplingMetadata:
    values = [{"temperature": 0.0} if sampling.greedy else dict(sampling.stages) for sampling in samplings]
    columns = {
        name: torch.tensor([given.get(name, neutral) for given in values], dtype=dtype)
        for name, (dtype, neutral) in _COLUMNS.items()
    }
    return SamplingMetadata(
        **columns, wants_logprob=torch.tensor([sampling.wants_logprob for sampling in samplings], dtype=torch.bool)
    )


def _sample_in_torch(
    logits: Tensor,
    samplings: Sequence[RowSampling],
    positions: Sequence[int],
    row_views: ViewRows,
    choose: Choose | None = None,
) -> Sampled:
    """`sample`, for any rows on any device: stages, choice, log probabilities."""
    failed = ~logits.amax(-1).isfinite()  # [S]; NaN and +inf win the maximum, and -inf only if there is nothing else
    staged = _staged(logits, samplings, row_views)
    if staged is not logits:
        failed |= staged.amax(-1) == float("-inf")  # the caller allowed only tokens that the model rules out
    tokens = staged.argmax(-1)  # [S]; among equal logits, the lowest id
    random = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if random:
        at = _index(random, logits)
        tokens[at] = _draw(staged[at], _uniforms(*_pick(random, samplings, positions)))
    scored = _scored(tuple(samplings))
    raw = [row for row in scored if not samplings[row].processed]
    processed = [row for row in scored if samplings[row].processed]
    logprobs = _logprobs(logits, tokens, raw, choose) + _logprobs(staged, tokens, processed, choose)
    # Token ids are exact in float64, so one copy to the host brings everything.
    host = torch.stack((tokens.double(), logprobs.double(), failed.double())).tolist()
    sampled = Sampled.unscored([int(token) for token in host[0]], host[1], [bool(flag) for flag in host[2]])
    for of, rows in (logits, raw), (staged, processed):
        _score(sampled, of, samplings, rows, partial(_rows_logprobs, of, choose))
    return sampled


def _uniforms(samplings: Sequence[RowSampling], positions: Sequence[int]) -> list[float]:
    """The uniform number of each row's draw; 0 for a greedy one."""
    where = zip(samplings, positions, strict=True)
    return [0.0 if sampling.greedy else uniform(sampling.seed, sampling.choice, at) for sampling, at in where]


def _draw(staged: Tensor, uniforms: Sequence[float]) -> Tensor:
    """One token `[R]` for each of the random rows `[R, V]`, by inverting the cumulative distribution.

    Tokens are in vocabulary order; the first one at which the cumulative probability exceeds the row's uniform number
    times the total is chosen.
    """
    sums = running_sums(staged.softmax(-1).double())  # [R, V]
    targets = torch.tensor(uniforms, dtype=torch.float64).to(staged.device)[:, None] * sums[:, -1:]  # [R, 1]
    chosen = torch.searchsorted(sums, targets, right=True).squeeze(-1)  # [R]
    return chosen.clamp(max=staged.shape[-1] - 1)  # out of range only in rows of NaN, which have failed


def _staged(logits: Tensor, samplings: Sequence[RowSampling], row_views: ViewRows) -> Tensor:
    """`[R, V]` after every stage, each applied at once to the rows that use it."""
    for name, stage in _STAGES.items():
        if isinstance(stage, Stage):
            values = {
                row: value for row, sampling in enumerate(samplings) for used, value in sampling.stages if used == name
            }
            rows, argument = list(values), [[value] for value in values.values()]
            apply = partial(_by_number, stage, argument)
        else:
            rows = [row for row, sampling in enumerate(samplings) if name in sampling.row_stages]
            apply = partial(_by_row, stage, rows, row_views)
        if not rows:
            continue
        if len(rows) == len(samplings):
            logits = apply(logits)
        else:
            at = _index(rows, logits)
            logits = logits.index_copy(0, at, apply(logits[at]))
    return logits


def _by_number(stage: Stage, values: list[list[float]], logits: Tensor) -> Tensor:
    return stage.apply(logits, torch.tensor(values, dtype=torch.float64))  # [R, 1] on the host


def _by_row(stage: RowStage, rows: Sequence[int], row_views: ViewRows, logits: Tensor) -> Tensor:
    return stage.apply(logits, row_views(rows))


def _rows_logprobs(logits: Tensor, choose: Choose | None, rows: Sequence[int]) -> Tensor:
    return log_probabilities(logits[_index(rows, logits)], choose)


def _logprobs(logits: Tensor, tokens: Tensor, wanted: Sequence[int], choose: Choose | None) -> Tensor:
    """`[S]` log probabilities of `tokens` in the rows `wanted`, 0.0 elsewhere."""
    logprobs = torch.zeros(len(tokens), device=logits.device)
    if wanted:
        at = _index(wanted, logits)
        logprobs[at] = log_probabilities(logits[at], choose).gather(-1, tokens[at, None]).squeeze(-1)
    return logprobs


def _score(
    sampled: Sampled,
    logits: Tensor,
    samplings: Sequence[RowSampling],
    rows: Sequence[int],
    logprobs_of: Callable[[Sequence[int]], Tensor],
) -> None:
    """Note the ranks of `rows` under `logits` `[S, V]`, and the top tokens of rows that want some.

    `logprobs_of` gives the log probabilities `[R, V]` of some rows, computed like those of their chosen tokens: so a
    chosen token's has the same bits however many top tokens are requested, also when it is one of them.
    """
    if not rows:
        return
    ranks = ranks_of(logits[_index(rows, logits)], torch.tensor([sampled.tokens[row] for row in rows]))
    for row, rank in zip(rows, ranks, strict=True):
        sampled.ranks[row] = rank
    several = [row for row in rows if samplings[row].top]
    if several:
        counts = [samplings[row].top for row in several]
        found = top_tokens(logits[_index(several, logits)], logprobs_of(several), counts)
        for row, top in zip(several, found, strict=True):
            sampled.top_logprobs[row] = top


def _normalized(logits: Tensor, normalizers: Tensor) -> Tensor:
    """Log probabilities `[R, V]` float32, computed as the compiled call computes the chosen token's."""
    return (logits.double() - normalizers[:, None]).float()


def score_again(
    sampled: Sampled,
    logits: Tensor,
    samplings: Sequence[RowSampling],
    rows: Sequence[int],
    choose: Choose | None = None,
) -> None:
    """Report the tokens of `rows` with log probabilities and ranks under other `logits`, `[len(rows), V]`; in place."""
    part, everyone = sampled.select(rows), range(len(rows))
    own = [samplings[row] for row in rows]
    logprobs = log_probabilities(logits, choose)  # [R, V]
    chosen = torch.tensor(part.tokens, device=logits.device)
    part.logprobs[:] = logprobs.gather(-1, chosen[:, None]).squeeze(-1).tolist()
    _score(part, logits, own, everyone, lambda several: logprobs[_index(several, logits)])
    sampled.put(rows, part)


def log_probabilities(logits: Tensor, choose: Choose | None = None) -> Tensor:
    """`[R, V]` float32, from sums in float64: float32 sums over a large vocabulary are off by up to 1e-5.

    Args:
        logits: `[R, V]` float32.
        choose: the backend's compiled call, which adds up in another order than torch: with it, the results have the
            same bits as what it reports for tokens that it chooses.
    """
    if choose is None:
        return logits.double().log_softmax(-1).float()
    return _normalized(logits, choose(logits, _normalizing(len(logits)), None).normalizers)


@lru_cache(maxsize=16)
def _normalizing(rows: int) -> SamplingMetadata:
    """Metadata for rows of which only the normalizers are wanted."""
    columns = {name: torch.full((rows,), neutral, dtype=dtype) for name, (dtype, neutral) in _COLUMNS.items()}
    columns["temperature"].zero_()
    return SamplingMetadata(**columns, wants_logprob=torch.ones(rows, dtype=torch.bool))


def ranks_of(logits: Tensor, tokens: Tensor) -> list[int]:
    """The rank of each of `tokens` `[R]` in its row of `[R, V]` by likelihood, from 1.

    Among equals the lower id comes first. Counts instead of sorting; a sum of integers is the same in any order.
    """
    tokens = tokens.to(logits.device)[:, None]  # [R, 1]
    own = logits.gather(-1, tokens)
    equal_before = (logits == own) & (torch.arange(logits.shape[-1], device=logits.device) < tokens)
    ranks: list[int] = (1 + ((logits > own) | equal_before).sum(-1)).tolist()
    return ranks


def top_tokens(logits: Tensor, logprobs: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """The `counts[r]` top tokens of each row of `[R, V]`, equals by ascending id; leaves out tokens ruled out."""
    width = min(max(counts) + 1, logits.shape[-1])  # one more: it shows whether the last one was chosen among equals
    values, ids = logits.topk(width, dim=-1)
    found = logprobs.gather(-1, ids).tolist()
    top_logprobs: list[TopLogprobs] = []
    for row, (count, of, at, theirs) in enumerate(zip(counts, values.tolist(), ids.tolist(), found, strict=True)):
        if 0 < count < width and of[count] == of[count - 1] > -torch.inf:
            order = logits[row].argsort(descending=True, stable=True)[:count]
            pairs = list(zip(order.tolist(), logprobs[row, order].tolist(), strict=True))
        else:
            ordered = sorted(zip(of, at, theirs, strict=True), key=_by_likelihood)[:count]
            pairs = [(token, logprob) for _, token, logprob in ordered]
        top_logprobs.append(tuple(pair for pair in pairs if pair[1] > -torch.inf))
    return top_logprobs


def _by_likelihood(entry: tuple[float, int, float]) -> tuple[float, int]:
    return -entry[0], entry[1]


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
