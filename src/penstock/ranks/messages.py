"""What rank 0 tells the other ranks, as MessagePack: plain values, so that no message can inject code.

Tensors are sent as their bytes. Only `Load` and `Join` are answered; all orders are carried out in order, and a rank
that cannot carry one out ends.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from penstock.contract.config import EngineConfig

__all__ = [
    "Answer",
    "Array",
    "CopyState",
    "Drop",
    "Forward",
    "Join",
    "Joined",
    "Load",
    "Loaded",
    "Logits",
    "MakeKv",
    "MakeStates",
    "Order",
    "Refused",
]

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: the name of its dtype, its shape, and its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Array:
        """The message with a CPU tensor of one of these dtypes."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        flat = torch.empty(
            tensor.numel(), dtype=tensor.dtype
        )  # a single number may have any stride, even if contiguous
        flat.copy_(tensor.reshape(-1))
        data = flat.view(torch.uint8).numpy().tobytes()
        return cls(dtype, tuple(tensor.shape), data)

    @property
    def tensor(self) -> Tensor:
        """The tensor, with memory of its own."""
        if not self.data:
            return torch.empty(self.shape, dtype=_DTYPES[self.dtype])
        return torch.frombuffer(bytearray(self.data), dtype=_DTYPES[self.dtype]).view(self.shape)


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first order: load a share of a model. Answered by `Loaded` or `Refused`.

    Attributes:
        config: the operator's options; its `model` is the path of the model's files.
    """

    config: EngineConfig
    rank: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """Meet the other ranks through this file. Answered by `Joined`."""

    file: str


class MakeKv(msgspec.Struct, frozen=True, tag=True):
    """Make a KV store, and give it this number."""

    number: int
    num_blocks: int
    block_size: int


class MakeStates(msgspec.Struct, frozen=True, tag=True):
    """Make memory for recurrent states, and give it this number."""

    number: int
    slots: int
    checkpoints: int
    spares: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Free the store with this number."""

    number: int


class CopyState(msgspec.Struct, frozen=True, tag=True):
    """In the states with this number, copy what is in one place to others."""

    number: int
    source: int
    targets: tuple[int, ...]


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Compute a batch; the fields are those of `ForwardBatch` and `StateRuns`.

    Attributes:
        kv: number of the KV store.
        states: number of the states; -1 for a model without states.
        runs: the three fields of the step's `StateRuns`; () without states.
    """

    kv: int
    states: int
    token_ids: Array
    positions: Array
    write_slots: Array
    q_start: Array
    kv_len: Array
    block_table: Array
    runs: tuple[Array, ...] = ()


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Compute logits of these hidden states `[S, H]`."""

    hidden: Array


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The share is loaded.

    Attributes:
        weight_bytes: memory of its weights.
    """

    weight_bytes: int


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The rank has met the others."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The share cannot be loaded; the fields are those of `remote.messages.Refused`."""

    option: str
    message: str


Order = Load | Join | MakeKv | MakeStates | Drop | CopyState | Forward | Logits
Answer = Loaded | Joined | Refused
