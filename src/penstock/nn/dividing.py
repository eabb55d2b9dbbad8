"""Divides a program among ranks that compute it together (tensor parallelism; Shoeybi et al. 2019, "Megatron-LM").

Ranks share heads, the inner columns of MLPs and experts, the channels of short convolutions and the rows of
vocabularies in whole units, as evenly as possible. In a chain like `down(activation(gate_up(x)))`, a rank has the rows
of the first weight that belong to its units, and the matching columns of the last weight. Its result is a part of the
sum, so an `AllReduce` follows. Each rank computes everything outside such chains (norms, routers, recurrences,
attention over a latent) as a whole, from the same bits to the same bits.

Decides which rank has what, from the program alone. A `Cutter`, which may not have read a weight yet, cuts it.

Invariant: what precedes an `AllReduce`, summed over all ranks, is what the undivided program computes there, except for
the order of float32 additions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.contract.model import KvCacheSpec, StateSpec
from penstock.kernels.experts import ExpertStack
from penstock.kernels.linear import Weight
from penstock.nn.division_chains import Chain, Cutter, Layer, Ranges, agree_on_caches, in_panels, share_of
from penstock.nn.operations import (
    Activate,
    AllReduce,
    Attend,
    Embed,
    Experts,
    Gate,
    Heads,
    Linear,
    NormHeads,
    Operation,
    Operations,
    ProjectHeads,
    Register,
    Regroup,
    Rotate,
    ShortConvolution,
)
from penstock.nn.program import OUT, PARTIAL, STREAM, Head, Program

__all__ = ["Cutter", "Ranges", "divide", "vocabulary_share"]

_PANEL = 16
"""Outputs that packed weights keep together; ranks share the rows of a vocabulary in units of this many."""


def divide(program: Program, rank: int, ranks: int, cutter: Cutter) -> Program:
    """The part of a program that one of several ranks computes.

    Args:
        program: what all ranks compute together; it takes no adapters, has no taps and predicts no second token.
        rank: which rank, from 0.
        ranks: number of ranks.
        cutter: makes the rank's weights.

    Raises:
        ConfigError: some layer has fewer units than there are ranks; names the setting that determines their number.
    """
    assert program.predictor is None, "the part that predicts a second token is not divided"
    assert program.taps is None, "a program with taps is not divided"
    whole = frozenset({STREAM, OUT, *(each.name for each in program.inputs)})
    layers = [Layer(layer, program.stream.width, whole, cutter, ranks) for layer in program.layers]
    agree_on_caches(layers)
    division = _Division(rank, ranks, cutter, list(program.caches), list(program.states))
    divided = tuple(division.layer(each) for each in layers)
    vocabulary = program.head.weight
    return replace(
        program,
        embedding=tuple(division.embedding(program.embedding, vocabulary)),
        layers=divided,
        final=tuple(division.kept(each) for each in program.final),
        head=division.head(program.head, program.shape.vocab_size),
        caches=tuple(division.caches),
        states=tuple(division.states),
    )


def vocabulary_share(size: int, rank: int, ranks: int) -> range:
    """The rows of a vocabulary that a rank has.

    Raises:
        ConfigError: there are fewer rows than ranks.
    """
    panel = _PANEL if size >= _PANEL * ranks else 1
    units = share_of(-(-size // panel), rank, ranks, "rows of the vocabulary (vocab_size)")
    return range(units.start * panel, min(size, units.stop * panel))


@dataclass(frozen=True, slots=True)
class _Division:
    """Rewrites operations as one rank computes them; `caches` and `states` become the rank's own."""

    rank: int
    ranks: int
    cutter: Cutter
    caches: list[KvCacheSpec]
    states: list[StateSpec]

    def layer(self, layer: Layer) -> Operations:
        """The rank's operations of a layer."""
        divided: list[Operation] = []
        for index, operation in enumerate(layer.operations):
            chain = layer.chain_of(index)
            if isinstance(operation, Experts):
                divided += self._experts(operation)
            elif chain is None:
                divided.append(self.kept(operation))
            elif isinstance(operation, Linear):
                divided += self._linear(layer, chain, index, operation)
            else:
                divided.append(self._inner(layer, chain, index, operation))
        return tuple(divided)

    def kept(self, operation: Operation) -> Operation:
        """An operation that each rank computes as a whole."""
        match operation:
            case Linear(weight=weight):
                return replace(operation, weight=self.cutter.linear(weight), modules=())
            case ProjectHeads(weights=weights):
                return replace(operation, weights=self.cutter.stack(weights))
            case Embed(table=table):
                return replace(operation, table=self.cutter.linear(table))
            case Experts(stack=stack):
                whole = replace(stack, gate_up=self.cutter.stack(stack.gate_up), down=self.cutter.stack(stack.down))
                return replace(operation, stack=whole)
            case _:
                return operation

    def embedding(self, operations: Operations, vocabulary: Weight) -> Iterator[Operation]:
        """The embedding: each token's row comes from the rank that has it, and the others add zeros."""
        for operation in operations:
            if not isinstance(operation, Embed) or not self._is_shared(operation, vocabulary):
                yield self.kept(operation)
            else:
                rows = vocabulary_share(operation.table.outputs, self.rank, self.ranks)
                table = self.cutter.linear(operation.table, (rows,))
                partial = Register(PARTIAL, operation.out.width)
                yield replace(operation, out=partial, table=table, adds=False, first=rows.start)
                yield AllReduce(operation.out, partial, operation.adds)

    def _is_shared(self, embed: Embed, vocabulary: Weight) -> bool:
        """Whether ranks share the rows of a table: they do if it is indexed by token, unless it has only a few rows."""
        enough = embed.table is vocabulary or embed.table.outputs >= _PANEL * self.ranks
        return enough and not embed.of_positions

    def head(self, head: Head, vocab_size: int) -> Head:
        """The head: logits of the rank's rows of the vocabulary."""
        rows = vocabulary_share(vocab_size, self.rank, self.ranks)
        return replace(head, weight=self.cutter.linear(head.weight, (rows,)))

    def _experts(self, experts: Experts) -> list[Operation]:
        """Give every rank some inner columns of every expert."""
        stack = experts.stack
        inner, gated = stack.down.shape[2], experts.activation.gated
        together = in_panels(inner, self.cutter.unit(stack.down), self.ranks)
        if inner % together:
            raise ConfigError(
                "tensor_parallel",
                f"blocks of {together} inputs do not part {inner} columns of experts; --quantization int8 may",
            )
        units = share_of(inner // together, self.rank, self.ranks, "columns of experts (moe_intermediate_size)")
        columns = range(units.start * together, units.stop * together)
        beside = range(columns.start + inner, columns.stop + inner)
        outputs = (columns, beside) if gated else (columns,)
        own = ExpertStack(
            gate_up=self.cutter.stack(stack.gate_up, outputs),
            down=self.cutter.stack(stack.down, None, (columns,)),
            gate_up_bias=None if stack.gate_up_bias is None else _cut(stack.gate_up_bias, outputs),
            down_bias=stack.down_bias if self.rank == 0 else None,
            scale=stack.scale,
        )
        partial = Register(PARTIAL, experts.out.width)
        return [replace(experts, out=partial, stack=own, adds=False), AllReduce(experts.out, partial, experts.adds)]

    def _linear(self, layer: Layer, chain: Chain, index: int, linear: Linear) -> list[Operation]:
        share = self._share(layer, chain)
        if index in chain.firsts:
            value = layer.value(index, linear.out)
            rows = chain.columns(value, linear.out, share)
            weight = self.cutter.linear(linear.weight, rows)
            bias = None if linear.bias is None else _cut(linear.bias, rows)
            out = chain.register(value, linear.out, share)
            return [replace(linear, out=out, weight=weight, bias=bias, modules=())]
        value = layer.value(index, linear.x)
        partial = Register(PARTIAL, linear.out.width)
        own = Linear(
            out=partial,
            x=chain.register(value, linear.x, share),
            weight=self.cutter.linear(linear.weight, None, chain.columns(value, linear.x, share)),
            bias=linear.bias if self.rank == 0 else None,
        )
        return [own, AllReduce(linear.out, partial, linear.adds)]

    def _inner(self, layer: Layer, chain: Chain, index: int, operation: Operation) -> Operation:
        share = self._share(layer, chain)

        def own(register: Register) -> Register:
            return chain.register(layer.value(index, register), register, share)

        def maybe(register: Register | None) -> Register | None:
            return None if register is None else own(register)

        match operation:
            case Attend(out, q, k, v, cache, heads, _, sinks):
                each = heads.queries // heads.keys
                queries = range(share.start * each, share.stop * each)
                self.caches[cache] = replace(self.caches[cache], heads=len(share))
                return replace(
                    operation,
                    out=own(out),
                    q=own(q),
                    k=maybe(k),
                    v=maybe(v),
                    heads=Heads(len(queries), len(share), heads.dim),
                    sinks=None if sinks is None else _cut(sinks, (queries,)),
                )
            case ShortConvolution(out, x, weight, bias, state, gate_in=gate_in, gate_out=gate_out):
                self.states[state] = StateSpec((self.states[state].shape[0], len(share)))
                return replace(
                    operation,
                    out=own(out),
                    x=own(x),
                    weight=_cut(weight, (share,)),
                    bias=None if bias is None else _cut(bias, (share,)),
                    gate_in=maybe(gate_in),
                    gate_out=maybe(gate_out),
                )
            case NormHeads(x, out=out):
                return replace(operation, x=own(x), out=maybe(out))
            case Rotate(x):
                return replace(operation, x=own(x))
            case Gate(out, x, gate):
                return replace(operation, out=own(out), x=own(x), gate=own(gate))
            case Regroup(out, x, groups):
                return replace(operation, out=own(out), x=own(x), groups=groups // chain.units * len(share))
            case Activate(out, x):
                return replace(operation, out=own(out), x=own(x))
            case _:
                raise AssertionError(f"{operation} is part of no chain")

    def _share(self, layer: Layer, chain: Chain) -> range:
        kinds = {type(layer.operations[index]) for index in chain.operations}
        if Attend in kinds:
            what = "key heads (num_key_value_heads)"
        else:
            convolves = ShortConvolution in kinds
            what = "channels of a convolution (hidden_size)" if convolves else "columns of an MLP (intermediate_size)"
        return chain.share(self.rank, self.ranks, what)


def _cut(vector: Tensor, ranges: Ranges) -> Tensor:
    """These columns of a vector, or of every row of a matrix; contiguous."""
    if len(ranges) == 1:
        return vector[..., ranges[0].start : ranges[0].stop].contiguous()
    out = torch.empty((*vector.shape[:-1], sum(map(len, ranges))), dtype=vector.dtype, device=vector.device)
    first = 0
    for each in ranges:  # on `meta` tensors, `torch.cat` would load torch's compiler
        out[..., first : first + len(each)] = vector[..., each.start : each.stop]
        first += len(each)
    return out
