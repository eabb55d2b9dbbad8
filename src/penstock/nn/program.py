"""A model, described once: the operations of a step, layer by layer, and what they keep between steps.

Decides what a program holds. Every reader takes it as it is: the torch reference (`nn.reference`), the compiled
executor (`nn.compiled`), the cost model (`nn.cost`), and people (`str`, or `penstock show MODEL --program`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.contract.model import KvCacheSpec, ModelShape, StateSpec
from penstock.kernels.linear import Weight
from penstock.nn.operations import Attend, Embed, Operation, Operations, Register

__all__ = ["OUT", "STREAM", "Head", "Program"]

STREAM = "stream"
"""The register of hidden states, to which layers add."""

OUT = "out"
"""The register that a program leaves its result in: what the head reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """From hidden states to logits.

    Attributes:
        weight: `[V, H]`.
        softcap: logits become `softcap * tanh(logits / softcap)`; None leaves them.
        scale: what logits are multiplied by, before they are capped.
    """

    weight: Weight
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A transformer of one stream. Immutable: all that changes between steps lies in caches.

    Attributes:
        embedding: operations that write the stream from token ids and positions, and what else layers read (`inputs`):
            first all that look up rows, then what is computed of them.
        layers: operations of each layer, which read the stream and add to it.
        final: operations that turn the stream into `OUT`.
        caches: keys and values that are kept, by the index that operations name; layers may share one.
        states: recurrent state that sequences carry, by the index that operations name.
    """

    shape: ModelShape
    embedding: Operations
    layers: tuple[Operations, ...]
    final: Operations
    head: Head
    caches: tuple[KvCacheSpec, ...]
    states: tuple[StateSpec, ...] = ()

    @property
    def stream(self) -> Register:
        """The register of hidden states."""
        return Register(STREAM, self.shape.hidden_size)

    @property
    def looks_ahead(self) -> bool:
        """Whether any token sees later ones of its sequence: then a prompt is computed whole, in one step."""
        return any(isinstance(each, Attend) and each.spec.looks_ahead for each in self.operations())

    @property
    def window(self) -> int | None:
        """Positions that any layer looks back to, its own included; None where one looks back to all, or ahead."""
        if self.looks_ahead:  # all positions are there at once, and nothing is left behind
            return None
        windows = [cache.window for cache in self.caches if cache.window is not None]
        return max(windows) if len(windows) == len(self.caches) else None

    @property
    def inputs(self) -> tuple[Register, ...]:
        """The registers beside the stream that are looked up by token ids or positions, in their order."""
        looked_up = [each.out for each in self.embedding if isinstance(each, Embed)]
        return tuple(dict.fromkeys(each for each in looked_up if each.name != STREAM))

    def operations(self) -> Iterator[Operation]:
        """All operations in the order in which they run."""
        yield from self.embedding
        for layer in self.layers:
            yield from layer
        yield from self.final

    def __str__(self) -> str:
        """The program for people, a line an operation."""
        lines = [str(operation) for operation in self.embedding]
        for index, layer in enumerate(self.layers):
            lines += ["", f"layer {index}", *(f"  {operation}" for operation in layer)]
        lines += ["", *(str(operation) for operation in self.final)]
        scale = "" if self.head.scale == 1.0 else f", scale {self.head.scale:g}"
        cap = "" if self.head.softcap is None else f", softcap {self.head.softcap:g}"
        return "\n".join([*lines, f"logits   <- head({OUT}{scale}{cap})"])
