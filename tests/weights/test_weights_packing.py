"""Weights in their packed forms: the same numbers, whichever way they took."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_checkpoints import cases, load_model, reference_logits, write_checkpoint
from weights_samples import Tiny, write_gguf
from weights_samples import weights as random_weights

from needs import COMPILED
from penstock import loading
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ModelFileError
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.fused_weight import FusedWeight
from penstock.kernels.packed_weight import PackedKind, PackedWeight, unpack
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.gguf_file import open_gguf
from penstock.weights.packing import WeightFormat
from penstock.weights.source import TensorSource

PROMPT = list(range(5, 45))
BACKEND = CpuBackend() if native.available() else TorchBackend()


class Held(TensorSource):
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def test_a_dense_weight_is_a_plain_tensor_and_a_packed_one_stands_for_nearly_the_same_numbers():
    weights = {"a": draw(40, 64), "b": draw(24, 64)}
    parts = [("a", (40, 64)), ("b", (24, 64))]
    stacked = torch.cat(list(weights.values()))
    dense = Binder(Held(weights), torch.float32, "cpu", "m").take_linear(parts)
    assert isinstance(dense, DenseWeight)
    assert torch.equal(dense.numbers, stacked)
    for dtype, fmt, most in (
        (torch.float32, WeightFormat.F32, 0),
        (torch.float32, WeightFormat.STORED, 0),
        (torch.bfloat16, WeightFormat.BF16, 0.02),
        (torch.bfloat16, WeightFormat.STORED, 0.02),
        (torch.bfloat16, WeightFormat.INT8, 0.02),
        (torch.bfloat16, WeightFormat.INT4, 0.25),
    ):
        binder = Binder(Held(weights), dtype, "cpu", "m", weight_format=fmt)
        packed = binder.take_linear(parts)
        binder.finish()
        assert isinstance(packed, PackedWeight)
        assert (unpack(packed) - stacked).abs().max() <= most
        assert binder.bytes == packed.nbytes


def test_a_transposed_weight_is_packed_outputs_first():
    weights = {"a": draw(64, 40)}
    packed = Binder(Held(weights), torch.bfloat16, "cpu", "m", weight_format=WeightFormat.BF16).take_linear(
        [("a", (40, 64))], transposed=True
    )
    assert torch.equal(unpack(packed), weights["a"].T.bfloat16().float())


def test_tables_are_kept_in_eight_bits_where_projections_have_four():
    binder = Binder(Held({"a": draw(64, 64)}), torch.bfloat16, "cpu", "m", weight_format=WeightFormat.INT4)
    assert binder.take_table("a", (64, 64)).kind is PackedKind.Q8


def test_a_projection_has_the_kind_of_its_format():
    for fmt, kind in (
        (WeightFormat.F32, PackedKind.F32),
        (WeightFormat.BF16, PackedKind.BF16),
        (WeightFormat.INT8, PackedKind.Q8),
        (WeightFormat.INT4, PackedKind.Q4),
    ):
        dtype = torch.float32 if fmt is WeightFormat.F32 else torch.bfloat16
        binder = Binder(Held({"a": draw(64, 64)}), dtype, "cpu", "m", weight_format=fmt)
        assert binder.take_linear([("a", (64, 64))]).kind is kind


def test_numbers_that_a_form_cannot_hold_are_named():
    weights = {"a": torch.full((16, 32), float("inf"))}
    with pytest.raises(ModelFileError, match="m: a"):
        Binder(Held(weights), torch.bfloat16, "cpu", "m", weight_format=WeightFormat.INT8).take_linear(
            [("a", (16, 32))]
        )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "variant"), cases())
def test_every_family_computes_on_packed_float32_weights_what_transformers_does(tmp_path, family, variant):
    directory = write_checkpoint(tmp_path, family, variant)
    files = open_model(directory, gguf_dialect)
    program = load(files.config, Binder(files.source, torch.float32, "cpu", "m", weight_format=WeightFormat.F32), "m")
    model = ReferenceExecutor(program, torch.float32, BACKEND)
    prompt = [token % model.shape.vocab_size for token in PROMPT]
    with torch.inference_mode():
        ours = model.logits(model.forward(torch.tensor(prompt), torch.arange(len(prompt)), DenseAttention()))
    theirs = reference_logits(directory, prompt)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "variant"), cases())
def test_every_family_computes_on_packed_weights_what_transformers_does_in_bfloat16(tmp_path, family, variant):
    """Squared error against float32 at most twice that of transformers' own bfloat16: roundings, no mistakes."""
    directory = write_checkpoint(tmp_path, family, variant)
    files = open_model(directory, gguf_dialect)
    binder = Binder(files.source, torch.bfloat16, "cpu", str(directory), weight_format=WeightFormat.BF16)
    model = ReferenceExecutor(load(files.config, binder, str(directory)), torch.bfloat16, BACKEND)
    prompt = [token % model.shape.vocab_size for token in PROMPT]
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), DenseAttention())
        ours = model.logits(hidden)
    exact = reference_logits(directory, prompt)
    theirs = reference_logits(directory, prompt, torch.bfloat16)
    assert (ours - exact).square().mean() <= 2 * (theirs - exact).square().mean()


@pytest.mark.model
def test_the_default_files_blocks_are_packed_without_changing_a_number(default_model: Path):
    source = open_gguf(default_model, gguf_dialect)
    binder = Binder(source, torch.bfloat16, "cpu", "m", weight_format=WeightFormat.STORED)
    plain = Binder(source, torch.float32, "cpu", "m")
    for name, shape in (
        ("model.layers.3.self_attn.q_proj.weight", (576, 576)),  # rows are put in another order
        ("model.layers.3.self_attn.k_proj.weight", (192, 576)),
        ("model.layers.0.mlp.down_proj.weight", (576, 1536)),
    ):
        packed = binder.take_linear([(name, shape)])
        assert packed.kind is PackedKind.Q4
        assert torch.equal(unpack(packed), plain.take(name, shape))
    table = binder.take_table("model.embed_tokens.weight", (49152, 576))
    assert table.kind is PackedKind.Q8


@pytest.mark.model
def test_blocks_are_those_that_the_official_reader_sees(default_model: Path):
    [theirs] = [t for t in gguf.GGUFReader(default_model).tensors if t.name == "blk.5.ffn_up.weight"]
    ours = open_gguf(default_model, gguf_dialect).read_blocks("model.layers.5.mlp.up_proj.weight")
    assert ours.kind == theirs.tensor_type.name
    assert np.array_equal(ours.data.numpy().ravel(), np.asarray(theirs.data).ravel())


def test_forms_are_named_as_they_are_kept(tmp_path):
    weights = {"a": draw(64, 64), "b": draw(64, 64)}
    for dtype, fmt, forms in (
        (torch.float32, WeightFormat.DENSE, ["float32"]),
        (torch.float32, WeightFormat.F32, ["float32"]),
        (torch.float32, WeightFormat.STORED, ["float32"]),
        (torch.bfloat16, WeightFormat.BF16, ["bfloat16"]),
        (torch.bfloat16, WeightFormat.INT8, ["int8"]),
        (torch.bfloat16, WeightFormat.INT4, ["int4", "int8"]),
    ):
        binder = Binder(Held(weights), dtype, "cpu", "m", weight_format=fmt)
        binder.take_linear([("a", (64, 64))])
        binder.take_table("b", (64, 64))
        assert list(binder.formats) == forms


@pytest.mark.parametrize(
    ("variant", "table", "head"),
    [("wide_heads_untied", PackedKind.Q8, PackedKind.Q4), ("one_to_one_tied_linear", PackedKind.Q8, PackedKind.Q8)],
)
def test_int4_keeps_a_table_in_int8_and_a_head_only_where_it_is_the_table(tmp_path, variant, table, head):
    files = open_model(write_checkpoint(tmp_path, "llama", variant), gguf_dialect)
    program = load(files.config, Binder(files.source, torch.bfloat16, "cpu", "m", weight_format=WeightFormat.INT4), "m")
    (embed,) = program.embedding
    assert (embed.table.kind, program.head.weight.kind) == (table, head)
    assert (embed.table is program.head.weight) == (head is table)


def test_fused_parts_of_different_kinds_keep_their_own_forms(tmp_path):
    kinds = {"": "Q4_0", ".k_proj.": "Q8_0", "1.mlp.up_proj.": "F32", ".down_proj.": "Q8_0"}
    path = write_gguf(tmp_path / "mixed.gguf", Tiny(), random_weights(Tiny()), kinds)
    source = open_gguf(path, gguf_dialect)
    binder = Binder(source, torch.bfloat16, "cpu", "m", weight_format=WeightFormat.STORED)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.1.mlp."
    qkv = [(f"{attention}q_proj.weight", (64, 64)), (f"{attention}k_proj.weight", (32, 64))]
    up = [(f"{mlp}gate_proj.weight", (96, 64)), (f"{mlp}up_proj.weight", (96, 64))]
    plain = Binder(source, torch.float32, "cpu", "m")
    for parts, second in ((qkv, PackedKind.Q8), (up, PackedKind.BF16)):
        fused = binder.take_linear(parts)
        assert isinstance(fused, FusedWeight)
        assert [part.kind for part in fused.parts] == [PackedKind.Q4, second]
        assert (fused.outputs, fused.inputs) == (sum(rows for _, (rows, _) in parts), 64)
        assert fused.nbytes == sum(part.nbytes for part in fused.parts)
        for part, (name, shape) in zip(fused.parts, parts, strict=True):
            numbers = plain.take(name, shape)
            assert torch.equal(unpack(part), numbers.bfloat16().float() if part.kind is PackedKind.BF16 else numbers)
    assert list(binder.formats) == ["Q4_0", "Q8_0", "bfloat16"]
    assert not binder.mixed


def test_a_product_by_parts_is_those_of_the_parts(tmp_path):
    kinds = {"": "Q4_0", ".k_proj.": "Q8_0"}
    path = write_gguf(tmp_path / "mixed.gguf", Tiny(), random_weights(Tiny()), kinds)
    binder = Binder(open_gguf(path, gguf_dialect), torch.bfloat16, "cpu", "m", weight_format=WeightFormat.STORED)
    attention = "model.layers.0.self_attn."
    fused = binder.take_linear(
        [(f"{attention}{part}_proj.weight", (rows, 64)) for part, rows in (("q", 64), ("k", 32))]
    )
    x, bias, residual = draw(3, 64), draw(96), draw(3, 96)
    for arguments in ((None, None), (bias, residual)):
        got = fused.matmul(None, x, *arguments)
        for part, columns in zip(fused.parts, (slice(0, 64), slice(64, 96)), strict=True):
            own = [None, None] if arguments[0] is None else [bias[columns], residual[:, columns]]
            assert torch.equal(got[:, columns], part.matmul(None, x, *own))
    with pytest.raises(ValueError, match="no table of rows"):
        fused.rows(None, torch.tensor([0]), torch.float32)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_file_of_mixed_kinds_keeps_each_and_rounds_none(tmp_path):
    kinds = {"": "Q4_0", ".k_proj.": "Q8_0", "1.mlp.up_proj.": "Q5_1"}
    path = write_gguf(tmp_path / "mixed.gguf", Tiny(), random_weights(Tiny()), kinds)
    said: list[str] = []
    loaded = loading.load_model(EngineConfig(model=str(path), threads=1), open_model(path, gguf_dialect), said.append)
    assert not [line for line in said if line.startswith("rounded")]
    assert loaded.weight_formats == "Q4_0, Q5_1, Q8_0 as in the file"


def test_plain_tensors_have_no_blocks(tmp_path):
    directory = write_checkpoint(tmp_path, "llama", "wide_heads_untied")
    source = open_model(directory, gguf_dialect).source
    assert source.stored_kind("lm_head.weight") == ""
    with pytest.raises(ModelFileError):
        source.read_blocks("lm_head.weight")
    assert load_model(directory).shape.vocab_size == 101
