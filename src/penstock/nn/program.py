"""A model, described once: the operations of a step, layer by layer, and what they keep between steps.

Decides what a program holds. All readers share it: the torch reference (`nn.reference`), the compiled executor
(`nn.compiled`), the cost model (`nn.cost`), and people (`str`, or `penstock show MODEL --program`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.contract.model import KvCacheSpec, ModelShape, StateSpec
from penstock.kernels.linear import Weight
from penstock.nn.operations import Attend, Embed, Operation, Operations, Register, copied

__all__ = ["OUT", "PARTIAL", "STREAM", "TAPS", "Head", "Predictor", "Program", "tapping"]

STREAM = "stream"
"""The register of hidden states, to which layers add."""

OUT = "out"
"""The register that holds a program's result, which the head reads."""

PARTIAL = "partial"
"""The register of a rank's part of a sum, which an `AllReduce` reads."""

TAPS = "taps"
"""The register of hidden states that a program hands out besides its result."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """From hidden states to logits.

    Attributes:
        weight: `[V, H]`.
        softcap: logits become `softcap * tanh(logits / softcap)`; None for no cap.
        scale: factor applied to logits before the cap.
    """

    weight: Weight
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A transformer with one residual stream. Immutable: whatever changes between steps lives in caches and states.

    Attributes:
        embedding: operations that compute the stream, and the other registers that layers read (`inputs`), from token
            ids and positions: first all lookups, then computations on the looked-up rows.
        layers: operations of each layer, which read the stream and add to it.
        final: operations that turn the stream into `OUT`.
        caches: specs of the KV caches, indexed as operations name them; layers may share one.
        states: specs of the recurrent states, indexed as operations name them.
        given: registers besides the stream that the caller fills, and that operations may overwrite.
        taps: a register of hidden states that the caller owns and layers fill; None if none are read.
        predictor: predicts a second token; None if the checkpoint cannot, or if it is not wanted.
    """

    shape: ModelShape
    embedding: Operations
    layers: tuple[Operations, ...]
    final: Operations
    head: Head
    caches: tuple[KvCacheSpec, ...]
    states: tuple[StateSpec, ...] = ()
    given: tuple[Register, ...] = ()
    taps: Register | None = None
    predictor: Predictor | None = None

    @property
    def stream(self) -> Register:
        """The register of hidden states."""
        return Register(STREAM, self.shape.hidden_size)

    @property
    def looks_ahead(self) -> bool:
        """Whether any token sees later ones of its sequence; a prompt must then be computed whole, in one step."""
        return any(isinstance(each, Attend) and each.spec.looks_ahead for each in self.operations())

    @property
    def window(self) -> int | None:
        """Widest window of any layer, own position included; None if any layer sees all positions or looks ahead."""
        if self.looks_ahead:  # a prompt is computed in one step, so no position ever falls out of the window
            return None
        windows = [cache.window for cache in self.caches if cache.window is not None]
        return max(windows) if len(windows) == len(self.caches) else None

    @property
    def inputs(self) -> tuple[Register, ...]:
        """The registers besides the stream that the caller owns, in order: looked up, given, and taps."""
        looked_up = [each.out for each in self.embedding if isinstance(each, Embed)]
        taps = () if self.taps is None else (self.taps,)
        return (*dict.fromkeys(each for each in looked_up if each.name != STREAM), *self.given, *taps)

    def operations(self) -> Iterator[Operation]:
        """All operations in execution order."""
        yield from self.embedding
        for layer in self.layers:
            yield from layer
        yield from self.final

    def __str__(self) -> str:
        """The program as readable text, one operation per line."""
        lines = [str(operation) for operation in self.embedding]
        for index, layer in enumerate(self.layers):
            lines += ["", f"layer {index}", *(f"  {operation}" for operation in layer)]
        lines += ["", *(str(operation) for operation in self.final)]
        scale = "" if self.head.scale == 1.0 else f", scale {self.head.scale:g}"
        cap = "" if self.head.softcap is None else f", softcap {self.head.softcap:g}"
        return "\n".join([*lines, f"logits   <- head({OUT}{scale}{cap})"])


def tapping(program: Program, layers: Sequence[int]) -> Program:
    """The same program, which also hands out what each of `layers` reads, side by side in this order.

    The index after the last layer's stands for what the last norm reads.
    """
    width = program.stream.width
    taps = Register(TAPS, len(layers) * width)
    parts = [*program.layers, program.final]
    for place, layer in enumerate(layers):
        parts[layer] = (copied(taps.columns(place * width, width), program.stream), *parts[layer])
    *own, final = parts
    return replace(program, layers=tuple(own), final=final, taps=taps)


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """Predicts the token after the next from hidden states of the model.

    At position `p` it is given what the model computed there, and the token at `p + 1`; its logits are for the token at
    `p + 2`. It has a KV cache of its own, one entry per position. Multi-token prediction, as DeepSeek-V3 describes it
    (2024, section 2.2), reads the model's result. EAGLE-3 (Li et al. 2025) reads the taps of a `tapping` program.

    Attributes:
        table: `[V, H]`, the embedding of the token at `p + 1`.
        program: its given register is `[embedding | hidden state]` of a position, `2 * H` wide. Its taps, or its result
            if it has none, are the hidden state for the next position, if the model has not computed that.
        joined: `[H, taps]`, projects the model's taps to a hidden state; None if that is the model's result.
        joined_bias: `[H]`, or None.
        vocabulary: `[outputs of the head]` int64, the token of each logit; None for all tokens, in order.
    """

    table: Weight
    program: Program
    joined: Weight | None = None
    joined_bias: Tensor | None = None
    vocabulary: Tensor | None = None
