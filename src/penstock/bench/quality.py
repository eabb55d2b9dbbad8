"""What a form of weights and KV cache costs: its predictions beside those of float32 of the same weights, on a text.

The text is cut into chunks, each computed alone; predictions in the second half of each, which have context, are
compared. Chunks, scored positions, BOS and standard errors are those of llama.cpp's `llama-perplexity`, so that its
figures stand beside ours.

Knows models only as scorers. Memory: the reference's hidden states, and logits of a few positions at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.app import load_model
from penstock.bench.arithmetic import percentile
from penstock.bench.forms import form_name, in_form
from penstock.contract.config import QUANTIZATIONS, EngineConfig
from penstock.contract.errors import ConfigError
from penstock.exec.device import (
    good_dtypes,
    resolve_device,
    resolve_dtype,
    resolve_linear_kernels,
    resolve_packing,
)
from penstock.exec.divergence import Divergence, divergence
from penstock.exec.kv_store import resolve_kv_dtype
from penstock.exec.scorer import Scorer
from penstock.kernels import native
from penstock.text import TextModel
from penstock.weights.files import ModelFiles

__all__ = [
    "CORPUS",
    "Chunks",
    "Quality",
    "Reference",
    "Scores",
    "Subject",
    "cut",
    "open_subject",
    "possible_forms",
    "quality_table",
    "score",
]

CORPUS = Path(__file__).with_name("corpus") / "northanger-abbey.txt"
_POSITIONS = 32
"""Scored at a time: their logits in float64 stay small beside the model."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A text in pieces of `context` tokens, each computed on its own."""

    context: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> int:
        """The first position of a chunk that is scored: those before it have too little to go by."""
        return self.context // 2

    @property
    def positions(self) -> int:
        """How many are scored in all; the last of a chunk is not, since what follows it is not in the chunk."""
        return len(self.tokens) * (self.context - 1 - self.first)


def cut(text: TextModel, written: str, context: int, most_tokens: int = 0) -> Chunks:
    """The chunks of a text; a rest that fills none is left out.

    Where the model's tokenizer begins texts with BOS, each chunk's first token is replaced by it.

    Args:
        text: the model's tokenizer.
        written: the text.
        context: tokens of a chunk, at least 4.
        most_tokens: use no more than the first so many; 0 takes all.

    Raises:
        ConfigError: there is not one whole chunk.
    """
    ids = text.tokenizer.encode(written)
    kept = ids[:most_tokens] if most_tokens else ids
    begin = tuple(id_ for id_ in text.tokenizer.encode("")[:1] if id_ == text.bos_token_id)
    starts = range(0, len(kept) - context + 1, context)
    chunks = tuple((*begin, *kept[start + len(begin) : start + context]) for start in starts)
    if not chunks:
        raise ConfigError("tokens", f"the text's {len(kept)} tokens do not fill one chunk of {context}")
    return Chunks(context, chunks)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose predictions are looked at.

    Attributes:
        name: of its form.
        dtype: of its activations.
        weight_bytes: what its weights take.
    """

    name: str
    dtype: str
    weight_bytes: int
    scorer: Scorer


def open_subject(config: EngineConfig, files: ModelFiles, context: int) -> Subject:
    """Load the model in the form that `config` says, ready for texts of `context` tokens.

    Raises:
        SetupError: the form cannot be had here, or the model has no such context.
    """
    loaded = load_model(config, files, _say_nothing)
    if context > loaded.shape.max_positions:
        raise ConfigError("context", f"{context} is above the model's context, {loaded.shape.max_positions}")
    kv = loaded.kv_store(-(-context // config.block_size), config.block_size)
    scorer = Scorer(
        loaded.model,
        lambda model: replace(loaded, model=model).runner(kv, max_num_seqs=1, max_model_len=context),
        config.block_size,
        config.max_num_batched_tokens,
    )
    return Subject(form_name(config), str(loaded.dtype).removeprefix("torch."), loaded.weight_bytes, scorer)


def possible_forms(config: EngineConfig, files: ModelFiles, wanted: Sequence[str]) -> tuple[EngineConfig, ...]:
    """`config` in each form that is wanted, by the names in `forms`.

    Without any, it is every form of the weights that this model and this machine allow, each with the KV cache of
    `config`.

    Raises:
        ConfigError: one that is wanted cannot be had.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, files.stored_dtype, device, good_dtypes(device, native.available()))
    possible = []
    for each in dict.fromkeys(in_form(config, name) for name in wanted or QUANTIZATIONS[1:]):  # all but auto
        resolve_kv_dtype(each.kv_cache_dtype, dtype, device)
        try:
            packing = resolve_packing(each.quantization, files.stored_dtype, dtype, device, native.isa())
            resolve_linear_kernels(each.linear_kernels, packing, files.num_weights)
        except ConfigError:
            if wanted:
                raise
        else:
            possible.append(each)
    return tuple(possible)


class Reference:
    """What float32 predicts at every scored position of a text. Owns its model."""

    def __init__(self, subject: Subject, chunks: Chunks, advance: Callable[[], object]) -> None:
        """Compute them; `advance` is called after each chunk."""
        self.chunks = chunks
        self._scorer = subject.scorer
        self._hidden: list[Any] = []
        for chunk in chunks.tokens:
            self._hidden.append(subject.scorer.hidden(chunk)[chunks.first : -1].clone())  # the rest is let go
            advance()

    def pieces(self, index: int) -> Iterator[tuple[slice, Any]]:
        """The logits of a chunk's scored positions, a few at a time, and which of the scored ones they are."""
        hidden = self._hidden[index]
        for start in range(0, len(hidden), _POSITIONS):
            piece = slice(start, min(start + _POSITIONS, len(hidden)))
            yield piece, self._scorer.logits(hidden[piece])


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each scored position, in order; see `exec.divergence.Divergence`."""

    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    reference_nll: list[float] = field(default_factory=list)

    def extend(self, more: Divergence) -> None:
        """Add positions."""
        self.kl.extend(more.kl)
        self.same_top.extend(more.same_top)
        self.nll.extend(more.nll)
        self.reference_nll.extend(more.reference_nll)


def score(reference: Reference, scorer: Scorer, advance: Callable[[], object]) -> Scores:
    """Compare a model with the reference; `advance` is called after each chunk."""
    chunks, scores = reference.chunks, Scores()
    for index, chunk in enumerate(chunks.tokens):
        hidden = scorer.hidden(chunk)[chunks.first : -1]
        following = chunk[chunks.first + 1 :]
        for piece, logits in reference.pieces(index):
            scores.extend(divergence(logits, scorer.logits(hidden[piece]), following[piece]))
        advance()
    return scores


@dataclass(frozen=True, slots=True)
class Quality:
    """The figures of one form of a model. Errors are standard errors, as if positions were independent.

    Attributes:
        name: who computed what.
        weight_bytes: of its weights: in memory for ours, of the file for others'.
        positions: how many were scored.
        kl_mean: mean divergence from float32, nats a token; its median, percentiles and largest follow.
        same_top: share of positions, 0 to 1, where float32's likeliest token stays the likeliest.
        perplexity: of the text.
        reference_perplexity: float32's.
        log_ratio: natural logarithm of the former over the latter.
    """

    name: str
    weight_bytes: int
    positions: int
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_p99: float
    kl_p999: float
    kl_max: float
    same_top: float
    same_top_error: float
    perplexity: float
    reference_perplexity: float
    log_ratio: float
    log_ratio_error: float

    @classmethod
    def of(cls, name: str, weight_bytes: int, scores: Scores) -> Quality:
        """Sum up at least two positions."""
        rises = [ours - theirs for ours, theirs in zip(scores.nll, scores.reference_nll, strict=True)]
        hits = [float(same) for same in scores.same_top]
        return cls(
            name=name,
            weight_bytes=weight_bytes,
            positions=len(scores.kl),
            kl_mean=statistics.fmean(scores.kl),
            kl_error=_standard_error(scores.kl),
            kl_median=statistics.median(scores.kl),
            kl_p99=percentile(scores.kl, 99),
            kl_p999=percentile(scores.kl, 99.9),
            kl_max=max(scores.kl),
            same_top=statistics.fmean(hits),
            same_top_error=_standard_error(hits),
            perplexity=math.exp(statistics.fmean(scores.nll)),
            reference_perplexity=math.exp(statistics.fmean(scores.reference_nll)),
            log_ratio=statistics.fmean(rises),
            log_ratio_error=_standard_error(rises),
        )

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return asdict(self)


def _standard_error(samples: Sequence[float]) -> float:
    """Of the mean of at least two independent samples."""
    return statistics.stdev(samples) / math.sqrt(len(samples))


def quality_table(rows: Sequence[Quality]) -> str:
    """The figures for people, the nearest to float32 first."""
    width = max(len(row.name) for row in rows)
    heads = f"{'':<{width}}  {'weights':>8}  {'KL divergence, nats/token':>25}  {'99 %':>8}  {'same top token':>17}"
    lines = [f"{heads}  {'perplexity':>10}  ln of its ratio to float32's"]
    for row in sorted(rows, key=lambda each: each.kl_mean):
        kl = f"{row.kl_mean:.6f} ± {row.kl_error:.6f}"
        same = f"{100 * row.same_top:.2f} ± {100 * row.same_top_error:.2f} %"
        lines.append(
            f"{row.name:<{width}}  {row.weight_bytes / 1e6:5.0f} MB  {kl:>25}  {row.kl_p99:8.5f}  {same:>17}"
            f"  {row.perplexity:10.4f}  {row.log_ratio:+.5f} ± {row.log_ratio_error:.5f}"
        )
    return "\n".join(lines)


def _say_nothing(line: str) -> None:
    """The start report is the engine's, not a measurement's."""
