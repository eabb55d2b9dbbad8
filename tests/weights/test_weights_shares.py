"""Parts of stored matrices: the numbers and blocks that the whole has there."""

from __future__ import annotations

import pytest
import torch

from penstock.contract.errors import ModelFileError
from penstock.weights.divided_binder import DividedBinder
from penstock.weights.gguf_blocks import decode
from penstock.weights.gguf_header import READABLE_TYPES
from penstock.weights.packing import pack_blocks
from penstock.weights.shares import SharedTensors, block_inputs
from penstock.weights.source import StoredBlocks, TensorSource

KINDS = {kind.name: kind for kind in READABLE_TYPES.values()}
INPUTS = 1024
ROWS = (range(1, 3), range(6, 7))
COLUMNS = (range(256, 512), range(768, 1024))


class Stored(TensorSource):
    """Matrices of numbers, or of random blocks of one kind."""

    def __init__(self, numbers: dict[str, torch.Tensor] | None = None, kind: str = "", size: int = 0) -> None:
        self._numbers, self._kind = numbers or {}, kind
        self.data = torch.randint(256, (8, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        self.reads = 0

    def names(self):
        return frozenset(self._numbers or {"w"})

    def shape(self, name):
        return tuple(self._numbers[name].shape) if self._numbers else (8, INPUTS)

    def read_into(self, name, out):
        self.reads += 1
        out.copy_(self._numbers[name])

    def stored_kind(self, name):
        return self._kind

    def read_blocks(self, name):
        self.reads += 1
        return StoredBlocks(self._kind, self.data)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "Q4_K", "MXFP4"])
def test_blocks_of_a_part_hold_the_numbers_of_the_whole(kind):
    form = KINDS[kind]
    source = Stored(kind=kind, size=INPUTS // form.elements * form.bytes)
    source.data[:, :] = 60  # scales that are finite
    source.data[:, 5::7] = torch.arange(source.data[:, 5::7].shape[1], dtype=torch.uint8) % 50
    shares = SharedTensors(source)
    name = shares.part("w", ROWS, COLUMNS)
    assert shares.shape(name) == (3, 512)
    whole = decode(source.data.view(-1, form.bytes), form).view(8, INPUTS)
    part = shares.read_blocks(name)
    assert part.kind == kind
    wanted = whole[[1, 2, 6]][:, [*COLUMNS[0], *COLUMNS[1]]]
    assert torch.equal(decode(part.data.view(-1, form.bytes), form).view(3, 512), wanted)


def test_fp8_is_cut_with_its_scales():
    source = Stored(kind="FP8", size=4 * INPUTS // 128 + INPUTS)
    source.data[:, : 4 * INPUTS // 128] = torch.rand(8, INPUTS // 128).view(torch.uint8)
    source.data[:, 4 * INPUTS // 128 :] %= 100
    shares = SharedTensors(source)
    part = shares.read_blocks(shares.part("w", None, COLUMNS))
    units = [at // 128 for each in COLUMNS for at in each if at % 128 == 0]
    scales = source.data[:, : 4 * INPUTS // 128].view(8, -1, 4)[:, units].flatten(1)
    codes = source.data[:, 4 * INPUTS // 128 :][:, [*COLUMNS[0], *COLUMNS[1]]]
    assert torch.equal(part.data, torch.cat((scales, codes), dim=1))
    assert pack_blocks(part, 8, 512).inputs == 512


def test_a_block_is_never_cut():
    shares = SharedTensors(Stored(kind="Q4_K", size=INPUTS // 256 * 144))
    assert block_inputs("Q4_K") == 256
    with pytest.raises(ModelFileError, match="blocks of 256 inputs, which cannot be cut"):
        shares.read_blocks(shares.part("w", None, (range(128),)))


def test_parts_of_one_matrix_are_cut_from_one_reading():
    source = Stored({"w": torch.arange(32.0).view(8, 4)})
    shares = SharedTensors(source)
    for rows in (range(2), range(2, 8)):
        out = torch.empty(len(rows), 4)
        shares.read_into(shares.part("w", (rows,), None), out)
        assert torch.equal(out, torch.arange(32.0).view(8, 4)[rows.start : rows.stop])
    assert source.reads == 1
    shares.forget()
    shares.read_into(shares.part("w", (range(1),), None), torch.empty(1, 4))
    assert source.reads == 2


def test_interleaved_and_turned_experts_are_cut_where_they_lie():
    """gpt-oss: inputs first, and gates and ups in turns."""
    stack = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(5))  # [E, inputs, 2 * F]
    binder = DividedBinder(Stored({"experts": stack}), torch.float32, "cpu", "file")
    whole = binder.take_stack(3, [("experts", (16, 6))], transposed=True, alternates=True)
    own = binder.stack(whole, (range(2, 5), range(10, 13)), (range(1, 4),))
    gates, ups = stack.mT[:, ::2], stack.mT[:, 1::2]
    assert torch.equal(own, torch.cat((gates[:, 2:5], ups[:, 2:5]), dim=1)[:, :, 1:4])


def test_a_part_is_read_once_and_a_tied_head_is_the_table():
    source = Stored({"table": torch.randn(40, 4)})
    binder = DividedBinder(source, torch.float32, "cpu", "file")
    table = binder.take_table("table", (40, 4))
    binder.finish()
    assert binder.linear(table, (range(20),)) is binder.linear(table, (range(20),))
    assert (source.reads, binder.loaded.bytes) == (1, 20 * 4 * 4)
