"""Damaged files: each loads the same values or is refused with one clear error, quickly."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from mutations import COUNTS, SECONDS_FOR_EACH, check_mutations, load
from weights_samples import ARCHITECTURES, Tiny, config, weights, with_gguf_layout, write_directory, write_gguf

from penstock.contract.errors import ModelFileError
from penstock.models import gguf_dialect
from penstock.weights.files import open_model
from penstock.weights.gguf_header import read_gguf_header


@pytest.mark.parametrize("mutations", COUNTS)
def test_damaged_safetensors_headers_load_the_same_or_are_refused(tmp_path: Path, mutations: int) -> None:
    wanted = weights(Tiny())
    write_directory(tmp_path / "m", wanted, config(Tiny()))
    target = tmp_path / "m" / "model.safetensors"
    header_end = 8 + int.from_bytes(target.read_bytes()[:8], "little")
    check_mutations(tmp_path / "m", target, header_end, wanted, mutations)


@pytest.mark.parametrize("mutations", COUNTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_damaged_gguf_headers_load_the_same_or_are_refused(tmp_path: Path, architecture: str, mutations: int) -> None:
    tiny = with_gguf_layout(Tiny(architecture))
    wanted = weights(tiny)
    target = write_gguf(tmp_path / "tiny.gguf", tiny, wanted)
    check_mutations(target, target, read_gguf_header(target).data_start, wanted, mutations)


def test_damaged_weights_never_crash(tmp_path: Path) -> None:
    """The formats carry no checksums, so other numbers may come out (catalogue files are verified when pulled)."""
    wanted = weights(Tiny())
    target = write_gguf(tmp_path / "tiny.gguf", Tiny(), wanted, "Q4_1")
    original, start = target.read_bytes(), read_gguf_header(target).data_start
    random = np.random.default_rng(3)
    for _ in range(40):
        damaged = bytearray(original)
        for at in random.integers(start, len(damaged), 50):
            damaged[at] = int(random.integers(0, 256))
        target.write_bytes(damaged)
        loaded = load(target, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
        assert set(loaded) == set(wanted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"a": NaN',
        "\x00",
        '{"model_type": "llama"',
        "[" * 100_000,
        '{"a":' + "[" * 980 + "]" * 980 + "}",
    ],
)
def test_a_broken_config_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write_directory(tmp_path, {"a": torch.ones(1)}, {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json: (is not JSON|must be a JSON object)"):
        open_model(tmp_path, gguf_dialect)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def start(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: bytes = b"a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def alignment(value: int, kind: int = 4) -> bytes:
    return string(b"general.alignment") + struct.pack("<II", kind, value)


HUGE = (1 << 62, 1 << 60, (1 << 64) - 1)
GGUF_LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic: needs 4 bytes"),
    "magic": (start(magic=b"GGML"), "this is not a GGUF file"),
    "version": (start(version=1), "GGUF version 1 cannot be read"),
    "big-endian": (start(version=3 << 24), "big-endian"),
    **{f"tensor count {huge}": (start(tensors=huge) + bytes(64), f"announces {huge} items") for huge in HUGE},
    **{f"key count {huge}": (start(keys=huge) + bytes(64), f"announces {huge} items") for huge in HUGE},
    **{
        f"key length {huge}": (start(keys=1) + struct.pack("<Q", huge) + b"abc", f"a string of {huge} bytes")
        for huge in HUGE
    },
    "key beyond the end": (start(keys=1) + struct.pack("<Q", 100) + b"abc", "needs 100 bytes"),
    "key with a control character": (start(keys=1) + string(b"a\x1b[2Jb") + bytes(8), "metadata: .* is no name"),
    "endless tensor name": (start(tensors=1) + tensor(b"a" * 4000) + bytes(64), "tensors: .* is no name"),
    "value type": (start(keys=1) + string(b"k") + struct.pack("<I", 13), "k: unknown value type 13"),
    "nested array": (start(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "nested type 9"),
    **{
        f"array of {huge}": (start(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 0, huge), f"announces {huge} items")
        for huge in HUGE
    },
    "key is not utf-8": (start(keys=1) + string(b"\xff\xfe") + bytes(8), "is not UTF-8"),
    "key twice": (start(keys=2) + alignment(32) * 2, "general.alignment: appears twice"),
    **{f"alignment {bad}": (start(keys=1) + alignment(bad), "power of two") for bad in (0, 3, 33, 1 << 31)},
    "alignment is a float": (start(keys=1) + alignment(0, 6), "power of two"),
    "dimensions": (start(tensors=1) + tensor(dims=(1,) * 5) + bytes(64), "a: has 5 dimensions"),
    "no dimensions": (start(tensors=1) + tensor(dims=()) + bytes(64), "a: has 0 dimensions"),
    "product": (start(tensors=1) + tensor(dims=(1 << 40, 1 << 40)) + bytes(64), "a: needs .* beyond the end"),
    "product wraps": (start(tensors=1) + tensor(dims=(1 << 32, 1 << 32)) + bytes(64), "a: needs .* beyond the end"),
    "empty tensor": (start(tensors=1) + tensor(dims=(0,)) + bytes(64), "cannot be stored as F32"),
    "half a block": (start(tensors=1) + tensor(dims=(48,), kind=8) + bytes(64), "cannot be stored as Q8_0"),
    "type": (start(tensors=1) + tensor(kind=999) + bytes(64), "a: has type of unknown number 999"),
    "offset outside": (start(tensors=1) + tensor(offset=1 << 50) + bytes(64), "a: begins at"),
    "overlap": (start(tensors=2) + tensor() + tensor(b"b") + bytes(64), "b: begins at 0 of the data, expected 32"),
    "tensor twice": (start(tensors=2) + tensor() + tensor(offset=32) + bytes(64), "a: appears twice"),
    "cut short": (start(tensors=1) + tensor(dims=(64,)) + bytes(100), "a: needs 256 bytes, beyond the end"),
    "padding is not zero": (start(tensors=1) + tensor() + b"\x01" + bytes(63), "padding: the bytes between"),
    "bytes at the end": (start(tensors=1) + tensor() + bytes(200), "its tensors end at"),
}


@pytest.mark.parametrize("name", GGUF_LIES)
def test_a_lying_gguf_header_is_refused_at_once(tmp_path: Path, name: str) -> None:
    raw, message = GGUF_LIES[name]
    path = tmp_path / "lie.gguf"
    path.write_bytes(raw)
    started = time.process_time()
    with pytest.raises(ModelFileError, match=message):
        open_model(path, gguf_dialect)
    assert time.process_time() - started < SECONDS_FOR_EACH


def test_a_large_file_does_not_lend_credit_to_absurd_arrays(tmp_path: Path) -> None:
    """In a file of 64 GiB (sparse) an array of 2^35 bytes would fit; no header is allowed that many items."""
    path = tmp_path / "lie.gguf"
    with path.open("wb") as stream:
        stream.write(start(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 0, 1 << 35))
        stream.truncate(1 << 36)
    with pytest.raises(ModelFileError, match="k: announces 34359738368 items"):
        open_model(path, gguf_dialect)


def test_the_default_version_that_the_official_writer_uses_can_be_read() -> None:
    assert gguf.GGUF_VERSION in (2, 3)


@pytest.mark.parametrize("name", ["missing.gguf", "directory.gguf/x.gguf"])
def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=r"\.gguf: cannot be read: No such file"):
        open_model(tmp_path / name, gguf_dialect)


def test_a_directory_without_a_config_is_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, {"a": torch.ones(1)}, {})
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json: is missing; a model directory must have it$"):
        open_model(tmp_path, gguf_dialect)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelFileError, match=r"to use a \.gguf file in it, name the file"):
        open_model(tmp_path, gguf_dialect)


def test_a_broken_index_is_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, {"a": torch.ones(1)}, {})
    (tmp_path / "model.safetensors").unlink()
    for text in ("{", "[]", json.dumps({"weight_map": []})):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json: "):
            open_model(tmp_path, gguf_dialect)
