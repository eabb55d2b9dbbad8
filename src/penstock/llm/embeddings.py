"""Results of embedding and scoring, in vLLM's form, and the comparison of two vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import InvalidParameter

__all__ = [
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "check_pairs",
    "cosine",
    "embedding_spec",
    "kept_tokens",
    "scores",
]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector; each number is exactly a float32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """One prompt and its vector.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache; always 0 with pooling `mean`.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The similarity of two texts: 1 for the same direction, 0 for a right angle, -1 for opposite directions."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """One pair of texts and its score; `prompt_token_ids` are the query's and then the document's."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def embedding_spec(
    pooling: str | None, normalize: bool | None, dimensions: int | None, usual: EmbeddingSpec
) -> EmbeddingSpec:
    """The specification for the arguments of `embed`; `usual` replaces a `pooling` or `normalize` of None.

    Raises:
        InvalidParameter: there is no such pooling, or `dimensions` is not at least 1.
    """
    if pooling is not None and pooling not in list(Pooling):
        raise InvalidParameter("pooling", f"must be one of {', '.join(Pooling)}, got {pooling!r}")
    if dimensions is not None and dimensions < 1:
        raise InvalidParameter("dimensions", f"must be at least 1, got {dimensions}")
    return EmbeddingSpec(
        usual.pooling if pooling is None else Pooling(pooling),
        usual.normalize if normalize is None else normalize,
        dimensions or 0,
    )


def kept_tokens(truncate_prompt_tokens: int | None, longest: int) -> int:
    """How many tokens of a prompt to keep: `longest` for -1; 0 for None, which refuses prompts that are too long.

    Raises:
        InvalidParameter: `truncate_prompt_tokens` is neither None, nor -1, nor at least 1.
    """
    most = truncate_prompt_tokens
    if most is None:
        return 0
    if most != -1 and most < 1:
        raise InvalidParameter("truncate_prompt_tokens", f"must be -1 or at least 1, got {most}")
    return longest if most == -1 else most


def check_pairs(queries: int, documents: int) -> None:
    """Check that queries and documents form pairs: one query for all documents, or one for each.

    Raises:
        InvalidParameter: there is not exactly one query, and not one for each document.
    """
    if queries not in (1, documents):
        raise InvalidParameter("queries", f"must be 1, or as many as there are documents; {queries} are not")


def scores(
    queries: Sequence[EmbeddingRequestOutput], documents: Sequence[EmbeddingRequestOutput]
) -> list[ScoringRequestOutput]:
    """The score of each document with its query, or with the only query."""
    pairs = zip(queries if len(queries) == len(documents) else [*queries] * len(documents), documents, strict=True)
    return [
        ScoringRequestOutput(
            request_id=document.request_id,
            outputs=ScoringOutput(cosine(query.outputs.embedding, document.outputs.embedding)),
            prompt_token_ids=query.prompt_token_ids + document.prompt_token_ids,
            num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
        )
        for query, document in pairs
    ]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors of the same size; 0 if one of them is zero."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return math.fsum(map(mul, one, other)) / lengths if lengths else 0.0
