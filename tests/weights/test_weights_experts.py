"""Experts in files: however they are stored, the same stacks come of them, one expert read at a time."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.contract.errors import ModelFileError
from penstock.kernels.experts import StackedWeight
from penstock.kernels.packed_stack import FusedStack, PackedStack
from penstock.kernels.packed_weight import (
    PackedKind,
    PackedWeight,
    pack_bf16,
    pack_f32,
    pack_q4_0,
    quantize_int4,
    quantize_int8,
    unpack,
)
from penstock.nn.experts import bind_experts
from penstock.weights.bind import Binder
from penstock.weights.gguf_dialect import Arrangement
from penstock.weights.gguf_encode import encode
from penstock.weights.gguf_file import GgufSource
from penstock.weights.gguf_header import read_gguf_header
from penstock.weights.packing import WeightFormat
from penstock.weights.safetensors_files import SafetensorsSource, read_header
from penstock.weights.source import TensorSource

E, H, F = 3, 64, 32
NAME = "model.layers.0.mlp.experts"


def draw(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GATE, UP, DOWN = draw(E, F, H), draw(E, F, H, seed=8), draw(E, H, F, seed=9)
GATE_UP = torch.cat((GATE, UP), dim=1)


def of_each(gate: str, up: str, down: str) -> dict[str, torch.Tensor]:
    parts = {gate: GATE, up: UP, down: DOWN}
    return {f"{NAME}.{e}.{part}.weight": parts[part][e].clone() for e in range(E) for part in parts}


STORED = {
    "each": of_each("gate_proj", "up_proj", "down_proj"),
    "mixtral": of_each("w1", "w3", "w2"),
    "all": {f"{NAME}.{part}.weight": w for part, w in {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}.items()},
    "joined": {f"{NAME}.gate_up_proj": GATE_UP, f"{NAME}.down_proj": DOWN},
}
PACK = {
    (WeightFormat.F32, torch.float32): pack_f32,
    (WeightFormat.BF16, torch.bfloat16): pack_bf16,
    (WeightFormat.STORED, torch.float32): pack_f32,
    (WeightFormat.STORED, torch.bfloat16): pack_bf16,
    (WeightFormat.INT8, torch.bfloat16): quantize_int8,
    (WeightFormat.INT4, torch.bfloat16): quantize_int4,
}


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


def in_file(path: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsSource:
    save_file(tensors, path / "model.safetensors")
    return SafetensorsSource(read_header(path / "model.safetensors"), "m")


def in_gguf(path: Path, kinds: dict[str, str], *, arrangement: Arrangement = Arrangement.SAME) -> GgufSource:
    """The experts as llama.cpp's conversion stores them, in these kinds; under the names of "all"."""
    writer = gguf.GGUFWriter(path / "m.gguf", "llama")
    for part, weight in {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}.items():
        kind = gguf.GGMLQuantizationType[kinds[part]]
        stored = f"blk.0.ffn_{part.removesuffix('_proj')}_exps.weight"
        writer.add_tensor(stored, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    header = read_gguf_header(path / "m.gguf")
    names = {part: f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    return GgufSource(
        header, {}, {f"{NAME}.{part}_proj.weight": (header.tensors[name], arrangement) for part, name in names.items()}
    )


def bind(source: TensorSource, dtype: torch.dtype, fmt: WeightFormat) -> tuple[Binder, StackedWeight, StackedWeight]:
    binder = Binder(source, dtype, "cpu", "m", weight_format=fmt)
    stack = bind_experts(binder, NAME, experts=E, hidden=H, intermediate=F)
    binder.finish()
    assert binder.bytes == stack.nbytes
    return binder, stack.gate_up, stack.down


def same(stack: StackedWeight, weights: list[PackedWeight]) -> bool:
    assert isinstance(stack, PackedStack)
    return all(torch.equal(stack[e].data, weight.data) for e, weight in enumerate(weights))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("fmt", "dtype"), PACK)
def test_each_expert_is_packed_as_it_is_alone_however_it_is_stored(tmp_path, stored, fmt, dtype):
    pack = PACK[fmt, dtype]
    for source in (in_file(tmp_path, STORED[stored]), Held(STORED[stored])):
        binder, gate_up, down = bind(source, dtype, fmt)
        assert same(gate_up, [pack(weight) for weight in GATE_UP])
        assert same(down, [pack(weight) for weight in DOWN])
        form = fmt.value if fmt in (WeightFormat.INT8, WeightFormat.INT4) else str(dtype).removeprefix("torch.")
        assert list(binder.formats) == [form]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_stacks_are_plain_tensors(tmp_path, stored, dtype):
    _, gate_up, down = bind(in_file(tmp_path, STORED[stored]), dtype, WeightFormat.DENSE)
    assert torch.equal(gate_up, GATE_UP.to(dtype))
    assert torch.equal(down, DOWN.to(dtype))


@pytest.mark.parametrize("stored", ["safetensors", "memory"])
@pytest.mark.parametrize(("fmt", "dtype"), [(WeightFormat.DENSE, torch.float32), (WeightFormat.INT8, torch.bfloat16)])
def test_experts_may_lie_inputs_first_with_gates_and_ups_in_turn(tmp_path, stored, fmt, dtype):
    """As gpt-oss stores them."""
    turns = torch.stack((GATE, UP), dim=2).flatten(1, 2)  # [E, 2 * F, H]: a gate, its up, and so on
    tensors = {"gate_up": turns.mT.contiguous(), "down": DOWN.mT.contiguous(), "rows": turns}
    source = in_file(tmp_path, tensors) if stored == "safetensors" else Held(tensors)
    binder = Binder(source, dtype, "cpu", "m", weight_format=fmt)
    stacks = (
        binder.take_stack(E, [("gate_up", (2 * F, H))], transposed=True, alternates=True),
        binder.take_stack(E, [("rows", (2 * F, H))], alternates=True),
        binder.take_stack(E, [("down", (H, F))], transposed=True),
    )
    binder.finish()
    for stack, wanted in zip(stacks, (GATE_UP, GATE_UP, DOWN), strict=True):
        if fmt is WeightFormat.DENSE:
            assert torch.equal(stack, wanted)
        else:
            assert same(stack, [quantize_int8(weight) for weight in wanted])
    with pytest.raises(ModelFileError, match=r"gate_up: has shape \(3, 64, 64\), but the model needs \(3, 32, 64\)"):
        Binder(source, dtype, "cpu", "m").take_stack(E, [("gate_up", (H, F))], transposed=True)


def test_progress_counts_every_number_once(tmp_path):
    for stored in ("each", "joined"):
        seen: list[int] = []
        binder = Binder(
            in_file(tmp_path, STORED[stored]),
            torch.bfloat16,
            "cpu",
            "m",
            progress=seen.append,
            weight_format=WeightFormat.INT8,
        )
        bind_experts(binder, NAME, experts=E, hidden=H, intermediate=F)
        assert sum(seen) == GATE_UP.numel() + DOWN.numel()


def through_gguf(weight: torch.Tensor, kind: str) -> torch.Tensor:
    form = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), form), form))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_experts_of_a_gguf_file_have_its_numbers(tmp_path, kind):
    source = in_gguf(tmp_path, dict.fromkeys(("gate_proj", "up_proj", "down_proj"), kind))
    gate, up, down = (through_gguf(weight, kind) for weight in (GATE, UP, DOWN))
    _, plain, _ = bind(source, torch.float32, WeightFormat.DENSE)
    assert torch.equal(plain, torch.cat((gate, up), dim=1))
    binder, packed, packed_down = bind(source, torch.float32, WeightFormat.STORED)
    assert list(binder.formats) == [kind if kind.startswith("Q") else "float32"]
    for e in range(E):
        assert torch.equal(unpack(packed[e]), plain[e])
        assert torch.equal(unpack(packed_down[e]), down[e])


def test_blocks_of_a_gguf_file_are_packed_as_they_are(tmp_path):
    source = in_gguf(tmp_path, {"gate_proj": "Q4_0", "up_proj": "Q4_0", "down_proj": "Q8_0"})
    seen: list[int] = []
    binder = Binder(source, torch.bfloat16, "cpu", "m", progress=seen.append, weight_format=WeightFormat.STORED)
    stack = bind_experts(binder, NAME, experts=E, hidden=H, intermediate=F)
    assert sum(seen) == GATE_UP.numel() + DOWN.numel()
    assert (stack.gate_up.kind, stack.down.kind) == (PackedKind.Q4, PackedKind.Q8)
    blocks = [torch.from_numpy(gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType.Q4_0)) for w in GATE_UP]
    assert same(stack.gate_up, [pack_q4_0(each.flatten(), 2 * F, H) for each in blocks])


@pytest.mark.parametrize(
    ("gate", "up"), [("Q4_0", "Q8_0"), ("Q5_1", "Q4_1"), ("Q8_0", "F16"), ("Q4_K", "Q6_K"), ("Q5_K", "Q4_K")]
)
def test_gates_and_ups_in_different_blocks_stay_as_they_are(tmp_path, monkeypatch, gate, up):
    if "K" in gate:  # in blocks of 256, which the gguf package reads and does not write
        monkeypatch.setattr(f"{__name__}.H", 256)
        monkeypatch.setattr(f"{__name__}.GATE", draw(E, F, 256))
        monkeypatch.setattr(f"{__name__}.UP", draw(E, F, 256, seed=8))
        monkeypatch.setattr(f"{__name__}.DOWN", draw(E, 256, F, seed=9))
        monkeypatch.setattr(gguf.quants, "quantize", by_ours)
    source = in_gguf(tmp_path, {"gate_proj": gate, "up_proj": up, "down_proj": "Q8_0"})
    binder, gate_up, _ = bind(source, torch.float32, WeightFormat.STORED)
    assert list(binder.formats)[:2] == [gate, "float32" if up == "F16" else up]
    assert not binder.mixed
    assert isinstance(gate_up, FusedStack)
    _, numbers, _ = bind(source, torch.float32, WeightFormat.DENSE)
    for e in range(E):
        assert torch.equal(torch.cat([unpack(part) for part in gate_up[e].parts]), numbers[e])


def by_ours(numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    rows = encode(torch.from_numpy(numbers), kind.name)
    return rows.view(*numbers.shape[:-1], -1).numpy()


class OneInBlocks(Held):
    """Claims that the gates of the first expert lie in blocks."""

    def stored_kind(self, name: str) -> str:
        return "Q8_0" if name == f"{NAME}.0.gate_proj.weight" else ""


def test_experts_in_different_kinds_become_plain_numbers_and_are_reported():
    binder, gate_up, _ = bind(OneInBlocks(STORED["each"]), torch.bfloat16, WeightFormat.STORED)
    assert isinstance(gate_up, FusedStack)
    assert [part.kind for part in gate_up.parts] == [PackedKind.BF16, PackedKind.BF16]
    assert binder.mixed == [f"{NAME}.0.gate_proj.weight (Q8_0, plain)"]


def test_a_slice_of_another_shape_or_of_rows_in_another_order_is_refused(tmp_path):
    kinds = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "F32")
    name = f"{NAME}.gate_proj.weight"
    with pytest.raises(ModelFileError, match=r"slices of shape \(32, 64\), expected \(64, 32\)"):
        in_gguf(tmp_path, kinds).read_slice_into(name, 0, torch.empty(H, F))
    with pytest.raises(ModelFileError, match="not stored in quantised blocks"):
        in_gguf(tmp_path, kinds).read_slice_blocks(name, 0)
    turned = in_gguf(tmp_path, kinds, arrangement=Arrangement.INTERLEAVED_KEY)
    with pytest.raises(ModelFileError, match="slice by slice"):
        turned.read_slice_into(name, 0, torch.empty(F, H))


def test_an_expert_that_is_missing_or_of_another_shape_is_named():
    tensors = dict(STORED["each"])
    del tensors[f"{NAME}.2.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"experts\.2\.up_proj\.weight.*there is none"):
        bind(Held(tensors), torch.float32, WeightFormat.F32)
    tensors[f"{NAME}.2.up_proj.weight"] = draw(F, H + 1)
    with pytest.raises(ModelFileError, match=r"experts\.2\.up_proj\.weight.*shape \(32, 65\)"):
        bind(Held(tensors), torch.float32, WeightFormat.F32)
    joined = STORED["joined"] | {f"{NAME}.gate_up_proj": GATE_UP[:2]}
    with pytest.raises(ModelFileError, match=r"gate_up_proj.*shape \(2, 64, 64\).*needs \(3, 64, 64\)"):
        bind(Held(joined), torch.float32, WeightFormat.F32)


def test_one_expert_more_than_the_settings_say_is_left_over():
    more = STORED["each"] | {f"{NAME}.3.up_proj.weight": UP[0]}
    with pytest.raises(ModelFileError, match=r"experts\.3\.up_proj\.weight"):
        bind(Held(more), torch.float32, WeightFormat.F32)


def test_numbers_that_a_form_cannot_hold_name_a_tensor_of_the_stack():
    bad = dict(STORED["joined"])
    bad[f"{NAME}.gate_up_proj"] = torch.full_like(GATE_UP, 1e38)
    with pytest.raises(ModelFileError, match=r"gate_up_proj.*too large"):
        bind(Held(bad), torch.bfloat16, WeightFormat.INT8)


def test_a_router_is_never_quantised():
    router = draw(E, H)
    for fmt in WeightFormat:
        binder = Binder(Held({"r": router}), torch.float32, "cpu", "m", weight_format=fmt)
        weight = binder.take_router("r", (E, H))
        binder.finish()
        assert torch.equal(weight.numbers if fmt is WeightFormat.DENSE else unpack(weight), router)
        assert binder.bytes == weight.nbytes
    narrow = Binder(Held({"r": router}), torch.bfloat16, "cpu", "m", weight_format=WeightFormat.INT4).take_router(
        "r", (E, H)
    )
    assert narrow.kind is PackedKind.BF16
