from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from weights_samples import Tiny, config, shapes, weights, write_directory, write_gguf, write_shards

from penstock.contract.errors import ModelFileError
from penstock.contract.model import GgufVocabulary, HuggingFaceText
from penstock.models import gguf_dialect
from penstock.weights.bind import Binder
from penstock.weights.catalogue import CATALOGUE
from penstock.weights.files import open_model
from penstock.weights.gguf_file import open_gguf
from penstock.weights.row_parts import RowPart, RowParts
from penstock.weights.safetensors_files import open_safetensors
from penstock.weights.source import StoredBlocks, TensorSource


@pytest.fixture
def source(tmp_path: Path) -> TensorSource:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(9.0).view(3, 3) + 10, "c": torch.ones(4)}
    return open_safetensors(write_directory(tmp_path, tensors, {}))


def test_taking_everything_leaves_nothing(source: TensorSource) -> None:
    seen: list[int] = []
    binder = Binder(source, torch.bfloat16, "cpu", "m", seen.append)
    a = binder.take("a", (2, 3))
    assert a.dtype == torch.bfloat16
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    binder.take("b", (3, 3))
    binder.take("c", (4,))
    binder.finish()
    assert seen == [6, 9, 4]
    assert binder.bytes == 2 * 19


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(source: TensorSource) -> None:
    with pytest.raises(ModelFileError, match=r"m: d: the model needs this tensor, of shape \(2,\); there is none"):
        Binder(source, torch.float32, "cpu", "m").take("d", (2,))


def test_a_wrong_shape_names_both(source: TensorSource) -> None:
    with pytest.raises(ModelFileError, match=r"m: a: has shape \(2, 3\), but the model needs \(3, 2\)"):
        Binder(source, torch.float32, "cpu", "m").take("a", (3, 2))


def test_a_tensor_is_taken_once(source: TensorSource) -> None:
    binder = Binder(source, torch.float32, "cpu", "m")
    binder.take("a", (2, 3))
    with pytest.raises(ModelFileError, match="m: a: is taken twice"):
        binder.take("a", (2, 3))


def test_leftovers_are_refused_by_name_and_count(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.ones(1) for index in range(9)}
    binder = Binder(open_safetensors(write_directory(tmp_path, tensors, {})), torch.float32, "cpu", "m")
    binder.take("t0", (1,))
    with pytest.raises(ModelFileError, match=r"m: 8 tensors .* no place in the model: t1, t2, t3, t4, t5 and 3 more"):
        binder.finish()


def test_what_is_ignored_is_not_left_over_and_need_not_exist(source: TensorSource) -> None:
    binder = Binder(source, torch.float32, "cpu", "m")
    for name in ("a", "c", "no such buffer"):
        binder.ignore(name)
    assert binder.has("a")
    assert not binder.has("no such buffer")
    binder.take_fused([("b", (3, 3))])
    binder.finish()


def test_fusing_stacks_rows_in_order(source: TensorSource) -> None:
    binder = Binder(source, torch.float32, "cpu", "m")
    fused = binder.take_fused([("b", (3, 3)), ("a", (2, 3))])
    want = torch.cat((torch.arange(9.0).view(3, 3) + 10, torch.arange(6.0).view(2, 3)))
    assert torch.equal(fused, want)
    with pytest.raises(ModelFileError, match=r"m: \d+ tensors|m: 1 tensors"):
        binder.finish()


def test_fusing_checks_every_part_before_reading_any(source: TensorSource) -> None:
    seen: list[int] = []
    binder = Binder(source, torch.float32, "cpu", "m", seen.append)
    with pytest.raises(ModelFileError, match="m: d: the model needs"):
        binder.take_fused([("a", (2, 3)), ("d", (2, 3))])
    with pytest.raises(ValueError, match="must agree in all dimensions but the first"):
        binder.take_fused([("b", (3, 3)), ("c", (4,))])
    with pytest.raises(ValueError, match="must agree"):
        binder.take_fused([])
    assert seen == []


def test_fusing_reorders_gguf_rows_inside_their_part(tmp_path: Path) -> None:
    tensors = weights(Tiny())
    files = open_model(write_gguf(tmp_path / "tiny.gguf", Tiny(), tensors), gguf_dialect)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = Binder(files.source, torch.float32, "cpu", "m").take_fused(
        [(name, tuple(tensors[name].shape)) for name in names]
    )
    assert torch.equal(fused, torch.cat([tensors[name] for name in names]))


def test_a_directory_opens_with_its_name_text_and_sizes(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in weights(Tiny()).items()}
    tensors["buffer"] = torch.arange(10_000_000 // 8)
    files = open_model(write_directory(tmp_path / "My-Model", tensors, config(Tiny())), gguf_dialect)
    assert files.name == "My-Model"
    assert files.config == config(Tiny())
    assert files.text == HuggingFaceText(str(tmp_path / "My-Model"))
    assert files.stored_dtype == "bfloat16"
    assert files.num_weights == sum(tensor.numel() for tensor in tensors.values())
    assert files.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert len(files.digest) == 32


@pytest.mark.parametrize(
    ("quantisation", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "quantised")]
)
def test_a_gguf_file_opens_with_its_name_text_and_type(tmp_path: Path, quantisation: str, dtype: str) -> None:
    files = open_model(write_gguf(tmp_path / "Tiny-Model.gguf", Tiny(), weights(Tiny()), quantisation), gguf_dialect)
    assert files.name == "tiny-model"
    assert isinstance(files.text, GgufVocabulary)
    assert files.stored_dtype == dtype
    assert files.num_weights == sum(tensor.numel() for tensor in weights(Tiny()).values())


def test_a_catalogue_file_is_served_under_its_catalogue_name(tmp_path: Path) -> None:
    for entry in CATALOGUE.values():
        path = write_gguf(tmp_path / entry.file_name, Tiny(), weights(Tiny()))
        assert open_model(path, gguf_dialect).name == entry.name


def test_the_digest_names_contents_not_places_or_times(tmp_path: Path) -> None:
    first = write_directory(tmp_path / "a", weights(Tiny()), config(Tiny()))
    second = tmp_path / "b"
    shutil.copytree(first, second)
    os.utime(second / "model.safetensors", (1, 1))
    assert open_model(first, gguf_dialect).digest == open_model(second, gguf_dialect).digest


def test_the_digest_changes_with_settings_names_types_layout_and_weights(tmp_path: Path) -> None:
    tensors = weights(Tiny())
    variants = {
        "plain": (tensors, config(Tiny())),
        "settings": (tensors, config(Tiny()) | {"rope_theta": 1.0}),
        "names": ({name + "x": tensor for name, tensor in tensors.items()}, config(Tiny())),
        "type": ({name: tensor.half() for name, tensor in tensors.items()}, config(Tiny())),
        "weights": (weights(Tiny(), seed=1), config(Tiny())),
    }
    paths = [write_directory(tmp_path / name, *variant) for name, variant in variants.items()]
    digests = {open_model(path, gguf_dialect).digest for path in paths}
    shards = {"one.safetensors": tensors, "two.safetensors": {"x": torch.ones(1)}}
    digests.add(open_model(write_shards(tmp_path / "sharded", shards, config(Tiny())), gguf_dialect).digest)
    digests.add(open_model(write_gguf(tmp_path / "t.gguf", Tiny(), tensors), gguf_dialect).digest)
    assert len(digests) == 7


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    """A sparse file of 2 GiB opens at once."""
    path = write_directory(tmp_path, {"a": torch.ones(1, 4)}, {})
    file = path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[536870912],"data_offsets":[0,2147483648]}}'
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (2 << 30))
    started = time.process_time()
    assert open_model(path, gguf_dialect).num_bytes == 2 << 30
    assert time.process_time() - started < 1.0


def test_names_of_a_tied_model_have_no_head(tmp_path: Path) -> None:
    tiny = Tiny(tied=True)
    files = open_model(write_gguf(tmp_path / "t.gguf", tiny, weights(tiny)), gguf_dialect)
    assert files.config["tie_word_embeddings"] is True
    assert files.source.names() == set(shapes(tiny))


def test_rows_of_a_matrix_are_tensors_of_their_own(source: TensorSource) -> None:
    binder = Binder(source, torch.float32, "cpu", "m")
    rows = {"top": (torch.tensor([2, 0]), (2, 3)), "rest": (torch.tensor([1]), (1, 1, 3))}
    binder.split_rows("b", (3, 3), rows)
    assert binder.has("top")
    assert binder.packing_bytes == 4 * 9, "the whole is kept while its parts are read"
    assert binder.take("top", (2, 3)).tolist() == [[16, 17, 18], [10, 11, 12]]
    with pytest.raises(ModelFileError, match="m: b: is taken twice"):
        binder.take("b", (3, 3))
    with pytest.raises(ModelFileError, match=r"m: rest: has shape \(1, 1, 3\), but the model needs \(1, 3\)"):
        binder.take("rest", (1, 3))
    binder.ignore("a")
    binder.ignore("c")
    with pytest.raises(ModelFileError, match="no place in the model: rest"):
        binder.finish()
    stack = binder.take_stack(1, [("rest", (3, 1))], transposed=True)
    assert isinstance(stack, torch.Tensor)
    assert stack.tolist() == [[[13], [14], [15]]]
    binder.finish()


def test_rows_of_quantised_blocks_stay_blocks(tmp_path: Path) -> None:
    tiny = Tiny()
    tensors = weights(tiny)
    name = "model.layers.0.mlp.gate_proj.weight"
    source = open_gguf(write_gguf(tmp_path / "t.gguf", tiny, tensors, {"gate_proj": "Q8_0", "": "F32"}), gguf_dialect)
    count = source.shape(name)[0]
    order = torch.arange(count).flip(0)
    parts = RowParts(source)
    parts.parts["flipped"] = RowPart(name, order, source.shape(name))
    assert parts.stored_kind("flipped") == "Q8_0"
    assert torch.equal(parts.read_blocks("flipped").data, source.read_blocks(name).data.flip(0))
    parts.parts["halved"] = RowPart(name, order, (count * 2, source.shape(name)[1] // 2))
    with pytest.raises(ModelFileError, match="has parts that are no whole rows"):
        parts.read_blocks("halved")


def test_blocks_of_which_each_head_has_some_rows_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Tiny()
    name = "model.layers.0.mlp.gate_proj.weight"
    path = write_gguf(tmp_path / "t.gguf", tiny, weights(tiny), {"gate_proj": "Q8_0", "": "F32"})
    source = open_gguf(path, gguf_dialect)
    count, inputs = source.shape(name)
    parts, blocks, reads = RowParts(source), source.read_blocks(name), []
    parts.parts["heads"] = RowPart(name, torch.arange(count).flip(0), (4, count // 4, inputs))

    def read_once(of: str) -> StoredBlocks:
        reads.append(of)
        return blocks

    monkeypatch.setattr(source, "read_blocks", read_once)
    slices = [parts.read_slice_blocks("heads", head).data for head in range(4)]
    assert torch.equal(torch.cat(slices), blocks.data.flip(0))
    assert reads == [name]
