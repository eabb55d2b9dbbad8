"""Runs a program in one compiled call per step (`native/executor.cpp`).

Decides how operations are handed over: which neighbours are fused, where registers live in scratch, and which of them
are bfloat16. Knows no family. Differs from the reference in one point: the stream of hidden states is float32 from the
embedding to the last norm.

A step with adapters runs a second compiled program, made when the first of them comes, that has a place for them; all
others run the same one as if there were no adapters.

Invariant: a token's bits depend on its own sequence and its adapter alone, as in every single kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels.backend import Backend
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.native import required
from penstock.kernels.native_attention import cache_of, ragged_rows, score_rule, vector
from penstock.kernels.native_experts import expert_layer, stack_of
from penstock.kernels.native_recurrent import GATES, filter_of, group_norm_of, rule_of, runs_of, states_of
from penstock.kernels.native_rows import ACTIVATION_CODES, rotation, vector_of
from penstock.kernels.packed_linear import ELEMENTS
from penstock.kernels.packed_stack import PackedStack
from penstock.kernels.scratch import Scratch
from penstock.nn.adapters import Adapted, Adapter, sites_of, taking_adapters
from penstock.nn.causal_lm import Attend
from penstock.nn.lowering import Attended, Gated, Lowered, Recurrent, lower_layers
from penstock.nn.operations import (
    Activate,
    Adapt,
    AllReduce,
    Embed,
    Experts,
    Gate,
    GatedNorm,
    GateRows,
    Linear,
    Norm,
    NormHeads,
    NormKind,
    ProjectHeads,
    Recurrence,
    Register,
    Regroup,
    Scale,
    ShortConvolution,
)
from penstock.nn.operations import Attend as AttendOperation
from penstock.nn.paged import PagedAttend
from penstock.nn.program import STREAM, Head, Program
from penstock.nn.reference import head_logits
from penstock.nn.register_places import Place, place_registers
from penstock.nn.rope import RotaryTable
from penstock.nn.working_memory import rotary_tables
from penstock.thread_turns import letting_others

__all__ = ["CompiledExecutor", "why_not_compiled"]

_NORMS = {NormKind.RMS: 0, NormKind.LAYER: 1}


def why_not_compiled(program: Program, dtype: torch.dtype, backend: Backend) -> str | None:
    """The reason, in words, why a backend cannot run a whole program in one compiled call; None if it can."""
    if not isinstance(backend, CpuBackend):
        return f"the backend {backend.name} computes operation by operation"
    for operation in program.operations():
        match operation:
            case Linear(weight=weight) if any(part.native is None for part in weight.parts):
                return f"{operation} is not multiplied by the compiled kernels"
            case Experts(stack=stack) if not stack.is_packed:
                return f"{operation} is not multiplied by the compiled kernels"
            case ProjectHeads(weights=weights) if not isinstance(weights, PackedStack):
                return f"{operation} is not multiplied by the compiled kernels"
            case AttendOperation(heads=heads) if reason := backend.why_not(
                dtype, heads.dim, latent=heads.value_dim > 0
            ):
                return reason
    return backend.why_not(dtype, 0)


class CompiledExecutor:
    """A `CausalLM` that runs each step in one call.

    Immutable except for its working memory (one per thread) and its memo of the addresses last looked up: caches,
    states and the step's tensors, which must therefore not be resized in place.

    Args:
        program: what to compute; `why_not_compiled` must return None for it.
        dtype: dtype of queries, keys and values before rotation and storing: bfloat16 or float32.
        backend: provides the kernels and threads.
        scratch: working memory, shared with executors that run before and after this one; None for some of its own.

    Raises:
        ValueError: a shape or dtype does not fit.
    """

    def __init__(
        self, program: Program, dtype: torch.dtype, backend: CpuBackend, scratch: Scratch | None = None
    ) -> None:
        self.program = program
        self.backend = backend
        self._out_dtype = _hidden_dtype(program.head)
        self._scratch = scratch or Scratch()
        self._seen_caches: tuple[Sequence[Tensor], Sequence[Tensor], Any] | None = None
        self._seen_states: tuple[Sequence[Tensor], Any] | None = None
        self._seen_step: tuple[tuple[Tensor, ...], Any] | None = None
        self._native = required()
        self._tables = rotary_tables(program)
        self._dtype = dtype
        self._compiled = _compile(program, dtype)
        self._adapting: _Adapting | None = None

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self.program.shape

    @property
    def cost(self) -> Any:
        """The compiled `ProgramCost`, used to divide a step among threads."""
        return self._compiled.cost()

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return head_logits(self.backend, self.program.head, hidden)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`.

        Raises:
            ValueError: shapes, dtypes, positions, slots or rows do not fit; nothing has been written.
        """
        assert isinstance(attend, PagedAttend), "the compiled executor reads and writes the caches itself"
        stream, *inputs = self._looked_up(token_ids, positions)
        given = [*inputs, *self._taps(len(positions), taps)]
        return self.compute_layers(stream, positions, attend, given, adapted)

    def forward_given(self, given: Tensor, positions: Tensor, attend: Attend, taps: Tensor | None = None) -> Tensor:
        """See `CausalLM.forward_given`; raises as `forward` does."""
        assert isinstance(attend, PagedAttend), "the compiled executor reads and writes the caches itself"
        stream = torch.empty(len(given), self.program.shape.hidden_size)
        return self.compute_layers(stream, positions, attend, [given, *self._taps(len(given), taps)])

    def compute_layers(
        self,
        stream: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        inputs: Sequence[Tensor] = (),
        adapted: Adapted = (),
    ) -> Tensor:
        """Compute the head's input from embeddings; raises as `forward` does.

        Args:
            stream: `[T, H]` float32, contiguous; overwritten, as are `inputs`.
            positions: `[T]` int64.
            attend: the caches.
            inputs: values of `Program.inputs`, `[T, width]` each.
            adapted: as for `forward`.
        """
        hidden_size, count, kv_len = self.program.shape.hidden_size, positions.shape[0], attend.kv_len
        if stream.shape != (count, hidden_size) or not stream.is_contiguous():
            raise ValueError(f"stream must be [T, {hidden_size}] and contiguous, not {tuple(stream.shape)}")
        for table in self._tables:
            table.make_known(positions)
        out = torch.empty(stream.shape, dtype=self._out_dtype)
        longest = max(kv_len.tolist(), default=0)  # cheap: one entry per row of the step
        native, cpu = self._native, self.backend.cpu
        compiled, groups = (self._compiled, []) if not adapted else self._adapt(adapted)
        size = compiled.scratch_bytes(cpu, count, kv_len.shape[0], longest)
        step = self._step(positions, attend.write_slots, attend.q_start, kv_len, attend.block_table)
        caches, states = self._caches(attend.keys, attend.values), self._states(attend.states)
        memory = native.Memory(self._scratch.address_of(size), size)
        read = [native.Rows(each.data_ptr(), each.shape[1], ELEMENTS[each.dtype]) for each in inputs]
        written = native.Rows(out.data_ptr(), out.shape[1], ELEMENTS[out.dtype])
        runs = None if attend.runs is None else runs_of(attend.runs)
        with letting_others():  # this call alone: each call of torch lets go of the GIL, and would wait to get it back
            compiled.run(
                cpu=cpu,
                step=step,
                caches=caches,
                states=states,
                runs=runs,
                stream=stream.data_ptr(),
                inputs=read,
                out=written,
                scratch=memory,
                adapted=groups,
            )
        return out

    def _adapt(self, adapted: Adapted) -> tuple[Any, list[Any]]:
        """The program that takes adapters, and the tokens that have some, as it takes them."""
        if self._adapting is None:
            self._adapting = _Adapting(self.program, self._dtype)
        return self._adapting.compiled, self._adapting.groups(adapted)

    def _looked_up(self, token_ids: Tensor, positions: Tensor) -> list[Tensor]:
        """The stream as the first layer reads it, then the inputs: float32, contiguous, free to be overwritten."""
        found: dict[str, Tensor] = {}
        for embed in self.program.embedding:
            if not isinstance(embed, Embed):
                continue
            rows = self.backend.embedding(positions if embed.of_positions else token_ids, embed.table, torch.float32)
            rows = rows if embed.scale == 1.0 else rows.mul_(embed.scale)
            name = embed.out.name
            found[name] = found[name].add_(rows) if name in found else rows
        return [found[STREAM], *(found[each.name] for each in self.program.inputs if each.name in found)]

    def _taps(self, count: int, taps: Tensor | None) -> list[Tensor]:
        """Where the program's taps go, if it has any; a place that nobody reads if the caller has none."""
        register = self.program.taps
        if register is None:
            return []
        if taps is None:
            return [torch.empty(count, register.width)]
        if taps.shape != (count, register.width) or not taps.is_contiguous():
            raise ValueError(f"taps must be [{count}, {register.width}] and contiguous, not {tuple(taps.shape)}")
        return [taps]

    def _step(self, *tensors: Tensor) -> Any:
        """Addresses of a step's tensors, looked up again only when the tensors are not those of the last step."""
        seen = self._seen_step
        if seen is None or any(map(is_not, seen[0], tensors)):
            self._seen_step = seen = tensors, _look_at_step(*tensors)
        return seen[1]

    def _caches(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
        """Addresses of the caches, looked up again only when the caches are not those of the last step."""
        seen = self._seen_caches
        if seen is None or seen[0] is not keys or seen[1] is not values:
            self._seen_caches = seen = keys, values, self._look_at_caches(keys, values)
        return seen[2]

    def _states(self, states: Sequence[Tensor]) -> Any:
        """Addresses of recurrent states, looked up again only when the states are not those of the last step."""
        seen = self._seen_states
        if seen is None or seen[0] is not states:
            if len(states) != len(self.program.states):
                raise ValueError(f"there must be {len(self.program.states)} states, not {len(states)}")
            self._seen_states = seen = states, states_of(states)
        return seen[1]

    def _look_at_caches(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
        specs = self.program.caches
        if not len(keys) == len(values) == len(specs):
            raise ValueError(f"keys and values must be of {len(specs)} caches, not {len(keys)}, {len(values)}")
        caches = required().Caches()
        for k, v, spec in zip(keys, values, specs, strict=True):
            caches.add(cache_of(k, v, spec.heads, spec.head_dim, spec.value_dim))
        return caches


class _Adapting:
    """The compiled program that takes adapters, and the adapters that it has seen. Owned by an executor."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self._sites = len(sites_of(program))
        self._program = taking_adapters(program)
        self.compiled = _compile(self._program, dtype)
        self._seen: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()

    def groups(self, adapted: Adapted) -> list[Any]:
        """The tokens that have adapters, as the program takes them."""
        make = required().AdaptedTokens
        return [make(first=first, end=end, adapter=self._native_of(adapter)) for first, end, adapter in adapted]

    def _native_of(self, adapter: Adapter) -> Any:
        found = self._seen.get(adapter)
        if found is None:
            self._seen[adapter] = found = self._made(adapter)
        return found

    def _made(self, adapter: Adapter) -> Any:
        """An adapter as addresses: `adapter` keeps the weights alive, and a step keeps `adapter`."""
        made = required().Adapter(sites=self._sites)
        for site, update in adapter.updates.items():
            made.down(site=site, weight=update.down.native)
            for first, inner, weight in update.ups:
                made.up(site=site, first=first, inner=inner, weight=weight.native)
        self.compiled.admit(made)
        return made


def _hidden_dtype(head: Head) -> torch.dtype:
    """Dtype of the head's input: bfloat16 only for a bf16 head; others take float32, to avoid a needless rounding."""
    return torch.bfloat16 if head.weight.arithmetic == "bf16" else torch.float32


def _look_at_step(positions: Tensor, write_slots: Tensor, q_start: Tensor, kv_len: Tensor, block_table: Tensor) -> Any:
    count = len(positions)
    return required().Step(
        rows=ragged_rows(count, q_start, kv_len, block_table),
        positions=vector("positions", positions, torch.int64, count),
        write_slots=vector("write_slots", write_slots, torch.int64, count),
    )


def _compile(program: Program, dtype: torch.dtype) -> Any:
    """Build the compiled program. It holds addresses only: `program` keeps the tensors alive."""
    layers = lower_layers(program)
    places = place_registers([operation for layer in layers for operation in layer], dtype, program.inputs)
    compiled = required().Program(hidden=program.shape.hidden_size)
    inputs = {each.name: compiled.input(width=each.width) for each in program.inputs}
    for size in places.area_bytes:
        compiled.area(bytes=size)
    numbers: dict[Place, int] = {}
    for place in places.distinct():
        numbers[place] = compiled.register(width=place.width, element=ELEMENTS[place.dtype], area=place.area)
    builder = _Builder(compiled, places.resolve(numbers, inputs))
    index = 0
    for number, layer in enumerate(layers):
        if number < len(program.layers):  # the operations after the last layer count as part of it
            compiled.begin_layer()
        for operation in layer:
            builder.add(index, operation)
            index += 1
    return compiled


class _Builder:
    """Adds operations to a compiled program; `resolve` maps an operation's index and a register name to its number."""

    def __init__(self, compiled: Any, resolve: Any) -> None:
        self._compiled = compiled
        self._resolve = resolve

    def add(self, index: int, operation: Lowered) -> None:
        match operation:
            case Norm():
                self._norm(index, operation)
            case NormHeads():
                self._norm_heads(index, operation)
            case Linear():
                self._linear(index, operation, operation.out, None)
            case Gated():
                self._linear(index, operation.linear, operation.out, ACTIVATION_CODES[operation.activation])
            case Adapt():
                self._compiled.adapt(
                    x=self._columns(index, operation.x),
                    out=self._columns(index, operation.out),
                    site=operation.site,
                )
            case Activate():
                self._compiled.activation(
                    kind=ACTIVATION_CODES[operation.kind],
                    x=self._columns(index, operation.x),
                    out=self._columns(index, operation.out),
                )
            case Attended():
                self._attend(index, operation)
            case Experts():
                self._compiled.experts(
                    x=self._columns(index, operation.x),
                    logits=self._columns(index, operation.logits),
                    out=self._columns(index, operation.out),
                    layer=expert_layer(
                        operation.stack,
                        operation.spec,
                        ACTIVATION_CODES[operation.activation],
                        operation.selection_bias,
                    ),
                    adds=operation.adds,
                )
            case ProjectHeads():
                self._compiled.project_heads(
                    x=self._columns(index, operation.x),
                    out=self._columns(index, operation.out),
                    heads=operation.weights.shape[0],
                    passed=operation.passed,
                    weights=stack_of("weights of heads", operation.weights),
                )
            case GateRows():
                self._compiled.gate_rows(
                    x=self._columns(index, operation.x),
                    logits=self._columns(index, operation.logits),
                    out=self._columns(index, operation.out),
                )
            case AllReduce():
                raise ValueError(f"{operation} lies between compiled programs (nn.divided), not in one")
            case _:
                self._recurrent(index, operation)

    def _recurrent(self, index: int, operation: Recurrent) -> None:
        def at(register: Register | None) -> Any:
            return None if register is None else self._columns(index, register)

        match operation:
            case ShortConvolution(out, x, weight, bias, state, silu, gate_in, gate_out):
                self._compiled.convolution(
                    state=state,
                    filter=filter_of(weight, bias, silu=silu),
                    x=at(x),
                    gate_in=at(gate_in),
                    gate_out=at(gate_out),
                    out=at(out),
                )
            case Recurrence(out, q, k, v, a, b, state, rule):
                operands = {"q": at(q), "k": at(k), "v": at(v), "a": at(a), "b": at(b), "out": at(out)}
                self._compiled.recurrence(state=state, rule=rule_of(rule), **operands)
            case GatedNorm(out, x, gate, weight, eps, group, gate_first):
                norm = group_norm_of(weight, eps, group, gate_first=gate_first)
                self._compiled.gated_norm(norm=norm, x=at(x), gate=at(gate), out=at(out))
            case Gate(out, x, gate, kind):
                self._compiled.gate(x=at(x), gate=at(gate), out=at(out), kind=GATES[kind])
            case Scale(x, factor):
                self._compiled.scale(x=at(x), factor=vector("a factor", factor, torch.float32, 1))
            case Regroup(out, x, groups):
                self._compiled.regroup(groups=groups, x=at(x), out=at(out))

    def _columns(self, index: int, register: Register) -> Any:
        return required().Columns(
            register=self._resolve(index, register.name), first=register.first, width=register.width
        )

    def _norm(self, index: int, norm: Norm) -> None:
        width = norm.x.width
        self._compiled.norm(
            kind=_NORMS[norm.kind],
            x=self._columns(index, norm.x),
            out=self._columns(index, norm.out),
            weight=vector_of("the weight of a norm", norm.weight, width),
            bias=vector_of("the bias of a norm", norm.bias, width),
            eps=norm.eps,
            adds=norm.adds,
        )

    def _norm_heads(self, index: int, norm: NormHeads) -> None:
        width = len(norm.weight)
        self._compiled.norm(
            kind=_NORMS[NormKind.RMS],
            x=self._columns(index, norm.x),
            out=self._columns(index, norm.written),
            weight=vector_of("the weight of a norm", norm.weight, width),
            bias=None,
            eps=norm.eps,
            adds=norm.adds,
            groups=norm.x.width // width,
        )

    def _linear(self, index: int, linear: Linear, out: Register, gate: int | None) -> None:
        first, parts = 0, linear.weight.parts
        for part in parts:  # a gated product has exactly one: `lower` ensures that
            columns = out if len(parts) == 1 else out.columns(first, part.outputs)
            bias = None if linear.bias is None else linear.bias[first : first + part.outputs]
            self._compiled.linear(
                x=self._columns(index, linear.x),
                out=self._columns(index, columns),
                weight=part.native,
                bias=vector_of("the bias of a projection", bias, part.outputs),
                adds=linear.adds,
                gate=gate,
            )
            first += part.outputs

    def _attend(self, index: int, attended: Attended) -> None:
        attend, heads, native = attended.attend, attended.attend.heads, required()
        self._compiled.attend(
            cache=attend.cache,
            heads=native.Heads(queries=heads.queries, keys=heads.keys, dim=heads.dim, value_dim=heads.value_dim),
            q=self._columns(index, attend.q),
            k=None if attend.k is None else self._columns(index, attend.k),
            v=None if attend.v is None else self._columns(index, attend.v),
            rotated=self._columns(index, attended.rotated),
            out=self._columns(index, attend.out),
            norms=native.HeadNorms(
                q=vector_of("q_norm", attended.q_norm, heads.dim),
                k=vector_of("k_norm", attended.k_norm, heads.dim),
                eps=attended.eps,
            ),
            rotation=None if attended.rope is None else _rotation(attended.rope),
            rule=score_rule(attend.spec, attend.sinks, heads.queries),
        )


def _rotation(rope: RotaryTable) -> Any:
    for name, table in (("cos", rope.cos), ("sin", rope.sin)):
        fits = table.dim() == 2 and table.shape[1] == rope.width // 2 and table.dtype == torch.float32
        if not fits or not len(table):  # an empty table has a null address, which would mean no rotation
            raise ValueError(f"{name} must be [P, {rope.width // 2}] float32, not {tuple(table.shape)} {table.dtype}")
        vector(name, table.view(-1), torch.float32, table.numel())
    return rotation(rope.cos, rope.sin, rope.width)
