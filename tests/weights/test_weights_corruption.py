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
from mixed_gguf import Q4_K_M, part_path, write_mixed
from quantised_samples import compressed_config, floats, fp8, gptq, integers, nf4, pack_quantized
from weights_samples import ARCHITECTURES, Tiny, config, weights, with_gguf_layout, write_directory, write_gguf

from penstock.contract.errors import ModelFileError, SetupError
from penstock.models import gguf_dialect
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.gguf_header import read_gguf_header
from penstock.weights.packing import WeightFormat

SECONDS_FOR_EACH = 2.0
MUTATIONS = 400


def load(path: Path, wanted: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
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
    header_end: int,
    wanted: dict[str, torch.Tensor],
    mutations: int = MUTATIONS,
    folder: Path | None = None,
) -> None:
    """Damage `target` and load `path`; errors name it, or something in `folder`."""
    original = target.read_bytes()
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load(path, shapes).items())
    random = np.random.default_rng(20)
    messages: list[str] = []
    for number in range(mutations):
        target.write_bytes(mutate(original, header_end, random))
        started = time.process_time()
        try:
            loaded = load(path, shapes)
        except SetupError as error:
            messages.append(str(error))
        else:
            for name, tensor in loaded.items():
                assert torch.equal(tensor, wanted[name]), (number, name)
        assert time.process_time() - started < SECONDS_FOR_EACH, number
    assert len(messages) > mutations // 4
    for message in messages:
        assert str(folder or path) in message
        assert len(message) < 1000, message
        assert message.isprintable(), message


def test_damaged_safetensors_headers_load_the_same_or_are_refused(tmp_path: Path) -> None:
    wanted = weights(Tiny())
    write_directory(tmp_path / "m", wanted, config(Tiny()))
    target = tmp_path / "m" / "model.safetensors"
    header_end = 8 + int.from_bytes(target.read_bytes()[:8], "little")
    check_mutations(tmp_path / "m", target, header_end, wanted)


QUANTISED = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, lambda: gptq("a", integers(24, 64))),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda: nf4("a", 24, 64, nested=True)[0]),
    "packed": (compressed_config({}, format="pack-quantized"), lambda: pack_quantized("a", integers(24, 64))),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [8, 32]}, lambda: fp8("a", floats(24, 64, (8, 32)))),
}


@pytest.mark.parametrize("form", QUANTISED)
def test_damaged_headers_of_quantised_safetensors_load_the_same_or_are_refused(tmp_path: Path, form: str) -> None:
    section, stored = QUANTISED[form]
    write_directory(tmp_path / "m", stored(), {"model_type": "llama", "quantization_config": section})
    wanted = {"a.weight": open_model(tmp_path / "m", gguf_dialect).source.read("a.weight", torch.float32, "cpu")}
    target = tmp_path / "m" / "model.safetensors"
    header_end = 8 + int.from_bytes(target.read_bytes()[:8], "little")
    check_mutations(tmp_path / "m", target, header_end, wanted, mutations=150)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_damaged_gguf_headers_load_the_same_or_are_refused(tmp_path: Path, architecture: str) -> None:
    tiny = with_gguf_layout(Tiny(architecture))
    wanted = weights(tiny)
    target = write_gguf(tmp_path / "tiny.gguf", tiny, wanted)
    check_mutations(target, target, read_gguf_header(target).data_start, wanted)


def test_damaged_headers_of_mixed_kinds_load_the_same_or_are_refused(tmp_path: Path) -> None:
    target = write_mixed(tmp_path / "tiny.gguf", Q4_K_M)
    source = open_model(target, gguf_dialect).source
    wanted = {name: source.read(name, torch.float32, "cpu") for name in source.names()}
    check_mutations(target, target, read_gguf_header(target).data_start, wanted)


@pytest.mark.parametrize("part", [1, 2])
def test_damaged_headers_of_a_split_file_load_the_same_or_are_refused(tmp_path: Path, part: int) -> None:
    first = write_mixed(tmp_path / "tiny.gguf", Q4_K_M, parts=2)
    source = open_model(first, gguf_dialect).source
    wanted = {name: source.read(name, torch.float32, "cpu") for name in source.names()}
    target = part_path(tmp_path / "tiny.gguf", part, 2)
    check_mutations(first, target, read_gguf_header(target).data_start, wanted, mutations=100, folder=tmp_path)


def test_damaged_blocks_of_mixed_kinds_never_crash(tmp_path: Path) -> None:
    """Other numbers may come out, infinite ones too: then a product has them, or a scale is refused."""
    target = write_mixed(tmp_path / "tiny.gguf", Q4_K_M)
    original, start = target.read_bytes(), read_gguf_header(target).data_start
    random = np.random.default_rng(3)
    for _ in range(20):
        damaged = bytearray(original)
        for at in random.integers(start, len(damaged), 200):
            damaged[at] = int(random.integers(0, 256))
        target.write_bytes(damaged)
        source = open_model(target, gguf_dialect).source
        binder = Binder(source, torch.float32, "cpu", str(target), weight_format=WeightFormat.STORED)
        for name in sorted(source.names()):
            shape = source.shape(name)
            if len(shape) == 2:
                check_product(binder, name, shape)


def check_product(binder: Binder, name: str, shape: tuple[int, ...]) -> None:
    try:
        weight = binder.take_linear([(name, (shape[0], shape[1]))])
    except ModelFileError as refused:
        message = str(refused)
    else:
        message = name
        assert weight.matmul(None, torch.ones(1, shape[1])).shape == (1, shape[0])
    assert name in message


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
