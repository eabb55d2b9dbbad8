from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from weights_samples import (
    ARCHITECTURES,
    CONTEXT,
    EXPERT_INNER,
    EXPERTS,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    Tiny,
    shapes,
    to_gguf,
    weights,
    with_gguf_layout,
    write_gguf,
)
from write_gguf_grids import grid_bytes

from penstock.contract.errors import ModelFileError
from penstock.models import gguf_dialect, load
from penstock.models.families import families
from penstock.weights.bind import Binder
from penstock.weights.gguf_blocks import decode
from penstock.weights.gguf_decoder import decoder_settings
from penstock.weights.gguf_dialect import Arrangement, GgufDialect, HuggingFaceTensor
from penstock.weights.gguf_file import open_gguf
from penstock.weights.gguf_grid_blocks import GRID_FILE
from penstock.weights.gguf_header import GGML_TYPE_NAMES, READABLE_TYPES, read_gguf_header
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.gguf_vocabulary import read_vocabulary

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


@pytest.mark.parametrize("number", READABLE_TYPES)
def test_blocks_decode_to_the_very_bits_of_the_gguf_package(number: int) -> None:
    kind = READABLE_TYPES[number]
    ggml = gguf.GGMLQuantizationType(number)
    assert gguf.GGML_QUANT_SIZES[ggml] == (kind.elements, kind.bytes)
    raw = np.random.default_rng(number).integers(0, 256, (64, kind.bytes * 4), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        want = gguf.quants.dequantize(raw, ggml).reshape(-1).astype(np.float32)
    got = decode(torch.from_numpy(raw.reshape(-1)), kind).float().numpy()
    assert np.array_equal(got, want, equal_nan=True)


def test_grids_are_the_gguf_packages() -> None:
    assert GRID_FILE.read_bytes() == grid_bytes()


def test_type_names_are_the_gguf_packages() -> None:
    official = {member.value: member.name for member in gguf.GGMLQuantizationType}
    assert all(official[number] == name for number, name in GGML_TYPE_NAMES.items())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_invert_the_official_name_map(architecture: str) -> None:
    tiny = Tiny(architecture, attention_bias=architecture == "llama")
    for name, shape in shapes(tiny).items():
        stored, array = to_gguf(tiny, name, torch.zeros(shape))
        known = gguf_dialect(architecture, "m").hugging_face_tensor(stored)
        assert known is not None, stored
        assert known.name == name
        assert (array.shape != shape) <= (known.arrangement.name == "TRANSPOSED")


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", *QUANTISED])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_come_back_as_they_were_before_conversion(tmp_path: Path, architecture: str, quantisation: str) -> None:
    tiny = with_gguf_layout(Tiny(architecture, attention_bias=architecture == "llama"))
    tensors = weights(tiny)
    source = open_gguf(write_gguf(tmp_path / "tiny.gguf", tiny, tensors, quantisation), gguf_dialect)
    assert source.names() == set(tensors)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, tensor in tensors.items():
        want = tensor
        if tensor.ndim > 1 and quantisation != "F32":  # what quantisation alone does to it, rows as they are stored
            stored = tensor.T if architecture == "gpt2" and source.stored[name].shape != tensor.shape else tensor
            if architecture == "gpt2" and name.endswith("attn.c_proj.weight"):  # square: its shape tells nothing
                stored = tensor.T
            array = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(stored), kind), kind)
            want = torch.from_numpy(array.copy())
            want = want.T if stored is not tensor else want
        assert source.shape(name) == tuple(tensor.shape)
        for dtype in (torch.float32, torch.bfloat16):
            got = source.read(name, dtype, "cpu")
            assert got.is_contiguous()
            assert torch.equal(got, want.to(dtype)), name


def golden_tensors(path: Path, settings: object) -> dict[str, torch.Tensor]:
    """The tensors that transformers reads from a GGUF file."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    tensors = {}
    for name, tensor in load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"].items():
        tensors |= as_stored(name, tensor)
    return tensors


def as_stored(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts as files have them: transformers joins gates and ups."""
    experts, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return {f"{experts}.gate_proj.weight": gate, f"{experts}.up_proj.weight": up}
    return {f"{name}.weight": tensor} if part == "down_proj" else {name: tensor}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_reads_the_same_model_from_the_same_file(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    # transformers takes Qwen 3's head width from its own default (128), not from the file
    tiny = Tiny(architecture, head_dim=128) if architecture == "qwen3" else Tiny(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", tiny, weights(tiny), "Q8_0")
    settings = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    golden = golden_tensors(path, settings)
    source = open_gguf(path, gguf_dialect)
    assert source.names() == set(golden)
    for name in source.names():
        assert torch.equal(source.read(name, torch.float32, "cpu"), golden[name].float()), name
    for key in ("vocab_size", "rms_norm_eps", "layer_norm_epsilon", "max_position_embeddings", "num_key_value_heads"):
        if key in source.config:
            assert source.config[key] == pytest.approx(getattr(settings, key)), key


def test_a_llama_config_says_all_in_hugging_face_terms(tmp_path: Path) -> None:
    source = open_gguf(write_gguf(tmp_path / "tiny.gguf", Tiny(tied=True), weights(Tiny(tied=True))), gguf_dialect)
    assert source.config == {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "rms_norm_eps": float(np.float32(1e-6)),
        "rope_theta": 5000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_gpt2_config_uses_gpt2s_own_names(tmp_path: Path) -> None:
    tiny = Tiny("gpt2", tied=True)
    assert open_gguf(write_gguf(tmp_path / "tiny.gguf", tiny, weights(tiny)), gguf_dialect).config == {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_inner": INNER,
        "n_positions": CONTEXT,
        "layer_norm_epsilon": float(np.float32(1e-5)),
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def opened(tmp_path: Path, keys: dict[str, object], **more: object) -> dict[str, object]:
    path = write_gguf(tmp_path / "tiny.gguf", Tiny(), weights(Tiny()), keys=keys, **more)
    return open_gguf(path, gguf_dialect).config


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_is_passed_on(tmp_path: Path, keys: dict[str, object], scaling: object) -> None:
    assert opened(tmp_path, keys).get("rope_scaling") == scaling


def test_rope_factors_become_part_of_the_config_and_are_no_tensor(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 2, 4, 8, 8, 8], dtype=np.float32)
    path = write_gguf(tmp_path / "t.gguf", Tiny(), weights(Tiny()), extra_tensors={"rope_freqs.weight": factors})
    source = open_gguf(path, gguf_dialect)
    assert source.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert source.names() == set(weights(Tiny()))


@pytest.mark.parametrize(
    ("factors", "keys", "message"),
    [
        (np.ones(5, dtype=np.float32), {}, "rope_freqs.weight: must hold 8 positive factors"),
        (np.zeros(8, dtype=np.float32), {}, "rope_freqs.weight: must hold 8 positive factors"),
        (np.ones(8, dtype=np.float16), {}, "rope_freqs.weight: must be a short F32 vector"),
        (np.ones(8, dtype=np.float32), {"rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn' with"),
    ],
)
def test_rope_factors_that_make_no_sense_are_refused(
    tmp_path: Path, factors: np.ndarray, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, keys, extra_tensors={"rope_freqs.weight": factors})


LONG = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}


def long_factors(kind: type = np.float32) -> dict[str, np.ndarray]:
    return {f"rope_factors_{name}.weight": np.arange(1, 9, dtype=kind) for name in ("long", "short")}


def test_two_tensors_of_factors_are_longrope(tmp_path: Path) -> None:
    wanted = {
        "rope_type": "longrope",
        "short_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "original_max_position_embeddings": 32,
    }
    assert opened(tmp_path, LONG, extra_tensors=long_factors())["rope_scaling"] == wanted | {"attention_factor": 1.25}
    unscaled = {"rope.scaling.original_context_length": 32, "rope.scaling.type": "longrope"}
    assert opened(tmp_path, unscaled, extra_tensors=long_factors())["rope_scaling"] == wanted


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"rope.scaling.attn_factor": 1.25}, long_factors(), "rope.scaling.original_context_length: is missing"),
        (LONG | {"rope.scaling.attn_factor": 0.0}, long_factors(), "rope.scaling.attn_factor: must be a positive"),
        (LONG | {"rope.scaling.factor": 4.0}, long_factors(), "rope.scaling.factor: is not supported together"),
        (LONG | {"rope.scaling.type": "yarn"}, long_factors(), "rope.scaling.type: 'yarn' with rope_factors_long"),
        (LONG, long_factors(np.float16), "rope_factors_short.weight: must be a short F32 vector"),
    ],
)
def test_longrope_that_makes_no_sense_is_refused(
    tmp_path: Path, keys: dict[str, object], tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, keys, extra_tensors=tensors)


@pytest.mark.parametrize(("rotated", "head_dim"), [(1, 16), (9, 16), (16, 16), (15, 22)])
def test_a_part_of_a_head_is_rotated_where_the_family_says_so(tmp_path: Path, rotated: int, head_dim: int) -> None:
    settings = partly_rotated(tmp_path, rotated, head_dim)
    assert int(settings.get("partial_rotary_factor", 1.0) * head_dim) == rotated
    with pytest.raises(ModelFileError, match=f"rope.dimension_count: {head_dim + 1} differs"):
        partly_rotated(tmp_path, head_dim + 1, head_dim)


def partly_rotated(tmp_path: Path, rotated: int, head_dim: int) -> dict[str, object]:
    tiny = Tiny(head_dim=head_dim)
    path = write_gguf(tmp_path / "t.gguf", tiny, weights(tiny), keys={"rope.dimension_count": rotated})
    return decoder_settings(GgufKeys(read_gguf_header(path), "llama"), partial_rotary=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_shared_count", 1),
        ("expert_count", "8"),
        ("rope.scaling.attn_factor", 2.0),
        ("logit_scale", 0.5),
        ("attention.scale", 0.1),
        ("attention.clamp_kqv", 8.0),
        ("attention.causal", False),
        ("embedding_scale", 12.0),
        ("rope.freq_base_swa", 10000.0),
        ("something.new", 1),
        ("rope.dimension_count", 8),
        ("attention.value_length", 8),
        ("vocab_size", VOCAB + 1),
        ("attention.head_count", 3),
        ("attention.head_count", 0),
        ("attention.head_count", [4, 4]),
        ("attention.head_count_kv", 3),
        ("block_count", None),
        ("block_count", "2"),
        ("embedding_length", -1.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("rope.freq_base", float("inf")),
        ("context_length", 0),
    ],
)
def test_keys_that_change_the_maths_or_make_no_sense_are_refused_by_name(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.[a-z_.]+: ") as caught:
        opened(tmp_path, {key: value})
    assert key in caught.value.key or caught.value.key == "llama.embedding_length"


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_count", 0), ("expert_used_count", 0), ("attention.sliding_window", CONTEXT), ("logit_scale", 1.0)],
)
def test_keys_with_a_neutral_value_change_nothing(tmp_path: Path, key: str, value: object) -> None:
    assert opened(tmp_path, {key: value}) == opened(tmp_path, {})


def test_a_llama_file_with_experts_is_a_mixtral(tmp_path: Path) -> None:
    plain = opened(tmp_path, {})
    del plain["attention_bias"]
    counts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    for window in (None, 33):
        keys = {"expert_count": 8, "expert_used_count": 2, "attention.sliding_window": window or 0}
        mixture = opened(tmp_path, keys)
        assert mixture == plain | counts | {"model_type": "mixtral", "sliding_window": window}
    with pytest.raises(ModelFileError, match=r"llama.expert_used_count: is missing"):
        opened(tmp_path, {"expert_count": 8})


def test_a_llama_file_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    plain = opened(tmp_path, {})
    del plain["attention_bias"]
    windowed = opened(tmp_path, {"attention.sliding_window": CONTEXT - 1})
    assert windowed == plain | {"model_type": "mistral", "sliding_window": CONTEXT - 1}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_window_is_refused_where_nothing_says_which_layers_have_it(tmp_path: Path, architecture: str) -> None:
    tiny = Tiny(architecture)
    tensors = weights(tiny)
    for window in (0, CONTEXT):
        path = write_gguf(tmp_path / "t.gguf", tiny, tensors, keys={"attention.sliding_window": window})
        assert open_gguf(path, gguf_dialect).config["model_type"] == architecture
    path = write_gguf(tmp_path / "t.gguf", tiny, tensors, keys={"attention.sliding_window": CONTEXT - 1})
    message = rf"{architecture}.attention.sliding_window: a window of 127 below the context of 128"
    with pytest.raises(ModelFileError, match=message):
        open_gguf(path, gguf_dialect)


def test_windows_and_rope_factors_are_refused_for_a_family_that_never_asks_for_them(tmp_path: Path) -> None:
    tiny = Tiny("gpt2")
    path = write_gguf(tmp_path / "t.gguf", tiny, weights(tiny), keys={"attention.sliding_window": CONTEXT})
    with pytest.raises(ModelFileError, match=r"gpt2.attention.sliding_window: 128 is not supported"):
        open_gguf(path, gguf_dialect)
    factors = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    path = write_gguf(tmp_path / "t.gguf", tiny, weights(tiny), extra_tensors=factors)
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight: no tensor of a gpt2 model has this name"):
        open_gguf(path, gguf_dialect)


WITHOUT_DIALECT = {
    "mistral",
    "mistral3",
    "mixtral",
    "olmo3",
    "gemma3_text",
    "gemma4_text",
    "qwen2_5_vl",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "modernbert",
    "roberta",
    "xlm_roberta",
}
"""Families that are read as another: llama, olmo2, gemma3, gemma4, qwen2_vl, qwen3_5, qwen3_5_moe, deepseek_v2, bert.

Or are not read from GGUF.
"""


@pytest.mark.parametrize("family", families())
def test_a_familys_dialect_has_the_familys_names_and_no_two_tensors_of_one_name(family: str) -> None:
    dialect = getattr(importlib.import_module(f"penstock.models.{family}"), "GGUF", None)
    assert (dialect is None) == (family in WITHOUT_DIALECT)
    if dialect is None:
        return
    assert dialect.model_type in (family, f"{family}_text")  # for a family that also sees images, its text part
    assert gguf_dialect(dialect.architecture, "m") is dialect
    assert dialect.architecture in gguf.MODEL_ARCH_NAMES.values()
    theirs = [*dialect.tensors.values(), *dialect.whole.values()]
    assert len(set(theirs)) == len(theirs)
    assert all(("{layer}" in ours) == ("{layer}" in theirs) for ours, theirs in dialect.tensors.items())
    assert all(name in dialect.whole or name.rpartition(".")[0] in dialect.tensors for name in dialect.arrangements)


def test_decays_are_the_logarithms_of_their_opposites_and_filters_have_an_axis_more(tmp_path: Path) -> None:
    def norms_as(arrangement: Arrangement, architecture: str, file: str) -> GgufDialect:
        dialect = gguf_dialect(architecture, file)
        return replace(dialect, arrangements={**dialect.arrangements, "output_norm.weight": arrangement})

    def opened(norm: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        path = write_gguf(tmp_path / "t.gguf", Tiny(), weights(Tiny()) | {"model.norm.weight": norm})
        source = open_gguf(path, partial(norms_as, arrangement))
        return source.read("model.norm.weight", torch.float32, "cpu")

    logarithms = torch.linspace(-3, 3, 16)
    torch.testing.assert_close(opened(-logarithms.exp()[:, None], Arrangement.DECAY), logarithms)
    filters = torch.arange(12.0).view(4, 3)
    assert torch.equal(opened(filters, Arrangement.FILTERS), filters[:, None])
    assert torch.equal(opened(filters, Arrangement.FLAT), filters.view(-1))
    with pytest.raises(ModelFileError, match=r"output_norm.weight: must be below 0 throughout"):
        opened(logarithms, Arrangement.DECAY)
    with pytest.raises(ModelFileError, match=r"output_norm.weight: must be filters \[C, L\], got shape \(16,\)"):
        opened(logarithms, Arrangement.FILTERS)


def norms_minus_one(architecture: str, file: str) -> GgufDialect:
    """A llama whose first norms are stored as Gemma's are."""
    norms = {"blk.{layer}.attn_norm.weight": Arrangement.MINUS_ONE}
    dialect = gguf_dialect(architecture, file)
    return replace(dialect, arrangements={**dialect.arrangements, **norms})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_with_one_added_comes_back_without(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights(Tiny())
    stored = {name: value + 1 if "input_layernorm" in name else value for name, value in tensors.items()}
    source = open_gguf(write_gguf(tmp_path / "t.gguf", Tiny(), stored), norms_minus_one)
    for name, value in stored.items():
        wanted = value - 1 if "input_layernorm" in name else value
        assert torch.equal(source.read(name, dtype, "cpu"), wanted.to(dtype)), name


def test_only_a_vector_of_plain_numbers_is_stored_with_one_added(tmp_path: Path) -> None:
    tensors = weights(Tiny()) | {"model.layers.0.input_layernorm.weight": torch.ones(4, 16)}
    path = write_gguf(tmp_path / "t.gguf", Tiny(), tensors)
    with pytest.raises(ModelFileError, match=r"attn_norm.weight: must be a vector of plain numbers, got shape \(4, 16"):
        open_gguf(path, norms_minus_one)


def test_a_tensor_of_a_layer_has_the_layers_number() -> None:
    names = {"blk.{layer}.ffn_up_exps": "model.layers.{layer}.mlp.experts.up_proj"}
    dialect = replace(gguf_dialect("llama", "m"), tensors=names)
    known = dialect.hugging_face_tensor("blk.17.ffn_up_exps.weight")
    assert known == HuggingFaceTensor("model.layers.17.mlp.experts.up_proj.weight")
    for name in ("blk.{layer}.ffn_up_exps.weight", "blk.ffn_up_exps.weight", "blk.1.1.ffn_up_exps.weight"):
        assert dialect.hugging_face_tensor(name) is None


def test_a_mixtures_config_has_its_experts(tmp_path: Path) -> None:
    tiny = Tiny("qwen3moe", tied=True)
    found = open_gguf(write_gguf(tmp_path / "t.gguf", tiny, weights(tiny)), gguf_dialect).config
    assert found["model_type"] == "qwen3_moe"
    assert found["norm_topk_prob"] is True  # as llama.cpp computes, whatever the file was made of
    numbers = (found["num_experts"], found["num_experts_per_tok"], found["moe_intermediate_size"])
    assert numbers == (EXPERTS, 2, EXPERT_INNER)
    assert (found["use_sliding_window"], found["sliding_window"]) == (False, None)


def test_every_layer_of_a_mixture_has_the_window_of_its_file(tmp_path: Path) -> None:
    tiny = Tiny("qwen3moe", tied=True)
    path = write_gguf(tmp_path / "t.gguf", tiny, weights(tiny), keys={"attention.sliding_window": 33})
    source = open_gguf(path, gguf_dialect)
    program = load(source.config, Binder(source, torch.float32, "cpu", str(path)), str(path))
    assert [cache.window for cache in program.caches] == [33] * LAYERS


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count", "expert_feed_forward_length"])
def test_a_mixture_must_say_what_its_experts_are(tmp_path: Path, key: str) -> None:
    tiny = Tiny("qwen3moe")
    tensors = weights(tiny)
    for value in (0, None):
        with pytest.raises(ModelFileError, match=rf"qwen3moe.{key}: "):
            open_gguf(write_gguf(tmp_path / "t.gguf", tiny, tensors, keys={key: value}), gguf_dialect)
    with pytest.raises(ModelFileError, match=r"qwen3moe.expert_shared_count: 1 is not supported"):
        open_gguf(write_gguf(tmp_path / "t.gguf", tiny, tensors, keys={"expert_shared_count": 1}), gguf_dialect)


def test_an_unknown_architecture_is_refused_with_those_that_can_be_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelFileError,
        match=r"general.architecture: 'mamba' cannot be read; bert, deepseek2, gemma2, gemma3, gemma4, gpt",
    ):
        open_gguf(tmp_path / "t.gguf", gguf_dialect)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_rot_embd.weight", "blk.00.attn_q.weight", "blk.0.ffn_gate_shexp.weight", "x"]
)
def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"{name}: no tensor of a llama model has this name"):
        opened(tmp_path, {}, extra_tensors={name: np.zeros(4, dtype=np.float32)})


@pytest.mark.parametrize("quantisation", ["Q8_K", "F64", "I32", "NVFP4"])
def test_other_types_are_refused_naming_tensor_and_type(tmp_path: Path, quantisation: str) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, size[1]), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=rf"token_embd.weight: has type {quantisation}, .*Q4_0, Q4_1, .*Q6_K"):
        open_gguf(tmp_path / "t.gguf", gguf_dialect)


def test_heads_that_contradict_the_stored_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"blk.0.attn_k.weight: has shape \(32, 64\); 4 heads of 16 have 64 rows"):
        opened(tmp_path, {"attention.head_count_kv": 4})


def vocabulary_of(tmp_path: Path, **overrides: object) -> object:
    path = write_gguf(tmp_path / "t.gguf", Tiny(), weights(Tiny()), vocabulary=overrides)
    return read_vocabulary(read_gguf_header(path), VOCAB)


@pytest.mark.parametrize(("pooling", "ends"), [(None, False), (0, False), (1, True), (3, True)])
def test_only_the_texts_of_an_embedding_model_end_with_eos(tmp_path: Path, pooling: int | None, ends: bool) -> None:
    path = write_gguf(tmp_path / "t.gguf", Tiny(), weights(Tiny()), vocabulary={"ggml.add_eos_token": True})
    header = read_gguf_header(path)
    metadata = dict(header.metadata) | ({} if pooling is None else {"llama.pooling_type": pooling})
    assert read_vocabulary(replace(header, metadata=metadata), VOCAB).add_eos is ends


def test_the_vocabulary_is_read_whole(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path)
    assert (vocabulary.model, vocabulary.pre, vocabulary.file) == ("gpt2", "smollm", str(tmp_path / "t.gguf"))
    assert vocabulary.tokens[:4] == ("<unk>", "<s>", "</s>", "a")
    assert len(vocabulary.tokens) == len(vocabulary.token_types) == VOCAB
    assert vocabulary.token_types[:4] == (2, 3, 3, 1)
    assert vocabulary.merges == ("a b", "b c")
    assert vocabulary.scores == ()
    assert (vocabulary.bos, vocabulary.eos, vocabulary.unknown) == (1, 2, 0)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (False, False)
    assert vocabulary.chat_template == "{{ messages }}"


def test_a_sentencepiece_vocabulary_begins_with_bos_and_a_space_unless_it_says_otherwise(tmp_path: Path) -> None:
    scores = [float(-index) for index in range(VOCAB)]
    overrides = {"ggml.model": "llama", "ggml.scores": scores, "ggml.add_bos_token": None, "ggml.merges": None}
    vocabulary = vocabulary_of(tmp_path, **overrides, **{"ggml.bos_token_id": None, "chat_template": None})
    assert vocabulary.scores == tuple(scores)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix, vocabulary.bos) == (True, True, -1)
    assert (vocabulary.merges, vocabulary.chat_template) == ((), "")


def test_gemma_4s_texts_begin_with_bos_though_its_file_denies_it(tmp_path: Path) -> None:
    for said in (None, False, True):
        vocabulary = vocabulary_of(tmp_path, **{"ggml.model": "gemma4", "ggml.add_bos_token": said})
        assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (True, False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.tokens", None, "tokens: must be an array of str"),
        ("ggml.tokens", [1, 2], "tokens: must be an array of str"),
        ("ggml.tokens", ["a"] * (VOCAB + 1), "49 tokens do not fit an embedding of 48 rows"),
        ("ggml.token_type", [1, 1], "token_type: has 2 entries for 48 tokens"),
        ("ggml.model", None, "model: is missing"),
        ("ggml.eos_token_id", VOCAB, "eos_token_id: 48 is no token id"),
        ("ggml.eos_token_id", "x", "eos_token_id: must be of type int"),
        ("ggml.add_bos_token", 1, "add_bos_token: must be of type bool"),
        ("chat_template", 3, "tokenizer.chat_template: must be a string"),
    ],
)
def test_a_broken_vocabulary_is_refused_by_key(tmp_path: Path, key: str, value: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        vocabulary_of(tmp_path, **{key: value})


@pytest.mark.model
def test_the_default_model_opens_as_what_it_is_known_to_be(default_model: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    source = open_gguf(default_model, gguf_dialect)
    facts = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    facts |= {"head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192}
    assert source.config.items() >= (facts | {"rope_theta": 100000.0, "tie_word_embeddings": True}).items()
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(LlamaConfig(**source.config)).state_dict()
    assert source.names() | {"lm_head.weight"} == set(expected)
    assert all(source.shape(name) == tuple(expected[name].shape) for name in source.names())
    norm = source.read("model.layers.0.input_layernorm.weight", torch.float32, "cpu")
    assert 0 < norm.abs().mean() < 10


@pytest.mark.deep
@pytest.mark.model
def test_the_default_model_reads_as_transformers_reads_it(default_model: Path) -> None:
    from transformers import LlamaConfig

    source = open_gguf(default_model, gguf_dialect)
    golden = golden_tensors(default_model, LlamaConfig(**source.config))
    assert source.names() == set(golden)
    for name in source.names():
        assert torch.equal(source.read(name, torch.float32, "cpu"), golden[name].float()), name
