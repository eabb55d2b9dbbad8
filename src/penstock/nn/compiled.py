"""Runs a program in one compiled call per step (`native/executor.cpp`), in the form that `native_program` builds.

Knows no family. Differs from the reference in one point: the stream of hidden states is float32 from the embedding to
the last norm.

A step with adapters runs a second compiled program, which takes adapters and is compiled for the first such step. All
other steps run the first program, as if there were no adapters.

Invariant: a token's bits depend only on its own sequence and its adapter, as in every single kernel.
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
from penstock.kernels.native_attention import cache_of, ragged_rows, vector
from penstock.kernels.native_recurrent import runs_of, states_of
from penstock.kernels.packed_linear import ELEMENTS
from penstock.kernels.packed_stack import PackedStack
from penstock.kernels.scratch import Scratch
from penstock.nn.adapters import Adapted, Adapter, sites_of, taking_adapters
from penstock.nn.causal_lm import Attend
from penstock.nn.native_program import compile_program
from penstock.nn.operations import Attend as AttendOperation
from penstock.nn.operations import (
    Embed,
    Experts,
    Linear,
    ProjectHeads,
)
from penstock.nn.paged import PagedAttend
from penstock.nn.program import STREAM, Head, Program
from penstock.nn.reference import head_logits
from penstock.nn.working_memory import rotary_tables
from penstock.thread_turns import letting_others

__all__ = ["CompiledExecutor", "why_not_compiled"]


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
        scratch: working memory, shared with executors that run before and after this one; None to make its own.

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
        self._compiled = compile_program(program, dtype)
        self._adapting: _Adapting | None = None

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self.program.shape

    @property
    def cost(self) -> Any:
        """The compiled `ProgramCost`, used to divide a step among threads."""
        return self._compiled.cost()

    @property
    def suits_team(self) -> bool:
        """Whether threads go through steps of few tokens as a team (`native/team.h`)."""
        return bool(self._compiled.suits_team())

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
        with letting_others():  # only this call: every call of torch releases the GIL, and would wait to get it back
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
        """The program that takes adapters, and the tokens that have adapters, in the form that it reads."""
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
        """Where the program's taps are written, if it has any; a tensor to throw away if the caller passes none."""
        register = self.program.taps
        if register is None:
            return []
        if taps is None:
            return [torch.empty(count, register.width)]
        if taps.shape != (count, register.width) or not taps.is_contiguous():
            raise ValueError(f"taps must be [{count}, {register.width}] and contiguous, not {tuple(taps.shape)}")
        return [taps]

    def _step(self, *tensors: Tensor) -> Any:
        """Addresses of a step's tensors, looked up again only if they are not the last step's tensors."""
        seen = self._seen_step
        if seen is None or any(map(is_not, seen[0], tensors)):
            self._seen_step = seen = tensors, _look_at_step(*tensors)
        return seen[1]

    def _caches(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
        """Addresses of the caches, looked up again only if they are not the last step's caches."""
        seen = self._seen_caches
        if seen is None or seen[0] is not keys or seen[1] is not values:
            self._seen_caches = seen = keys, values, self._look_at_caches(keys, values)
        return seen[2]

    def _states(self, states: Sequence[Tensor]) -> Any:
        """Addresses of recurrent states, looked up again only if they are not the last step's states."""
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
        self.compiled = compile_program(self._program, dtype)
        self._seen: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()

    def groups(self, adapted: Adapted) -> list[Any]:
        """The tokens that have adapters, in the form that the program reads."""
        make = required().AdaptedTokens
        return [make(first=first, end=end, adapter=self._native_of(adapter)) for first, end, adapter in adapted]

    def _native_of(self, adapter: Adapter) -> Any:
        found = self._seen.get(adapter)
        if found is None:
            self._seen[adapter] = found = self._made(adapter)
        return found

    def _made(self, adapter: Adapter) -> Any:
        """An adapter as addresses: `adapter` keeps the weights alive, and a step keeps `adapter` alive."""
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
