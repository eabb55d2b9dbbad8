"""Files with one random damage each: they load the same numbers or are refused with one clear error, quickly."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.contract.errors import SetupError
from penstock.models import gguf_dialect
from penstock.weights.bind import Binder
from penstock.weights.files import open_model

SECONDS_FOR_EACH = 2.0
COUNTS = [60, pytest.param(500, marks=pytest.mark.deep)]
"""Mutations of one file: a few in `make test`, and the promised number in `make test-deep`."""

Load = Callable[[Path, Mapping[str, tuple[int, ...]]], dict[str, torch.Tensor]]
"""From a path and the shapes that a model needs to the tensors."""


def load(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Load as an engine does: open, take every tensor the model needs, refuse leftovers."""
    files = open_model(path, gguf_dialect)
    binder = Binder(files.source, torch.float32, "cpu", str(path))
    loaded = {name: binder.take(name, shape) for name, shape in wanted.items()}
    binder.finish()
    return loaded


def mutate(original: bytes, header_end: int, random: np.random.Generator) -> bytes:
    """One random damage to the header (bit flips, edited bytes, a wild number) or to the length of the file."""
    damaged = bytearray(original)
    at = int(random.integers(0, header_end))
    kind = random.integers(0, 6)
    if kind == 0:
        damaged[at] ^= 1 << int(random.integers(0, 8))
    elif kind == 1:
        damaged[at] = int(random.integers(0, 256))
    elif kind == 2:
        at = min(at, header_end - 8)
        damaged[at : at + 8] = struct.pack("<Q", int(random.choice([0, 1, 1 << 31, 1 << 60, (1 << 63) - 1])))
    elif kind == 3:
        del damaged[int(random.integers(0, len(damaged))) :]
    elif kind == 4:
        del damaged[at : at + int(random.integers(1, 9))]
    else:
        damaged[at:at] = random.bytes(int(random.integers(1, 9)))
    return bytes(damaged)


def check_mutations(
    path: Path,
    target: Path,
    end: int,
    wanted: Mapping[str, torch.Tensor],
    mutations: int,
    *,
    folder: Path | None = None,
    load: Load = load,
) -> None:
    """Damage the first `end` bytes of `target`, or cut it, and load `path`.

    Args:
        path: of the model.
        target: one of its files.
        end: where damage ends.
        wanted: what the undamaged model loads.
        mutations: how many files are tried.
        folder: errors name something in it; by default they name `path`.
        load: what loads.
    """
    original = target.read_bytes()
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load(path, shapes).items())
    random = np.random.default_rng(mutations)
    messages: list[str] = []
    for number in range(mutations):
        damaged = mutate(original, end, random)
        target.write_bytes(damaged)
        started = time.process_time()
        try:
            loaded = load(path, shapes)
        except SetupError as error:
            messages.append(str(error))
        else:
            same = all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.items())
            assert same, (number, damaged[:end])
        assert time.process_time() - started < SECONDS_FOR_EACH, number
    target.write_bytes(original)
    assert len(messages) > mutations // 4
    for message in messages:
        check_message(message, folder or path)


def check_message(message: str, path: Path) -> None:
    """An error is one line of readable length that names the file."""
    assert str(path) in message
    assert len(message) < 1000, message
    assert message.isprintable(), message


def damage_bytes(original: bytes, start: int, random: np.random.Generator) -> bytes:
    """Some bytes from `start` on replaced: one, a few or many."""
    damaged = bytearray(original)
    for at in random.integers(start, len(damaged), int(random.choice([1, 4, 60]))):
        damaged[at] = int(random.integers(0, 256))
    return bytes(damaged)
