"""What steps need besides weights and caches: registers, the head's logits, what is made of them, and angles."""

from __future__ import annotations

import torch

from penstock.nn.lowering import lower_layers
from penstock.nn.operations import Rotate
from penstock.nn.program import Program
from penstock.nn.register_places import place_registers
from penstock.nn.rope import RotaryTable

__all__ = ["rotary_tables", "step_bytes", "table_bytes"]

_STREAMS = 4
"""Rows of the model's width, float32, for each token: embeddings, the stream, what the head reads, quantised inputs."""

_LOGITS = 5
"""Rows of the vocabulary's width, float32, for each sample: logits, sorted ones, their order, probabilities, masks."""


def step_bytes(program: Program, dtype: torch.dtype, tokens: int, samples: int) -> int:
    """About how much memory a step takes while it runs.

    Args:
        program: the model.
        dtype: of queries, keys and values.
        tokens: of the step.
        samples: how many of them the head computes logits for.
    """
    operations = [operation for layer in lower_layers(program) for operation in layer]
    registers = sum(place_registers(operations, dtype, program.inputs).area_bytes)
    registers += sum(each.width for each in program.inputs) * torch.float32.itemsize
    streams = _STREAMS * program.shape.hidden_size * torch.float32.itemsize
    logits = _LOGITS * program.shape.vocab_size * torch.float32.itemsize
    return tokens * (registers + streams) + samples * logits


def rotary_tables(program: Program) -> tuple[RotaryTable, ...]:
    """The tables of angles that its layers share."""
    return tuple({id(each.table): each.table for each in program.operations() if isinstance(each, Rotate)}.values())


def table_bytes(program: Program, positions: int) -> int:
    """How much memory tables of angles take once a sequence is so long."""
    return sum(table.nbytes(positions) for table in rotary_tables(program))
