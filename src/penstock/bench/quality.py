"""Measures what a variant of weights and KV cache costs in quality, against float32 with the same weights, on a text.

The text is cut into chunks, each computed alone; only predictions in the second half of a chunk are compared, because
they have context. Chunks, scored positions, BOS and standard errors follow llama.cpp's `llama-perplexity`, so that its
figures are comparable to ours.

Requires of a model only that it scores. Memory: the reference's hidden states, and logits of a few positions at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from penstock.bench.arithmetic import percentile
from penstock.bench.variants import variant_name, with_variant
from penstock.contract.config import QUANTIZATIONS, EngineConfig
from penstock.contract.errors import ConfigError
from penstock.exec.device import (
    good_dtypes,
    open_backend,
    resolve_device,
    resolve_dtype,
    resolve_weight_format,
)
from penstock.exec.divergence import Divergence, divergence
from penstock.exec.kv_store import resolve_kv_dtype
from penstock.exec.scorer import Scorer
from penstock.loading import load_model
from penstock.text import TextModel
from penstock.weights.files import ModelFiles

__all__ = [
    "CORPUS",
    "Chunks",
    "Quality",
    "Reference",
    "ScoredModel",
    "Scores",
    "Steps",
    "cut",
    "load_scored",
    "measure",
    "possible_variants",
    "quality_table",
    "score",
]

CORPUS = Path(__file__).with_name("corpus") / "northanger-abbey.txt"
_POSITIONS = 32
"""Positions scored at a time: their logits in float64 stay small compared with the model."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A text in pieces of `context` tokens, each computed on its own."""

    context: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> int:
        """The first position of a chunk that is scored: earlier positions have too little context."""
        return self.context // 2

    @property
    def positions(self) -> int:
        """Number of scored positions; a chunk's last one is not scored, because its next token is not in the chunk."""
        return len(self.tokens) * (self.context - 1 - self.first)


def cut(text: TextModel, written: str, context: int, most_tokens: int = 0) -> Chunks:
    """Cut a text into chunks; a remainder that fills none is left out.

    If the model's tokenizer begins texts with BOS, BOS replaces each chunk's first token.

    Args:
        text: the model's tokenizer.
        written: the text.
        context: tokens per chunk, at least 4.
        most_tokens: use at most this many tokens of the text; 0 uses all.

    Raises:
        ConfigError: the text does not fill one chunk.
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
class ScoredModel:
    """A model whose predictions are scored.

    Attributes:
        name: the variant's name.
        dtype: dtype of the activations.
        weight_bytes: size of the weights.
    """

    name: str
    dtype: str
    weight_bytes: int
    scorer: Scorer


def load_scored(config: EngineConfig, files: ModelFiles, context: int) -> ScoredModel:
    """Load the model as `config` says, ready for texts of `context` tokens.

    Raises:
        SetupError: the machine does not allow the variant, the model's context is shorter, or the model only embeds.
    """
    loaded = load_model(config, files, _say_nothing)
    if loaded.program.looks_ahead:
        raise ConfigError("model", "only embeds: it predicts no next token, whose probability could be measured")
    if context > loaded.shape.max_positions:
        raise ConfigError("context", f"{context} is above the model's context, {loaded.shape.max_positions}")
    kv = loaded.kv_store(-(-context // config.block_size), config.block_size)
    scorer = Scorer(
        loaded.model,
        lambda model: replace(loaded, model=model).runner(kv, max_num_seqs=1, max_model_len=context),
        config.block_size,
        config.max_num_batched_tokens,
    )
    return ScoredModel(variant_name(config), str(loaded.dtype).removeprefix("torch."), loaded.weight_bytes, scorer)


def possible_variants(config: EngineConfig, files: ModelFiles, wanted: Sequence[str]) -> tuple[EngineConfig, ...]:
    """`config` in each variant of `wanted`, names of `variants.VARIANTS`.

    If `wanted` is empty: every weight format that this model and this machine allow, with the KV cache of `config`.

    Raises:
        ConfigError: the model or the machine does not allow a wanted one.
    """
    device = resolve_device(config.device)
    backend = open_backend(device, threads=1)
    dtype = resolve_dtype(config.dtype, files.stored_dtype, device, good_dtypes(device, backend.exact))
    possible = []
    for each in dict.fromkeys(with_variant(config, name) for name in wanted or QUANTIZATIONS[1:]):  # all but auto
        resolve_kv_dtype(each.kv_cache_dtype, dtype, backend)
        try:
            resolve_weight_format(each.quantization, files.stored_dtype, dtype, device, backend.isa)
        except ConfigError:
            if wanted:
                raise
        else:
            possible.append(each)
    return tuple(possible)


class Reference:
    """float32's predictions at every scored position of a text. Owns its model."""

    def __init__(self, model: ScoredModel, chunks: Chunks, advance: Callable[[], object]) -> None:
        """Compute the predictions; `advance` is called after each chunk."""
        self.chunks = chunks
        self._scorer = model.scorer
        self._hidden: list[Any] = []
        for chunk in chunks.tokens:
            self._hidden.append(model.scorer.hidden(chunk)[chunks.first : -1].clone())  # the other positions are freed
            advance()

    def pieces(self, index: int) -> Iterator[tuple[slice, Any]]:
        """(slice of the chunk's scored positions, their logits), a few positions at a time."""
        hidden = self._hidden[index]
        for start in range(0, len(hidden), _POSITIONS):
            piece = slice(start, min(start + _POSITIONS, len(hidden)))
            yield piece, self._scorer.logits(hidden[piece])


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of each scored position, in order; see `exec.divergence.Divergence`."""

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


class Steps(Protocol):
    """Shows the progress of a measurement."""

    def __call__(self, chunks: int = 1) -> None:
        """Note that `chunks` more chunks are done."""

    def name(self, what: str) -> None:
        """Say what is measured next."""


def measure(
    config: EngineConfig, files: ModelFiles, variants: Sequence[EngineConfig], chunks: Chunks, steps: Steps
) -> tuple[Reference, list[Quality]]:
    """float32's predictions and the figures of each variant against them; holds one model besides float32's at a time.

    Raises:
        SetupError: the machine does not allow a variant, or the model's context is shorter than a chunk.
    """
    steps.name("float32")
    reference = Reference(load_scored(_float32(config), files, chunks.context), chunks, steps)
    return reference, [_measure(each, files, reference, steps) for each in variants]


def _float32(config: EngineConfig) -> EngineConfig:
    return replace(config, dtype="float32", quantization="none", kv_cache_dtype="auto")


def _measure(config: EngineConfig, files: ModelFiles, reference: Reference, steps: Steps) -> Quality:
    """Measure one variant; its weights are freed at the end."""
    steps.name(f"penstock {variant_name(config)}")
    model = load_scored(config, files, reference.chunks.context)
    name = f"penstock {model.name}"
    if config.quantization == "none":
        name += f", {model.dtype}"
    return Quality.of(name, model.weight_bytes, score(reference, model.scorer, steps))


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
    """The figures of one variant of a model. Errors are standard errors, as if positions were independent.

    Attributes:
        name: the engine and its variant.
        weight_bytes: size of the weights: in memory for ours, of the file for other engines.
        positions: number of scored positions.
        kl_mean: mean divergence from float32, in nats per token; its median, percentiles and maximum follow.
        same_top: share of positions, 0 to 1, where float32's top token stays the top one.
        perplexity: perplexity of the text.
        reference_perplexity: float32's perplexity.
        log_ratio: natural logarithm of `perplexity` over `reference_perplexity`.
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
        """Summarise at least two positions."""
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
    """Standard error of the mean of at least two independent samples."""
    return statistics.stdev(samples) / math.sqrt(len(samples))


def quality_table(rows: Sequence[Quality]) -> str:
    """The figures as a table, the nearest to float32 first."""
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
    """Drop a line of the start report: it does not belong in a measurement."""
