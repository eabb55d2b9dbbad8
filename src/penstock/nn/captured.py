"""Runs a program on CUDA, with small steps as CUDA graphs: one launch per step, not one per operation.

A decode step of a small model takes hundreds of launches, and the host needs longer for them than the device needs to
compute. A graph is captured when a step of its size first occurs, and replayed with other contents. Larger steps, steps
with adapters, block sizes that do not divide a segment of attention, and programs with operations that wait for the
device run on the reference with the same backend.

Decides which steps are captured, and how a step's rows become a graph's inputs: token by token, each with its own row
of the block table, so that a graph need not distinguish decode rows, drafts and short prompts. Results have the same
bits as the reference's, because the operations are the reference's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.model import ModelShape, StateSpec
from penstock.kernels import triton_attention
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cuda_backend import CudaBackend
from penstock.kernels.state_runs import StateRuns
from penstock.kernels.triton_attention import PLACES, SEGMENT, Tiles
from penstock.kernels.triton_step import fill_step
from penstock.nn.adapters import Adapted
from penstock.nn.causal_lm import Attend
from penstock.nn.operations import (
    Activate,
    Embed,
    Gate,
    Linear,
    Norm,
    NormHeads,
    Regroup,
    Rotate,
    Scale,
)
from penstock.nn.operations import Attend as AttendOperation
from penstock.nn.paged import PagedAttend
from penstock.nn.program import Program
from penstock.nn.reference import ReferenceExecutor

__all__ = ["CapturedExecutor", "why_not_captured"]

_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024)
"""Numbers of tokens for which steps are captured; a step is padded to the next of these numbers."""

_SEGMENTS = (1, 4, 16, 64, 256)
"""Numbers of segments that the longest sequence of a captured step may have, rounded up likewise."""

_MOST = 4096
"""Upper limit of tokens times segments of a captured step: the memory that attention sets aside grows with both."""

_CAPTURABLE = (Embed, Norm, Linear, Activate, NormHeads, Rotate, AttendOperation, Gate, Scale, Regroup)


def why_not_captured(program: Program) -> str | None:
    """The reason, in words, why no step of a program is captured; None if small steps are."""
    if program.taps is not None:
        return "its hidden states are handed out"
    for operation in program.operations():
        if not isinstance(operation, _CAPTURABLE):
            return f"{type(operation).__name__} waits for the device"
        if isinstance(operation, AttendOperation):
            heads = operation.heads
            latent = operation.v is None and operation.k is not None
            reason = triton_attention.why_not(heads.dim, heads.queries // heads.keys, latent=latent)
            if reason is not None or operation.spec.looks_ahead:
                return reason or "tokens see later ones"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What a graph reads; `N` tokens, `M` entries of a block table.

    Attributes:
        token_ids: `[N]` int64.
        positions: `[N]` int64.
        write_slots: `[N]` int64, -1 for padding.
        tiles: one per token.
    """

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    tiles: Tiles

    @classmethod
    def of(cls, tokens: int, segments: int, block_size: int, device: torch.device) -> _Inputs:
        """Make inputs of this size, still without tokens."""
        numbers = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        places = torch.zeros(tokens, PLACES.value, dtype=torch.int32, device=device)
        table = torch.zeros(tokens, segments * SEGMENT // block_size, dtype=torch.int32, device=device)
        return cls(*numbers, Tiles(places, table, segments, 1))

    def fill(self, token_ids: Tensor, positions: Tensor, attend: PagedAttend) -> None:
        """Copy in a step of at most `N` tokens."""
        counts, rows = attend.q_start.diff(), None
        if len(counts) < len(token_ids):  # some rows have several tokens
            rows = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(token_ids.device)
        written = self.token_ids, self.positions, self.write_slots, self.tiles.places, self.tiles.table
        fill_step(token_ids, positions, attend.write_slots, attend.block_table, rows, written)


@dataclass(frozen=True, slots=True, eq=False)
class _TokenAttend:
    """An `Attend` in which each token is a tile of its own."""

    backend: CudaBackend
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    write_slots: Tensor
    tiles: Tiles

    def __call__(
        self,
        cache: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        keys, values = self.keys[cache], self.values[cache]
        if k is not None and v is not None:
            self.backend.write_kv(keys, values, k, v, self.write_slots)
        groups = q.shape[1] // keys.shape[2]
        tiles = Tiles(self.tiles.places, self.tiles.table, self.tiles.segments, groups)
        return self.backend.attend_tiles(q, keys, values, tiles, spec, sinks)

    def carried(self, state: int, spec: StateSpec, tokens: int) -> tuple[Tensor, StateRuns]:  # noqa: ARG002
        """See `Attend`."""
        raise AssertionError("recurrent state is not captured")


Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]]
"""Captures what a function does: returns its result, and a function that repeats the work into the same result."""


class _Graphs:
    """Captures CUDA graphs that share one memory pool: each graph is done before the next begins."""

    def __init__(self) -> None:
        self._memory: tuple[int, int] | None = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """See `Capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = work()
        self._memory = graph.pool()
        return out, graph.replay


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    """A graph, what it reads and writes, and the caches that it is for."""

    replay: Callable[[], object]
    inputs: _Inputs
    out: Tensor
    keys: Sequence[Tensor]


class CapturedExecutor:
    """A `CausalLM` on CUDA. Not thread-safe: a step's inputs and results have fixed places.

    Args:
        program: what to compute; `why_not_captured` must return None for it.
        dtype: dtype of the activations.
        backend: computes each operation.
        capture: captures graphs; None for CUDA's.
    """

    def __init__(
        self, program: Program, dtype: torch.dtype, backend: CudaBackend, capture: Capture | None = None
    ) -> None:
        self.program = program
        self._reference = ReferenceExecutor(program, dtype, backend)
        self._backend = backend
        self._captured: dict[tuple[int, int], _CapturedStep] = {}
        self._capture_graph = capture or _Graphs()

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self.program.shape

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,  # noqa: ARG002 - no captured program has any
    ) -> Tensor:
        """See `CausalLM.forward`."""
        size = None if adapted else self._size(len(token_ids), attend)
        if size is None:
            return self._reference.forward(token_ids, positions, attend, adapted)
        captured = self._captured.get(size)
        if captured is None or captured.keys is not attend.keys:
            return self._capture(size, token_ids, positions, attend)
        captured.inputs.fill(token_ids, positions, attend)
        captured.replay()
        return captured.out[: len(token_ids)].clone()

    def forward_given(self, given: Tensor, positions: Tensor, attend: Attend, taps: Tensor | None = None) -> Tensor:
        """See `CausalLM.forward_given`."""
        return self._reference.forward_given(given, positions, attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self._reference.logits(hidden)

    def _size(self, tokens: int, attend: Attend) -> tuple[int, int] | None:
        """Tokens and segments of the graph for a step; None if it is not captured."""
        if not isinstance(attend, PagedAttend) or SEGMENT % attend.keys[0].shape[1] or not tokens:
            return None
        needed = -(-int(attend.kv_len.max()) // SEGMENT)
        size = next((each for each in _SIZES if each >= tokens), 0)
        segments = next((each for each in _SEGMENTS if each >= needed), 0)
        return (size, segments) if 0 < size * segments <= _MOST else None

    def _capture(self, size: tuple[int, int], token_ids: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """Compute a step, and capture the graph for later steps of its size."""
        inputs = _Inputs.of(*size, attend.keys[0].shape[1], token_ids.device)
        inputs.fill(token_ids, positions, attend)
        step = _TokenAttend(self._backend, attend.keys, attend.values, inputs.write_slots, inputs.tiles)

        def work() -> Tensor:
            return self._reference.forward(inputs.token_ids, inputs.positions, step)

        computed = work()  # also compiles the kernels that it needs
        out, replay = self._capture_graph(work)
        self._captured[size] = _CapturedStep(replay, inputs, out, attend.keys)
        return computed[: len(token_ids)]
