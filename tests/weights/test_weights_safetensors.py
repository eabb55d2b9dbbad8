from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from weights_samples import Tiny, config, weights, write_directory, write_shards

from penstock.contract.errors import ModelFileError
from penstock.weights.safetensors_files import open_safetensors, read_header


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_type_reads_as_torch_converts_it(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {"a": torch.randn(7, 33).to(stored), "scalar": torch.tensor(1.5, dtype=stored)}
    tensors["empty"] = torch.empty(0, 4, dtype=stored)
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    assert source.names() == set(tensors)
    for name, tensor in tensors.items():
        got = source.read(name, wanted, "cpu")
        assert got.dtype == wanted
        assert got.is_contiguous()
        assert torch.equal(got, tensor.to(wanted))


def test_a_tensor_larger_than_a_piece_is_converted_whole(tmp_path: Path) -> None:
    tensor = torch.randn(3, 1 << 19)
    save_file({"pad": torch.zeros(1), "big": tensor}, tmp_path / "model.safetensors")
    assert torch.equal(open_safetensors(tmp_path).read("big", torch.bfloat16, "cpu"), tensor.bfloat16())


def test_what_was_read_does_not_depend_on_the_file_any_more(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    got = open_safetensors(tmp_path).read("a", torch.float32, "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    assert torch.equal(got, torch.ones(1000))


def test_a_file_cut_short_after_opening_is_an_error_naming_the_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelFileError, match="a: the file ends 4000 bytes too early"):
        source.read("a", torch.float32, "cpu")


def test_a_number_beyond_the_wanted_range_is_refused_not_made_infinite(tmp_path: Path) -> None:
    save_file({"big": torch.tensor([1.0, 70000.0]), "inf": torch.tensor([torch.inf])}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    with pytest.raises(ModelFileError, match=r"big: .*70000.*float16"):
        source.read("big", torch.float16, "cpu")
    assert torch.isinf(source.read("inf", torch.float16, "cpu")).all()
    assert source.read("big", torch.bfloat16, "cpu")[0] == 1.0


def test_integer_buffers_are_listed_but_refused_as_weights(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(4), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    assert source.shape("ids") == (4,)
    with pytest.raises(ModelFileError, match="ids: has type I64"):
        source.read("ids", torch.float32, "cpu")


def test_missing_names_and_wrong_shapes_name_the_tensor(tmp_path: Path) -> None:
    source = open_safetensors(write_directory(tmp_path, {"a": torch.ones(2, 3)}, {}))
    with pytest.raises(ModelFileError, match="b: the checkpoint has no such tensor"):
        source.shape("b")
    with pytest.raises(ModelFileError, match=r"a: has shape \(2, 3\), expected \(3, 2\)"):
        source.read_into("a", torch.empty(3, 2))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = weights(Tiny())
    names = sorted(tensors)
    half = len(names) // 2
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:half]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[half:]},
    }
    source = open_safetensors(write_shards(tmp_path, shards, config(Tiny())))
    assert source.names() == set(tensors)
    assert all(torch.equal(source.read(name, torch.float32, "cpu"), tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "model.bin", "", 3, None, ["x"]]
)
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, shard: object) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match=r"weight_map\.a: .* is not a file name in this directory"):
        open_safetensors(inner)


def test_an_index_that_lies_about_shards_is_refused(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(1)}, {"b": torch.ones(1)}
    write_shards(tmp_path, {"one.safetensors": one, "two.safetensors": two}, {})
    index = tmp_path / "model.safetensors.index.json"
    files = {"a": "one.safetensors", "b": "two.safetensors"}
    for wrong, message in (
        (files | {"c": "one.safetensors"}, "weight_map.c: one.safetensors has no such tensor"),
        (files | {"a": "two.safetensors", "b": "one.safetensors"}, "weight_map.a: two.safetensors has no such tensor"),
        (files | {"c": "three.safetensors"}, "three.safetensors: cannot be read"),
        ({}, "weight_map: must be an object"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ModelFileError, match=message):
            open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"one.safetensors": {"a": torch.ones(1)}, "two.safetensors": {"b": torch.ones(1)}}, {})
    save_file({"b": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelFileError, match=r"two.safetensors: a: is also in one.safetensors"):
        open_safetensors(tmp_path)


def test_a_directory_of_pickles_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin: holds Python pickles.*convert"):
        open_safetensors(tmp_path)


def test_a_directory_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        open_safetensors(tmp_path)


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DEEP = "[" * 100_000
LIES = {
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "b: overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "b: leaves a hole"),
    "hole at the start": ({"a": entry(offsets=[4, 12])}, 12, "a: leaves a hole"),
    "bytes at the end": ({"a": entry()}, 12, "its tensors end at"),
    "outside": ({"a": entry(shape=[1 << 40], offsets=[0, 1 << 42])}, 8, "a: ends at byte"),
    "product overflow": ({"a": entry(shape=[1 << 40, 1 << 40])}, 8, "a: shape .* does not fill its 8 bytes"),
    "product wraps to the size": ({"a": entry(shape=[1 << 62, 4, 2])}, 8, "does not fill"),
    "size beyond 64 bits": ({"a": entry(shape=[1 << 64])}, 8, "shape must be a list"),
    "negative size": ({"a": entry(shape=[-2])}, 8, "shape must be a list"),
    "fractional size": ({"a": entry(shape=[2.0])}, 8, "shape must be a list"),
    "boolean size": ({"a": entry(shape=[True, 2])}, 8, "shape must be a list"),
    "many dimensions": ({"a": entry(shape=[1] * 40 + [2])}, 8, "at most 16 sizes"),
    "shape is no list": ({"a": entry(shape="2")}, 8, "shape must be a list"),
    "falling offsets": ({"a": entry(offsets=[8, 0])}, 8, "two rising positions"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, 8, "two rising positions"),
    "unknown dtype": ({"a": entry(dtype="F33")}, 8, "unknown dtype 'F33'"),
    "dtype is no string": ({"a": entry(dtype=7)}, 8, "unknown dtype 7"),
    "extra field": ({"a": entry() | {"x": 1}}, 8, "must have exactly"),
    "no field": ({"a": {}}, 8, "must have exactly"),
    "entry is no object": ({"a": 1}, 8, "must have exactly"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, 8, "must map strings"),
    "top level": ([1], 8, "must be a JSON object, got list"),
    "no json": (b"{nope", 8, "is not JSON"),
    "no utf-8": (b'{"\xff": 1}', 8, "is not JSON"),
    "deep": (DEEP.encode(), 8, "is not JSON"),
    "huge integer": (b'{"a": ' + b"9" * 10_000 + b"}", 8, "is not JSON"),
    "control character": ({"a\n": entry()}, 8, "is no name"),
    "endless name": ({"a" * 9999: entry()}, 8, "is no name"),
    "twice": (b'{"a": 1, "a": 2}', 8, "'a' appears twice"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_header_is_refused(tmp_path: Path, name: str) -> None:
    header, data, message = LIES[name]
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    with pytest.raises(ModelFileError, match=message):
        read_header(path)


@pytest.mark.parametrize("length", [1, 100, 100_000_001, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_lying_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length))
    with pytest.raises(ModelFileError, match="header length"):
        read_header(path)


def test_the_formats_own_bound_on_headers_holds_for_files_that_have_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(100_000_100)
    with pytest.raises(ModelFileError, match="above the format's 100000000"):
        read_header(path)


@pytest.mark.parametrize("size", range(9))
def test_a_file_shorter_than_a_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10" * size)
    with pytest.raises(ModelFileError):
        read_header(path)


def test_whatever_the_official_library_refuses_is_refused(tmp_path: Path) -> None:
    """Our rules must be at least as strict as the reference implementation's on randomly edited offsets and shapes."""
    path = tmp_path / "model.safetensors"
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(200):
        edges = sorted(int(edge) * 4 for edge in random.integers(0, 6, 2))
        header = {"a": entry(shape=[2], offsets=[0, 8]), "b": entry(shape=[int(random.integers(0, 4))], offsets=edges)}
        raw = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(int(random.integers(2, 6)) * 4))
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            refused += 1
            with pytest.raises(ModelFileError):
                read_header(path)
        else:
            assert set(read_header(path)) == {"a", "b"}
    assert 20 < refused < 200
