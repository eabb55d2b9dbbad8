"""A rank other than rank 0: it computes what rank 0 orders, with its own share of weights, keys and values.

Knows neither scheduling nor sampling. When rank 0 is gone, it ends at once, even in the middle of a step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from penstock.contract.errors import ConfigError, SetupError
from penstock.exec.kv_store import KVStore
from penstock.exec.state_store import StateStore
from penstock.kernels.backend import Backend
from penstock.kernels.state_runs import StateRuns
from penstock.nn.causal_lm import CausalLM
from penstock.nn.paged import PagedAttend
from penstock.ranks import messages
from penstock.ranks.gloo_group import GlooGroup
from penstock.remote import Closed, Connection, ending_with

__all__ = ["Share", "follow"]


class Share(Protocol):
    """One rank's share of a model."""

    @property
    def model(self) -> CausalLM:
        """The share's model, which computes with the other ranks."""
        ...

    @property
    def backend(self) -> Backend:
        """The backend that it computes with."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights."""
        ...

    def kv_store(self, num_blocks: int, block_size: int) -> KVStore:
        """A KV store of these sizes."""
        ...

    def state_store(self, num_slots: int, checkpoints: int, spares: int = 0) -> StateStore | None:
        """Memory for recurrent state; None for a model without recurrent state."""
        ...


def follow(
    connection: Connection[messages.Order],
    load: Callable[[messages.Load, GlooGroup], Share],
) -> None:
    """Load a share and carry out orders until rank 0 is gone.

    Args:
        connection: the connection to rank 0.
        load: loads the share that the first order names, to compute in the group; raises SetupError.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, which ends rank 0 itself
        signal.signal(number, signal.SIG_IGN)
    try:
        with ending_with(connection):
            order = connection.receive()
            if not isinstance(order, messages.Load):
                raise Closed("the first order was not to load a share")
            group = GlooGroup(order.rank, order.config.tensor_parallel)
            try:
                share = load(order, group)
            except SetupError as error:
                option = error.option if isinstance(error, ConfigError) else ""
                connection.send(messages.Refused(option, str(error).removeprefix(f"{option}: ")))
                return
            connection.send(messages.Loaded(share.weight_bytes))
            follower = _Follower(share)
            while True:
                follower.carry_out(connection, group, connection.receive())
    except Closed:
        os._exit(0)  # as the watcher does


class _Follower:
    """Carries out orders on one share. Owned by `follow`."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._kv: dict[int, KVStore] = {}
        self._states: dict[int, StateStore] = {}

    def carry_out(self, connection: Connection[messages.Order], group: GlooGroup, order: messages.Order) -> None:
        """Carry out an order; an exception here ends the process, and with it the group."""
        match order:
            case messages.Join(file):
                group.join(Path(file))
                connection.send(messages.Joined())
            case messages.MakeKv(number, num_blocks, block_size):
                self._kv[number] = self._share.kv_store(num_blocks, block_size)
            case messages.MakeStates(number, slots, checkpoints, spares):
                states = self._share.state_store(slots, checkpoints, spares)
                assert states is not None, "a model without recurrent state was told to keep some"
                self._states[number] = states
            case messages.Drop(number):
                self._kv.pop(number, None)
                self._states.pop(number, None)
            case messages.CopyState(number, source, targets):
                self._states[number].copy_place(source, targets)
            case messages.Forward():
                with torch.inference_mode():
                    self._forward(order)
            case messages.Logits(hidden):
                with torch.inference_mode():
                    self._share.model.logits(hidden.tensor)
            case messages.Load():
                raise Closed("a share is loaded already")

    def _forward(self, order: messages.Forward) -> None:
        kv = self._kv[order.kv]
        attend = PagedAttend(
            kv.keys,
            kv.values,
            order.write_slots.tensor,
            order.q_start.tensor,
            order.kv_len.tensor,
            order.block_table.tensor,
            self._share.backend,
            self._states[order.states].states if order.runs else (),
            StateRuns(*(each.tensor for each in order.runs)) if order.runs else None,
        )
        self._share.model.forward(order.token_ids.tensor, order.positions.tensor, attend)
