"""The part of a model that predicts a second token: its tensors and operations, in the form that several families use.

A layer on a projection of `[embedding | hidden state]`, each normed first (DeepSeek-AI 2024, "DeepSeek-V3", section
2.2). Embedding and head are the model's. Families differ in names, in how norms are stored, and in the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.models.decoder import DecoderParts
from penstock.nn.blocks import Projection
from penstock.nn.operations import Embed, Operations, Register
from penstock.nn.program import OUT, Predictor, Program

__all__ = ["PredictorNames", "bind_predictor"]


@dataclass(frozen=True, slots=True)
class PredictorNames:
    """Prefixes of a predictor's tensors.

    Attributes:
        layer: the predictor's layer, named as the model's layers are.
        joined: the projection of the two halves.
        embedding_norm: norm of the first half, the embedding of the token at the next position.
        hidden_norm: norm of the second half, what the model computed at this position.
        final_norm: norm before the head.
    """

    layer: str
    joined: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the tensors that every predictor has."""
        between = f"{self.layer}.post_attention_layernorm"
        parts = (self.joined, self.embedding_norm, self.hidden_norm, self.final_norm, between)
        return tuple(f"{each}.weight" for each in parts)


def bind_predictor(
    parts: DecoderParts, names: PredictorNames, program: Program, layer: Operations, *, plus_one: bool = False
) -> Predictor:
    """Build a predictor: take its tensors, except the tensors of `layer`.

    Args:
        parts: the model's parts; the layer adds to their stream.
        names: where the predictor's tensors are.
        program: the model.
        layer: the operations of the predictor's layer; they use cache 0, with the spec of the model's first cache.
        plus_one: whether norm weights are stored minus 1.
    """
    width = program.shape.hidden_size
    pair = Register("pair", 2 * width)
    halves = pair.columns(0, width), pair.columns(width, width)
    norms = [parts.norm(each, plus_one=plus_one) for each in (names.embedding_norm, names.hidden_norm)]
    joined = Projection.bind(parts.weights, names.joined, width, 2 * width)
    final = parts.norm(names.final_norm, plus_one=plus_one)
    assert isinstance(program.embedding[0], Embed), "the stream begins as the embedding"
    own = Program(
        shape=program.shape,
        embedding=(
            *norms[0](halves[0], halves[0]),
            *norms[1](halves[1], halves[1]),
            joined.linear(parts.stream, pair),
        ),
        layers=(layer,),
        final=final(parts.stream, Register(OUT, width)),
        head=program.head,
        caches=program.caches[:1],
        given=(pair,),
    )
    return Predictor(program.embedding[0].table, own)
