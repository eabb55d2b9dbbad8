"""Which operations of a layer can be divided among ranks, and in what units.

Decides what a chain is: the projections to heads, inner columns or channels, the operations on each of these alone, and
the projections from them. Knows only the number of ranks, and cuts nothing: see `nn.dividing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.contract.errors import ConfigError
from penstock.kernels.experts import StackedWeight
from penstock.kernels.linear import Weight
from penstock.nn.lowering import operands
from penstock.nn.operations import (
    Activate,
    Attend,
    Embed,
    Gate,
    Linear,
    NormHeads,
    Operation,
    Operations,
    Register,
    Regroup,
    Rotate,
    ShortConvolution,
)

__all__ = ["Chain", "Cutter", "Layer", "Ranges", "agree_on_caches", "in_panels", "share_of"]

Ranges = tuple[range, ...]
"""Which rows or columns of a matrix, in order; each range has a step of 1."""

_GATES = 32
"""Number of gates in a panel, which the compiled kernels compute together with their projection."""

Inner = Attend | Activate | ShortConvolution | Gate | NormHeads | Rotate | Regroup
"""Operations that can compute some units of a register without the others."""


class Cutter(Protocol):
    """Makes a rank's part of a weight. Called once for each weight that the rank needs, cut or whole."""

    def linear(self, weight: Weight, outputs: Ranges | None = None, inputs: Ranges | None = None) -> Weight:
        """These outputs and inputs of a weight; None for all."""
        ...

    def stack(
        self, weight: StackedWeight, outputs: Ranges | None = None, inputs: Ranges | None = None
    ) -> StackedWeight:
        """These outputs and inputs of every weight of a stack; None for all."""
        ...

    def unit(self, weight: Weight | StackedWeight) -> int:
        """Inputs can be cut only at multiples of this number: at ends of the blocks in which a weight is quantised."""
        ...


def share_of(count: int, rank: int, ranks: int, what: str) -> range:
    """The units of a rank, out of `count`; shares differ by at most one unit.

    Raises:
        ConfigError: there are fewer units than ranks; the message names the units (`what`).
    """
    if count < ranks:
        raise ConfigError("tensor_parallel", f"{ranks} ranks cannot share {count} {what}: take at most {count}")
    return range(count * rank // ranks, count * (rank + 1) // ranks)


@dataclass(slots=True, eq=False)
class Value:
    """What a register holds between two overwrites, and the indices of the operations that touch it."""

    name: str
    width: int
    touched_by: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Chain:
    """Operations that are divided in the same way: projections to units, operations on units, projections from units.

    Attributes:
        operations: indices in the layer.
        units: how many units there are: key heads, inner columns, channels.
        together: how many neighbouring units must stay on one rank.
        sections: for each value, runs of columns (first, width) with equally many columns of each unit, in order.
        firsts: indices of the projections that write the values.
        lasts: indices of the projections that read the values.
    """

    operations: set[int]
    units: int
    together: int
    sections: dict[Value, list[tuple[int, int]]]
    firsts: set[int]
    lasts: set[int]

    def share(self, rank: int, ranks: int, what: str) -> range:
        """The units of a rank."""
        grouped = f"groups of {self.together} {what}" if self.together > 1 else what
        units = share_of(self.units // self.together, rank, ranks, grouped)
        return range(units.start * self.together, units.stop * self.together)

    def columns(self, value: Value, register: Register, share: range) -> Ranges:
        """The columns of `register` that belong to a share, in the numbering of the undivided value."""
        found = []
        for first, width in self.sections[value]:
            each = width // self.units
            if register.first <= first < register.first + register.width:
                found.append(range(first + share.start * each, first + share.stop * each))
        return tuple(found)

    def register(self, value: Value, register: Register, share: range) -> Register:
        """The part of `register` that belongs to a share, in the share's own numbering."""
        width = sum(len(each) for each in self.columns(value, register, share))
        before = Register(value.name, register.first)
        first = sum(len(each) for each in self.columns(value, before, share))
        return replace(register, first=first, width=width)


class Layer:
    """The operations of a layer, and those of its chains that can be divided."""

    def __init__(self, operations: Operations, width: int, whole: frozenset[str], cutter: Cutter, ranks: int) -> None:
        self.operations = operations
        self._ranks = ranks
        self._width = width
        self._cutter = cutter
        self._values = _values(operations, whole)
        self.chains: list[Chain] = []
        for index, operation in enumerate(operations):
            if isinstance(operation, Attend | Activate | ShortConvolution) and self.chain_of(index) is None:
                chain = self._chain(index)
                if chain is not None:
                    self.chains.append(chain)

    def chain_of(self, index: int) -> Chain | None:
        """The chain that an operation belongs to, or that a projection begins or ends."""
        return next((each for each in self.chains if index in each.operations | each.firsts | each.lasts), None)

    def value(self, index: int, register: Register) -> Value:
        """What `register` holds for an operation."""
        found = self._values[index, register.name]
        assert found is not None, f"{register} is never divided"
        return found

    def _chain(self, seed: int) -> Chain | None:
        """The chain through an operation; None if something in it needs whole rows."""
        chain = Chain({seed}, 0, 1, {}, set(), set())
        waiting = [seed]
        while waiting:
            index = waiting.pop()
            for register in (each for side in _operands(self.operations[index]) for each in side):
                value = self._values.get((index, register.name))
                if value is None:
                    return None
                sections = chain.sections.setdefault(value, [])
                sections += [each for each in _sections(self.operations[index], register) if each not in sections]
                for other in value.touched_by:
                    if isinstance(self.operations[other], Inner):
                        waiting += [other] if other not in chain.operations else []
                        chain.operations.add(other)
                    elif not self._joins(other, value, chain):
                        return None
        return chain if self._fits(chain) else None

    def _joins(self, index: int, value: Value, chain: Chain) -> bool:
        """Whether a projection begins or ends the chain at `value`; if so, add it."""
        linear = self.operations[index]
        if not isinstance(linear, Linear):
            return False
        if linear.out.name == value.name and self._values[index, value.name] is value:
            chain.firsts.add(index)
            return not linear.adds and not linear.out.is_part and linear.x.name != value.name
        chain.lasts.add(index)
        return not linear.out.is_part and linear.out.width == self._width

    def _fits(self, chain: Chain) -> bool:
        """Whether everything in a chain consists of whole units; sets its `units` and `together`."""
        if chain.firsts & chain.lasts or not chain.lasts:
            return False
        operations = [self.operations[index] for index in chain.operations]
        attending = {each.heads.keys for each in operations if isinstance(each, Attend)}
        channels = {each.out.width for each in operations if isinstance(each, Activate | ShortConvolution)}
        counts = attending or channels
        if len(counts) != 1 or any(isinstance(each, Attend) and each.heads.value_dim for each in operations):
            return False
        (chain.units,) = counts
        for value, sections in chain.sections.items():
            sections.sort()
            ends = [first + width for first, width in sections]
            if [first for first, _ in sections] != [0, *ends[:-1]] or ends[-1] != value.width:
                return False
            if any(width % chain.units for _, width in sections):
                return False
        if any(isinstance(each, Regroup) and each.groups % chain.units for each in operations):
            return False
        chain.together = self._together(chain, gates=bool(channels) and not attending)
        return True

    def _together(self, chain: Chain, *, gates: bool) -> int:
        together = 1
        for index in chain.lasts:
            linear = self.operations[index]
            assert isinstance(linear, Linear)
            block = self._cutter.unit(linear.weight)
            for _, width in chain.sections[self.value(index, linear.x)]:
                together = math.lcm(together, block // math.gcd(block, width // chain.units))
        if chain.units % together:
            raise ConfigError(
                "tensor_parallel",
                f"blocks of quantised weights span {together} of {chain.units} units of a layer;"
                " --quantization int8 has blocks that can be cut",
            )
        return in_panels(chain.units, together, self._ranks) if gates else together


def in_panels(units: int, together: int, ranks: int) -> int:
    """How many units to keep together: whole panels of gates, if there are enough panels to share; else `together`."""
    wanted = math.lcm(together, _GATES)
    return wanted if units % wanted == 0 and units // wanted >= ranks else together


def _values(operations: Operations, whole: frozenset[str]) -> dict[tuple[int, str], Value | None]:
    """What each operation's registers hold once it is done, by index and name; None for registers never divided."""
    current: dict[str, Value | None] = dict.fromkeys(whole)
    found: dict[tuple[int, str], Value | None] = {}
    for index, operation in enumerate(operations):
        read, written = _operands(operation)
        names = {each.name for each in read}
        for register in written:
            if register.name not in whole and not register.is_part and register.name not in names:
                current[register.name] = Value(register.name, register.width)
        for register in (*read, *written):
            value = current.get(register.name)
            found[index, register.name] = value
            if value is not None and index not in value.touched_by:
                value.touched_by.append(index)
    return found


def _operands(operation: Operation) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """The registers that an operation reads, and the registers that it writes."""
    match operation:
        case Attend(out, q, k, v):
            return tuple(each for each in (q, k, v) if each is not None), (out,)
        case Rotate(x):
            return (x,), (x,)
        case Embed(out):
            return (), (out,)
        case _:
            return operands(operation)


def _sections(operation: Operation, register: Register) -> list[tuple[int, int]]:
    """Split the columns of an operand into sections, each with columns of every unit."""
    halves = (isinstance(operation, Activate) and operation.kind.gated and register is operation.x) or (
        isinstance(operation, Regroup) and register is operation.out
    )
    half = register.width // 2
    if halves:
        return [(register.first, half), (register.first + half, half)]
    return [(register.first, register.width)]


def agree_on_caches(layers: Sequence[Layer]) -> None:
    """Make layers that share a cache divide it in the same way, or not at all."""
    chains: dict[int, list[tuple[Layer, Chain | None]]] = {}
    for layer in layers:
        for index, operation in enumerate(layer.operations):
            if isinstance(operation, Attend):
                chains.setdefault(operation.cache, []).append((layer, layer.chain_of(index)))
    for users in chains.values():
        together = math.lcm(*(1 if chain is None else chain.together for _, chain in users))
        for layer, chain in users:
            if chain is None:
                continue
            chain.together = together
            if any(other is None for _, other in users) and chain in layer.chains:
                layer.chains.remove(chain)
