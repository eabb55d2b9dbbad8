"""Memory that steps need besides weights and caches: registers, logits, sampling buffers and rotary tables."""

from __future__ import annotations

import torch

from penstock.nn.lowering import lower_layers
from penstock.nn.operations import Rotate
from penstock.nn.program import Program
from penstock.nn.register_places import place_registers
from penstock.nn.rope import RotaryTable

__all__ = ["rotary_tables", "step_bytes", "table_bytes"]

_STREAMS = 4
"""Float32 rows of the model's width per token: embeddings, the stream, the head's input, quantised inputs."""

_LOGITS = 5
"""Float32 rows of the vocabulary's width per sample: logits, sorted logits, their order, probabilities, masks."""


def step_bytes(program: Program, dtype: torch.dtype, tokens: int, samples: int) -> int:
    """Estimate the working memory of a step, in bytes.

    Args:
        program: the model.
        dtype: dtype of queries, keys and values.
        tokens: number of tokens in the step.
        samples: number of tokens for which the head computes logits.
    """
    operations = [operation for layer in lower_layers(program) for operation in layer]
    registers = sum(place_registers(operations, dtype, program.inputs).area_bytes)
    registers += sum(each.width for each in program.inputs) * torch.float32.itemsize
    streams = _STREAMS * program.shape.hidden_size * torch.float32.itemsize
    logits = _LOGITS * program.shape.vocab_size * torch.float32.itemsize
    return tokens * (registers + streams) + samples * logits


def rotary_tables(program: Program) -> tuple[RotaryTable, ...]:
    """The distinct rotary tables of a program, which its layers share."""
    return tuple({id(each.table): each.table for each in program.operations() if isinstance(each, Rotate)}.values())


def table_bytes(program: Program, positions: int) -> int:
    """Memory of the rotary tables, in bytes, once the longest sequence has `positions` positions."""
    return sum(table.nbytes(positions) for table in rotary_tables(program))
