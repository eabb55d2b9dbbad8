"""Fuses neighbouring operations that the compiled kernels do in one pass.

Decides which: an activation with the projection that it gates, and the norms and rotations of queries and keys with the
attention that follows. Everything else stays as the program has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.nn.operations import (
    Activate,
    Activation,
    Adapt,
    AllReduce,
    Attend,
    Embed,
    Experts,
    Gate,
    GatedNorm,
    GateRows,
    Linear,
    Norm,
    NormHeads,
    Operation,
    Operations,
    ProjectHeads,
    Recurrence,
    Register,
    Regroup,
    Rotate,
    Scale,
    ShortConvolution,
)
from penstock.nn.program import Program
from penstock.nn.rope import RotaryTable

__all__ = ["Attended", "Gated", "Lowered", "Recurrent", "lower", "lower_layers", "operands"]


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """A gated `activation` applied to the output of `linear`, which is never stored."""

    out: Register
    linear: Linear
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Attention fused with the norms and rotations of its queries and keys.

    Attributes:
        rotated: where the prepared queries are written.
        q_norm: `[D]`, norm weight of every query head; or None.
        k_norm: `[D]`, norm weight of every key head; or None.
        eps: eps of both norms.
        rope: rotation of queries and keys; None for no rotation.
    """

    attend: Attend
    rotated: Register
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    rope: RotaryTable | None = None


Recurrent = ShortConvolution | Recurrence | GatedNorm | Gate | Scale | Regroup
Lowered = (
    Norm
    | NormHeads
    | Linear
    | Gated
    | Activate
    | Attended
    | Experts
    | GateRows
    | ProjectHeads
    | Recurrent
    | Adapt
    | AllReduce
)


def lower(operations: Operations) -> list[Lowered]:
    """Fuse the operations that can be fused.

    Raises:
        ValueError: an operation has no compiled kernel of its own and cannot be fused.
    """
    lowered: list[Lowered] = []
    before: list[NormHeads | Rotate] = []  # candidates to fuse with the next attention
    for operation in operations:
        if before and not isinstance(operation, NormHeads | Rotate | Attend):
            lowered += _standing_alone(before, before)
            before = []
        match operation:
            case NormHeads() | Rotate():
                before.append(operation)
            case Attend():
                alone = [each for each in before if not _prepares(each, operation)]
                lowered += _standing_alone(alone, before)
                lowered.append(_attended(operation, [each for each in before if each not in alone]))
                before = []
            case Activate() if _gates(lowered[-1] if lowered else None, operation):
                lowered.append(Gated(operation.out, lowered.pop(), operation.kind))
            case Embed():
                raise ValueError(f"{operation} has no compiled kernel here")
            case _:
                lowered.append(operation)
    return lowered + _standing_alone(before, before)


def lower_layers(program: Program) -> list[list[Lowered]]:
    """Lower each layer, then the program's final operations.

    Operations between the embedding lookups and the first layer count as part of that layer; the lookups are left out.
    """
    first = tuple(each for each in program.embedding if not isinstance(each, Embed))
    layers = (first + program.layers[0], *program.layers[1:]) if program.layers else ()
    return [*(lower(layer) for layer in layers), lower(program.final)]


def operands(operation: Lowered) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """The registers that an operation reads, and the registers that it writes."""
    match operation:
        case Gated(out, linear):
            return (linear.x,), (out,)
        case Attended(attend, rotated):
            read = tuple(each for each in (attend.q, attend.k, attend.v) if each is not None)
            return read, (rotated, attend.out)
        case Activate(out, x) | Regroup(out, x) | ProjectHeads(out, x):
            return (x,), (out,)
        case NormHeads(x, adds=adds):
            return (x, *((operation.written,) if adds else ())), (operation.written,)
        case Scale(x):
            return (x,), (x,)
        case Experts(out, x, logits, adds=adds):
            return (x, logits, *((out,) if adds else ())), (out,)
        case GateRows(out, x, logits):
            return (x, logits, out), (out,)
        case ShortConvolution(out, x, gate_in=gate_in, gate_out=gate_out):
            return tuple(each for each in (x, gate_in, gate_out) if each is not None), (out,)
        case Recurrence(out, q, k, v, a, b):
            return tuple(each for each in (q, k, v, a, b) if each is not None), (out,)
        case GatedNorm(out, x, gate) | Gate(out, x, gate):
            return (x, gate), (out,)
        case _:
            return (operation.x, *((operation.out,) if operation.adds else ())), (operation.out,)


def _gates(previous: Lowered | None, activate: Activate) -> bool:
    return (
        isinstance(previous, Linear)
        and activate.kind.gated
        and previous.out == activate.x
        and not previous.adds
        and previous.weight.native is not None
        and previous.weight.outputs % 32 == 0  # whole panels of gates
    )


def _prepares(operation: NormHeads | Rotate, attend: Attend) -> bool:
    """Whether `operation` works in place on the queries or keys of `attend`."""
    in_place = isinstance(operation, Rotate) or operation.out is None
    return in_place and operation.x in (attend.q, attend.k)


def _standing_alone(alone: Sequence[NormHeads | Rotate], before: Sequence[NormHeads | Rotate]) -> list[NormHeads]:
    """The norms in `alone`, which touch no query or key and so may run first; `before` is the whole original order."""
    norms: list[NormHeads] = []
    for operation in alone:
        earlier = before[: before.index(operation)]
        if isinstance(operation, Rotate) or any(_touches(each, operation.x) for each in earlier if each not in alone):
            raise ValueError(f"{operation} is done to no query or key of an attention, and has no kernel of its own")
        norms.append(operation)
    return norms


def _touches(operation: NormHeads | Rotate, x: Register) -> bool:
    """Whether `operation` works on any column of `x`."""
    written = operation.x
    apart = written.first + written.width <= x.first or x.first + x.width <= written.first
    return written.name == x.name and not apart


def _attended(attend: Attend, before: list[NormHeads | Rotate]) -> Attended:
    result = Attended(attend, Register("rotated", attend.q.width))
    for operation in before:
        result = _with(result, operation)
    if result.rope is not None and not _both(before, Rotate, attend):
        raise ValueError(f"queries and keys of {attend} are not rotated alike")
    return result


def _with(attended: Attended, operation: Operation) -> Attended:
    """Add `operation` to `attended`; the kernel's order is a norm first, then the rotation."""
    attend = attended.attend
    if operation.x not in (attend.q, attend.k):
        raise ValueError(f"{operation} is no query or key of {attend}")
    if isinstance(operation, Rotate):
        if attended.rope not in (None, operation.table) or operation.head_dim != attend.heads.dim:
            raise ValueError(f"queries and keys of {attend} are not rotated alike")
        return replace(attended, rope=operation.table)
    if attended.rope is not None or attended.eps not in (0.0, operation.eps):
        raise ValueError(f"{operation} comes after a rotation, or has another eps than the norm beside it")
    name = "q_norm" if operation.x == attend.q else "k_norm"
    return replace(attended, eps=operation.eps, **{name: operation.weight})


def _both(before: list[NormHeads | Rotate], kind: type, attend: Attend) -> bool:
    return {each.x for each in before if isinstance(each, kind)} == {x for x in (attend.q, attend.k) if x is not None}
