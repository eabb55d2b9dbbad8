"""Quantised safetensors: every format's numbers exactly, in forms that lose nothing of them, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from quantised_cases import (
    AWQ,
    BNB,
    FLOATS,
    FP8,
    GPTQ,
    INT4,
    STORED,
    K,
    N,
    Tensors,
    binder,
    compressed,
    opened,
    settings,
)
from quantised_samples import (
    awq,
    compressed_config,
    floats,
    fp8,
    gptq,
    int_quantized,
    integers,
    nf4,
    pack_quantized,
)
from weights_samples import write_directory, write_shards

from needs import COMPILED
from penstock.contract.errors import ModelFileError
from penstock.kernels import native
from penstock.kernels.fused_weight import FusedWeight
from penstock.kernels.packed_linear import PackedKind, PackedWeight, unpack
from penstock.kernels.packed_stack import PackedStack
from penstock.models import gguf_dialect
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.packing import WeightFormat
from penstock.weights.quantisation_config import read_quantisation


@pytest.mark.parametrize("case", STORED)
def test_integers_are_read_exactly_and_kept_in_a_form_that_holds_them(tmp_path, case):
    matrix, lay_out, section, kind = STORED[case]
    files = opened(tmp_path, lay_out("a", matrix), section)
    assert files.stored_dtype == "quantised"
    assert files.num_weights == matrix.codes.size
    assert files.source.names() == {"a.weight"}
    assert torch.equal(files.source.read("a.weight", torch.float32, "cpu"), matrix.numbers)
    assert not files.source.rounded()
    if native.available():
        weight = binder(files, torch.float32).take_linear([("a.weight", tuple(matrix.codes.shape))])
        assert isinstance(weight, PackedWeight)
        assert weight.kind is PackedKind[kind]
        assert torch.equal(unpack(weight), matrix.numbers)
        assert not files.source.rounded()


@pytest.mark.parametrize("case", FLOATS)
def test_fp8_is_read_as_the_product_in_float32(tmp_path, case):
    matrix, changes = FLOATS[case]
    tensors = fp8("a", matrix) | {"a.input_scale": torch.ones(1), "b.k_scale": torch.ones(1)}
    files = opened(tmp_path, tensors, {"quant_method": "fp8", "activation_scheme": "dynamic", **changes})
    assert files.source.names() == {"a.weight"}
    assert files.stored_dtype == "quantised"
    assert torch.equal(files.source.read("a.weight", torch.float32, "cpu"), matrix.numbers)
    assert not files.source.rounded()
    assert torch.equal(files.source.read("a.weight", torch.bfloat16, "cpu"), matrix.numbers.bfloat16())
    assert files.source.rounded() == {"FP8 to bfloat16": 1}
    assert files.source.unheeded() == ("quantization_config.activation_scheme",)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize("case", FLOATS)
def test_fp8_stays_as_it_is_in_a_model_in_bfloat16(tmp_path, case):
    matrix, changes = FLOATS[case]
    files = opened(tmp_path, fp8("a", matrix), {"quant_method": "fp8", **changes})
    parts = [("a.weight", tuple(matrix.codes.shape))]
    weight = binder(files).take_linear(parts)
    assert weight.kind is PackedKind.F8
    assert torch.equal(unpack(weight), matrix.numbers)
    assert not files.source.rounded()
    planned = Binder(HeadersOnly(files.source), torch.bfloat16, META, "m", weight_format=WeightFormat.STORED)
    assert planned.take_linear(parts).nbytes == weight.nbytes
    assert planned.formats == {"FP8": None}
    assert binder(files, torch.float32).take_linear(parts).kind is PackedKind.F32


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_fp8_becomes_numbers_where_a_scale_is_for_fewer_than_128_inputs_or_inputs_come_first(tmp_path):
    narrow = opened(tmp_path, fp8("a", floats(64, 192, (16, 64))), {**FP8, "weight_block_size": [16, 64]})
    assert binder(narrow).take_linear([("a.weight", (64, 192))]).kind is PackedKind.BF16
    matrix = floats(N, K, (16, 128))
    files = opened(tmp_path, fp8("a", matrix), {**FP8})
    first = binder(files).take_linear([("a.weight", (K, N))], transposed=True)
    assert torch.equal(unpack(first), matrix.numbers.T.bfloat16().float())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_fp8_is_an_error_that_names_the_tensor(tmp_path, code):
    matrix = floats(N, K, (16, 128))
    matrix.codes.view(torch.uint8)[7, 9] = code
    files = opened(tmp_path, fp8("a", matrix), {**FP8})
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ModelFileError, match=r"a\.weight: holds NaN"):
            binder(files, dtype).take_linear([("a.weight", (N, K))])


@pytest.mark.parametrize(("block", "ending"), [((16, 128), "_scale_inv"), ((1, K), "_scale"), ((N, K), "_scale")])
def test_fp8_of_experts_that_share_a_tensor_is_read_one_at_a_time(tmp_path, block, ending):
    each = [floats(N, K, block, seed=seed) for seed in range(3)]
    scales = torch.stack([matrix.scales for matrix in each])
    tensors = {"a": torch.stack([matrix.codes for matrix in each]), f"a{ending}": scales}
    files = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 128]})
    assert files.source.names() == {"a"}
    assert files.num_weights == 3 * N * K
    numbers = torch.stack([matrix.numbers for matrix in each])
    assert torch.equal(files.source.read("a", torch.float32, "cpu"), numbers)
    out = torch.empty(N, K)
    files.source.read_slice_into("a", 2, out)
    assert torch.equal(out, numbers[2])
    for dtype, transposed in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
        stack = binder(files, dtype).take_stack(3, [("a", (K, N) if transposed else (N, K))], transposed=transposed)
        wanted = numbers.mT.bfloat16().float() if transposed else numbers
        assert isinstance(stack, PackedStack)
        assert (stack.kind is PackedKind.F8) == (dtype == torch.bfloat16 and not transposed)
        assert all(torch.equal(unpack(stack[expert]), wanted[expert]) for expert in range(3))
    assert files.source.rounded() == {"FP8 to bfloat16": 1}


def test_fp8_with_scales_that_are_powers_of_two_is_not_rounded(tmp_path):
    matrix = floats(N, K, (16, 128))
    exact = matrix.scales.log2().round().exp2().to(torch.float8_e8m0fnu)
    files = opened(tmp_path, {"a.weight": matrix.codes, "a.weight_scale_inv": exact}, {**FP8})
    numbers = files.source.read("a.weight", torch.bfloat16, "cpu")
    down, across = torch.arange(N) // 16, torch.arange(K) // 128
    assert torch.equal(numbers.float(), matrix.codes.float() * exact.float()[down][:, across])
    assert not files.source.rounded()


@pytest.mark.parametrize(("strategy", "block"), [("channel", (1, K)), ("tensor", (N, K)), ("block", (8, 128))])
def test_floats_of_compressed_tensors_are_those_of_fp8(tmp_path, strategy, block):
    matrix = floats(N, K, block)
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [8, 128]}
    tensors = fp8("a", matrix, "weight_scale") | {"a.input_scale": torch.ones(1), "b.k_scale": torch.ones(1)}
    group = {"weights": scheme, "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    files = opened(tmp_path, tensors, {**section, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert files.source.names() == {"a.weight"}
    assert torch.equal(files.source.read("a.weight", torch.float32, "cpu"), matrix.numbers)
    assert files.source.unheeded() == (
        "quantization_config.kv_cache_scheme",
        "quantization_config.config_groups.group_0.input_activations",
    )


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_read_as_bitsandbytes_says(tmp_path, nested):
    tensors, numbers = nf4("a", 40, 208, nested=nested)
    files = opened(tmp_path, tensors, BNB)
    assert files.source.names() == {"a.weight"}
    assert torch.equal(files.source.read("a.weight", torch.float32, "cpu"), numbers)
    assert files.stored_dtype == "quantised"
    files.source.read("a.weight", torch.bfloat16, "cpu")
    assert files.source.rounded() == {"NF4 to bfloat16": 1}


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_scale_beyond_float16s_precision_is_rounded_and_reported(tmp_path):
    matrix = integers(N, K, 8, K, symmetric=True, dtype=torch.float32)
    files = opened(tmp_path, int_quantized("a", matrix), compressed(num_bits=8, strategy="channel"))
    weight = binder(files).take_linear([("a.weight", (N, K))])
    assert files.source.rounded() == {"scales of INT8 to float16": 1}
    assert torch.allclose(unpack(weight), matrix.numbers, rtol=2**-11, atol=0)
    matrix.scales[3, 0] = 1e6
    files = opened(tmp_path / "large", int_quantized("a", matrix), compressed(num_bits=8, strategy="channel"))
    with pytest.raises(ModelFileError, match=r"a\.weight: a number of size 1e\+06 is beyond"):
        binder(files).take_linear([("a.weight", (N, K))])


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_what_is_left_unquantised_or_quantised_otherwise_lies_beside_it(tmp_path):
    """Queries in groups of 32, keys in groups of 128, values as they were; shards of one module in two files."""
    query, key = integers(N, K, seed=1), integers(8, K, group=128, seed=2, symmetric=True)
    value = torch.randn(8, K, generator=torch.Generator().manual_seed(3)).bfloat16()
    stored = pack_quantized("q", query) | pack_quantized("k", key) | {"v.weight": value, "norm": torch.ones(K)}
    halves: list[Tensors] = [{}, {}]
    for place, name in enumerate(sorted(stored)):
        halves[place % 2][name] = stored[name]
    shards = {f"model-{i}.safetensors": half for i, half in enumerate(halves)}
    files = open_model(write_shards(tmp_path, shards, settings(compressed())), gguf_dialect)
    parts = [("q.weight", (N, K)), ("k.weight", (8, K)), ("v.weight", (8, K))]
    taking = binder(files)
    weight = taking.take_linear(parts)
    taking.take("norm", (K,))
    taking.finish()
    assert isinstance(weight, FusedWeight)
    assert [part.form for part in weight.parts] == ["z4", "z4w", "bf16"]
    numbers = torch.cat([unpack(part) for part in weight.parts])
    assert torch.equal(numbers, torch.cat((query.numbers, key.numbers, value.float())))
    alike = binder(files).take_linear([("q.weight", (N, K))] * 1)
    assert alike.form == "z4"
    assert list(taking.formats) == ["INT4", "INT4_128", "bfloat16"]


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize("case", ["gptq", "gptq_order", "gptq_8", "awq_128", "packed", "bytes"])
def test_a_planned_matrix_has_the_form_and_size_of_the_loaded_one(tmp_path, case):
    matrix, lay_out, section, _ = STORED[case]
    files = opened(tmp_path, lay_out("a", matrix), section)
    loaded = binder(files)
    planned = Binder(HeadersOnly(files.source), torch.bfloat16, META, "m", weight_format=WeightFormat.STORED)
    for each in (loaded, planned):
        each.take_linear([("a.weight", tuple(matrix.codes.shape))])
        each.finish()
    assert planned.bytes == loaded.bytes
    assert planned.formats == loaded.formats


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_table_and_a_head_may_be_quantised(tmp_path):
    matrix = integers(N, K)
    files = opened(tmp_path, gptq("lm_head", matrix), {**GPTQ, "lm_head": True})
    for weight in (
        binder(files).take_linear([("lm_head.weight", (N, K))]),
        binder(files).take_table("lm_head.weight", (N, K)),
    ):
        assert torch.equal(unpack(weight), matrix.numbers)
    router = binder(files, torch.float32).take_router("lm_head.weight", (N, K))
    assert torch.equal(unpack(router), matrix.numbers)


def test_a_checkpoint_is_quantised_though_most_of_its_numbers_are_embeddings(tmp_path):
    tensors = gptq("a", integers(N, K)) | {"embed.weight": torch.zeros(4 * N, K, dtype=torch.float16)}
    files = opened(tmp_path, tensors, GPTQ)
    assert files.stored_dtype == "quantised"
    binder(files).take("embed.weight", (4 * N, K))
    assert files.source.rounded() == {"F16 to bfloat16": 1}


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_experts_are_stacked_as_they_are(tmp_path):
    """Gates and ups of 3 experts; no block holds those of 8 bits with zero points, which become plain numbers."""
    for bits, form in ((4, PackedKind.Z4), (8, PackedKind.F32)):
        parts = {f"e.{i}.{name}": integers(16, 64, bits, seed=i) for i in range(3) for name in ("gate", "up")}
        stored = {name: tensor for module, each in parts.items() for name, tensor in gptq(module, each).items()}
        files = opened(tmp_path / str(bits), stored, {**GPTQ, "bits": bits})
        stack = binder(files, torch.float32).take_stack(
            3, [(f"e.{{expert}}.{n}.weight", (16, 64)) for n in ("gate", "up")]
        )
        assert isinstance(stack, PackedStack)
        assert stack.kind is form
        for i in range(3):
            wanted = torch.cat((parts[f"e.{i}.gate"].numbers, parts[f"e.{i}.up"].numbers))
            assert torch.equal(unpack(stack[i]), wanted)


def test_a_bias_of_zeros_that_no_model_asks_for_is_passed_over(tmp_path):
    tensors = gptq("a", integers(N, K)) | {"a.bias": torch.zeros(N), "b.bias": torch.zeros(N)}
    for left, bias in (("b.bias", 0.0), ("a.bias, b.bias", 0.5)):
        tensors["a.bias"][3] = bias
        taking = binder(opened(tmp_path, tensors, GPTQ))
        taking.take("a.weight", (N, K), torch.float32)
        with pytest.raises(ModelFileError, match=f"have no place in the model: {left}$"):
            taking.finish()


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, True),
        ({"checkpoint_format": None}, True),
        ({"checkpoint_format": "gptq"}, True),
        ({"format": "gptq", "method": "gptq"}, True),
        ({"checkpoint_format": "GPTQ_V2"}, False),
        ({"format": "gptq_v2"}, False),
        ({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}, False),
    ],
)
def test_gptqs_format_is_what_autogptq_gptqmodel_and_transformers_call_it(settings, first):
    found = read_quantisation({"quantization_config": {**GPTQ, **settings}}, "config.json")
    assert found is not None
    assert found.zeros_less_one is first


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("quant_method", {"quant_method": "hqq"}),
    ("quant_method", {"quant_method": 3}),
    ("quant_method", {"bits": 4}),
    ("bits", {**GPTQ, "bits": 3}),
    ("bits", {**GPTQ, "bits": True}),
    ("bits", {"quant_method": "gptq"}),
    ("group_size", {**GPTQ, "group_size": 0}),
    ("group_size", {**GPTQ, "group_size": "128"}),
    ("sym", {**GPTQ, "sym": 1}),
    ("checkpoint_format", {**GPTQ, "checkpoint_format": "marlin"}),
    *(
        ("checkpoint_format", {**GPTQ, "checkpoint_format": value})
        for value in ("", "gptq_v3", "v2", 2, 0, False, [], {})
    ),
    ("checkpoint_format", {**GPTQ, "checkpoint_format": "gptq_v2", "format": "gptq"}),
    ("format", {**GPTQ, "checkpoint_format": "gptq", "format": ""}),
    ("'checkpoint_formau'", {**GPTQ, "checkpoint_formau": "gptq_v2"}),
    ("'CHECKPOINT_FORMAT'", {**GPTQ, "CHECKPOINT_FORMAT": "gptq_v2", "format": "gptq"}),
    ("is_marlin_format", {**GPTQ, "is_marlin_format": True}),
    ("dynamic", {**GPTQ, "dynamic": {r"+:.*\.18\..*": {"bits": 8}}}),
    ("rotation", {**GPTQ, "rotation": "hadamard"}),
    ("bits", {**AWQ, "bits": 3}),
    ("version", {**AWQ, "version": "gemv"}),
    ("backend", {**AWQ, "backend": "llm-awq"}),
    ("zero_point", {**AWQ, "zero_point": False}),
    ("fmt", {**FP8, "fmt": "e5m2"}),
    ("expert_dtype", {**FP8, "expert_dtype": "fp4"}),
    ("weight_block_size", {**FP8, "weight_block_size": [128]}),
    ("weight_block_size", {**FP8, "weight_block_size": [13, 128]}),
    ("load_in_8bit", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ("bnb_4bit_quant_type", {**BNB, "bnb_4bit_quant_type": "int4"}),
    ("format", compressed_config(INT4, format="marlin-24")),
    ("format", compressed_config(INT4, format="nvfp4-pack-quantized")),
    ("sparsity_config.format", {**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}),
    ("transform_config", {**compressed(), "transform_config": {"config_groups": {"u": {}}}}),
    ("config_groups.group_0.weights.num_bits", compressed(num_bits=3)),
    ("config_groups.group_0.weights.num_bits", compressed(num_bits=4, type="float")),
    ("config_groups.group_0.weights.strategy", compressed(strategy="tensor_group")),
    ("config_groups.group_0.weights.block_structure", compressed(type="float", num_bits=8, strategy="block")),
    ("config_groups.group_0.weights", {**compressed(), "config_groups": {"group_0": {"weights": 3}}}),
    ("config_groups.group_0", {**compressed(), "config_groups": {"group_0": ["Linear"]}}),
    (
        "config_groups.group_0.input_activations.num_bits",
        {**compressed(), "config_groups": {"group_0": {"weights": INT4, "input_activations": {"num_bits": 4}}}},
    ),
    (
        "config_groups.group_0.output_activations",
        {**compressed(), "config_groups": {"group_0": {"weights": INT4, "output_activations": {"num_bits": 8}}}},
    ),
]


@pytest.mark.parametrize(("key", "section"), REFUSED)
def test_what_cannot_be_read_is_refused_by_its_key(tmp_path, key, section):
    with pytest.raises(ModelFileError) as refusal:
        opened(tmp_path, gptq("a", integers(8, 32)), section)
    assert refusal.value.key == f"quantization_config.{key}"
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_a_checkpoint_that_is_not_quantised_as_it_says_is_refused(tmp_path):
    plain = {"a.weight": torch.ones(8, 32)}
    with pytest.raises(ModelFileError, match="quantization_config: says awq, but no matrix is stored so"):
        opened(tmp_path, plain, AWQ)
    with pytest.raises(ModelFileError, match=r"quantization_config: is missing, but a\.qweight is quantised"):
        open_model(write_directory(tmp_path, gptq("a", ONE), {"model_type": "llama"}), gguf_dialect)
    with pytest.raises(ModelFileError, match="quantization_config: must be an object"):
        opened(tmp_path, plain, [1])  # type: ignore[arg-type]


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


ONE = integers(16, 64)
PACKED = pack_quantized("a", ONE)
FLOAT = fp8("a", floats(16, 64, (8, 32)))
NF, _ = nf4("a", 16, 64, nested=True)
STATE = "a.weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Tensors:
    """The NF4 tensors with a changed quantisation state; a key set to `...` is left out."""
    found = {**json.loads(bytes(NF[STATE].tolist())), **changes}
    found = {key: value for key, value in found.items() if value is not ...}
    return {**NF, STATE: torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)}


DAMAGED: list[tuple[str, Tensors, dict[str, Any]]] = [
    ("has no a.scales beside it", without(gptq("a", ONE), "a.scales"), GPTQ),
    ("has no a.qzeros beside it", without(awq("a", ONE), "a.qzeros"), AWQ),
    (r"a.scales: has shape \(2, 16\), but \(1, 16\) belongs", gptq("a", ONE), {**GPTQ, "group_size": 64}),
    (
        r"a.qzeros: has shape \(2, 2\), but \(4, 2\)",
        {**gptq("a", ONE), "a.scales": torch.ones(4, 16).half()},
        {**GPTQ, "group_size": 16},
    ),
    ("a.qweight: has type I64", {**gptq("a", ONE), "a.qweight": torch.zeros(8, 16, dtype=torch.int64)}, GPTQ),
    ("a.qweight: has shape", {**gptq("a", ONE), "a.qweight": torch.zeros(8, dtype=torch.int32)}, GPTQ),
    ("has no g_idx, though desc_act", without(gptq("a", ONE), "a.g_idx"), {**GPTQ, "desc_act": True}),
    ("a.weight: is there twice", gptq("a", ONE) | {"a.weight": torch.ones(16, 64)}, GPTQ),
    ("has no a.weight_shape beside it", without(PACKED, "a.weight_shape"), compressed()),
    ("in 4 or 8 bits takes other words", {**PACKED, "a.weight_shape": torch.tensor([16, -64])}, compressed()),
    ("a.weight_shape: has shape", {**PACKED, "a.weight_shape": torch.tensor([16])}, compressed()),
    ("a.weight_scale: has shape", {**PACKED, "a.weight_scale": torch.ones(16, 5)}, compressed()),
    ("a.weight_packed: has type F32", {**PACKED, "a.weight_packed": torch.ones(16, 8)}, compressed()),
    ("has no a.weight_scale_inv beside it", without(FLOAT, "a.weight_scale_inv"), {**FP8}),
    ("which are not for blocks of 16 x 128", FLOAT, {**FP8}),
    ("has scales of type I32", {**FLOAT, "a.weight_scale_inv": torch.ones(1, dtype=torch.int32)}, {**FP8}),
    ("only matrices can be read", {**FLOAT, "a.weight": FLOAT["a.weight"].view(2, 2, 4, 64)}, {**FP8}),
    ("has no a.weight.nested_absmax beside it", without(NF, "a.weight.nested_absmax"), BNB),
    ("has no a.weight beside it", without(NF, "a.weight"), BNB),
    ("bitsandbytes__nf4.shape: must be two sizes", state(shape=[16]), BNB),
    ("bitsandbytes__nf4.shape: must be 1 to", state(shape=[16, "64"]), BNB),
    ("bitsandbytes__nf4.blocksize: must be 1 to", state(blocksize=0), BNB),
    ("a.weight: has shape", state(shape=[16, 65]), BNB),
    ("bitsandbytes__nf4.nested_offset: must be a number, got None", state(nested_offset=...), BNB),
    ("bitsandbytes__nf4.nested_offset: must be a number, got nan", state(nested_offset=float("nan")), BNB),
    ("bitsandbytes__nf4.nested_blocksize: must be 1 to", state(nested_blocksize=...), BNB),
    ("bitsandbytes__nf4.quant_type: must be 'nf4', as its name says, got 'fp4'", state(quant_type="fp4"), BNB),
    ("is not JSON", {**NF, STATE: torch.zeros(9, dtype=torch.uint8)}, BNB),
]


@pytest.mark.parametrize(("message", "tensors", "section"), DAMAGED)
def test_parts_that_do_not_fit_each_other_are_refused(tmp_path, message, tensors, section):
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()}, section)


@pytest.mark.parametrize(
    ("message", "matrix", "section"),
    [
        ("say sym: false", ONE, {**GPTQ, "sym": True}),
        ("desc_act is false; make it true", integers(16, 64, ordered=True), GPTQ),
    ],
)
def test_numbers_that_contradict_the_config_are_refused(tmp_path, message, matrix, section):
    source = opened(tmp_path, gptq("a", matrix), section).source
    with pytest.raises(ModelFileError, match=message):
        source.read("a.weight", torch.float32, "cpu")


def test_groups_that_do_not_exist_are_refused(tmp_path):
    for place, wrong in enumerate((-1, 2)):
        tensors = gptq("a", ONE)
        tensors["a.g_idx"][5] = wrong
        source = opened(tmp_path / str(place), tensors, {**GPTQ, "desc_act": True}).source
        with pytest.raises(ModelFileError, match=r"a\.g_idx: names groups outside 0 to 1"):
            source.read("a.weight", torch.float32, "cpu")


def test_a_file_cut_short_after_it_was_opened_is_refused(tmp_path):
    source = opened(tmp_path, gptq("a", ONE), GPTQ).source
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ModelFileError, match="bytes too early"):
        source.read("a.weight", torch.float32, "cpu")
