"""The whole forward as one compiled call: the numbers of the same kernels one by one, and the laws of exactness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tiny_checkpoints import VARIANTS, reference_logits, write_checkpoint

from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import SlotTables
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import _PagedAttend
from penstock.kernels import native, onednn_linear
from penstock.kernels.activation import gelu_new, silu_and_mul
from penstock.kernels.native_decoder import NativeDecoder, NativeLayer
from penstock.kernels.norm import layer_norm, rms_norm
from penstock.kernels.packed_weight import PackedWeight, pack_bf16, unpack
from penstock.models import load
from penstock.models.gpt2 import GPT2, GPT2Layer
from penstock.nn.decoder import Decoder, DecoderLayer
from penstock.nn.dense import DenseAttention
from penstock.nn.layers import Embedding, LayerNorm, Linear, RMSNorm
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import Packing

pytestmark = pytest.mark.skipif(not native.available(), reason="this installation has no compiled kernels")

FAMILIES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]
PACKINGS = [Packing.BF16, Packing.INT8, Packing.INT4]
FORMS = [(torch.bfloat16, packing) for packing in PACKINGS]
FORMS += [(torch.float32, Packing.F32), (torch.float32, Packing.INT8)]
CPU = torch.device("cpu")
LENGTHS = (37, 5, 300, 1, 18)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    native.set_threads(1)
    yield
    native.set_threads(1)


@cache
def checkpoint(family: str, variant: str) -> Path:
    directory = TemporaryDirectory()
    KEPT.append(directory)
    return write_checkpoint(Path(directory.name), family, variant)


KEPT: list[TemporaryDirectory] = []


@cache
def model_of(family: str, variant: str, packing: Packing, dtype: torch.dtype = torch.bfloat16) -> Decoder | GPT2:
    directory = checkpoint(family, variant)
    files = open_model(directory)
    return load(files.config, Binder(files.source, dtype, "cpu", str(directory), packing=packing), "m")


def prompt_of(model: Decoder | GPT2, length: int) -> list[int]:
    return [(7 * i + length) % model.shape.vocab_size for i in range(length)]


@dataclass(frozen=True)
class OneByOne:
    """An attend whose caches a model cannot see."""

    attend: _PagedAttend

    def __call__(self, layer, q, k, v):
        return self.attend(layer, q, k, v)


@dataclass
class Bench:
    """Sequences of a model over a store full of NaN."""

    model: Decoder | GPT2
    block_size: int = 16
    packed: bool = True
    hidden_caches: bool = False
    cache_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.kv = KVStore(self.model.shape, 96, self.block_size, self.cache_dtype, CPU, packed=self.packed)
        self.kv.fill_with_nan()
        self.tables = SlotTables(8, 512, self.block_size)
        self.used = 0

    def admit(self, slot: int, tokens: list[int]) -> None:
        count = -(-len(tokens) // self.block_size)
        blocks = tuple(95 - self.used - i for i in range(count))
        self.used += count
        self.tables.admit(Admit(slot, str(slot), tuple(tokens), blocks, 0, SamplingSpec((("temperature", 0),)), 0))

    def step(self, *rows: tuple[int, int, int, bool], shift: int = 0) -> list[torch.Tensor]:
        """Hidden states of rows (slot, start, count, whether it is the prompt's last), positions moved by `shift`."""
        planned = [Row(slot, start, count, (), last) for slot, start, count, last in rows]
        for row in planned:
            self.tables.advance(row)
        batch = self.tables.batch(planned, CPU)
        attend = _PagedAttend(self.kv, batch, self.model.shape.head_dim**-0.5)
        with torch.inference_mode():
            hidden = self.model.forward(
                batch.token_ids, batch.positions + shift, OneByOne(attend) if self.hidden_caches else attend
            )
        return list(hidden.split([row.count for row in planned]))


def whole(model: Decoder | GPT2, length: int, **options) -> torch.Tensor:
    bench = Bench(model, **options)
    bench.admit(0, prompt_of(model, length))
    return bench.step((0, 0, length, True))[0]


def exact_hidden(model: Decoder | GPT2, length: int) -> torch.Tensor:
    """The same model on its packed numbers, in float32 throughout."""
    exact = exact_gpt2(model) if isinstance(model, GPT2) else exact_decoder(model)
    with torch.inference_mode():
        return exact.forward(torch.tensor(prompt_of(model, length)), torch.arange(length), DenseAttention())


def plain(linear: Linear) -> Linear:
    weight = linear.weight
    bias = None if linear.bias is None else linear.bias.float()
    return Linear(unpack(weight) if isinstance(weight, PackedWeight) else weight.float(), bias)


def plain_table(table: Embedding) -> Embedding:
    return Embedding(plain(Linear(table.weight)).weight, torch.float32)


def wide(norm: RMSNorm | None) -> RMSNorm | None:
    return None if norm is None else replace(norm, weight=norm.weight.float())


def exact_decoder(model: Decoder) -> Decoder:
    layers = tuple(
        DecoderLayer(
            wide(layer.attention_norm),
            replace(
                layer.attention,
                qkv=plain(layer.attention.qkv),
                output=plain(layer.attention.output),
                q_norm=wide(layer.attention.q_norm),
                k_norm=wide(layer.attention.k_norm),
            ),
            wide(layer.mlp_norm),
            replace(layer.mlp, gate_up=plain(layer.mlp.gate_up), down=plain(layer.mlp.down)),
        )
        for layer in model.layers
    )
    return replace(model, embedding=plain_table(model.embedding), layers=layers, norm=wide(model.norm), compiled=None)


def exact_gpt2(model: GPT2) -> GPT2:
    def wide(norm: LayerNorm) -> LayerNorm:
        return replace(norm, weight=norm.weight.float(), bias=norm.bias.float())

    layers = tuple(
        GPT2Layer(
            wide(layer.attention_norm),
            replace(layer.attention, qkv=plain(layer.attention.qkv), output=plain(layer.attention.output)),
            wide(layer.mlp_norm),
            replace(layer.mlp, up=plain(layer.mlp.up), down=plain(layer.mlp.down)),
        )
        for layer in model.layers
    )
    tokens, positions = plain_table(model.tokens), plain_table(model.positions)
    return replace(model, tokens=tokens, positions=positions, layers=layers, norm=wide(model.norm), compiled=None)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).square().mean() / exact.square().mean())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("family", "variant"), FAMILIES)
def test_one_call_computes_what_the_kernels_one_by_one_do(family, variant, packing):
    """Both against the same numbers in float32: one call rounds less often, and the rest is the luck of roundings."""
    model = model_of(family, variant, packing)
    assert model.compiled is not None
    exact = exact_hidden(model, 40)
    ours, one_by_one = whole(model, 40), whole(model, 40, hidden_caches=True)
    assert one_by_one.dtype == torch.bfloat16
    assert not torch.equal(ours, one_by_one), "the second did not run one by one"
    assert error(ours, exact) <= 1.5 * error(one_by_one, exact)
    assert error(ours, exact) < (0.05**2 if packing is Packing.BF16 else 0.15**2)


@pytest.mark.parametrize(("family", "variant"), FAMILIES)
def test_one_call_errs_no_more_than_transformers_does_in_bfloat16(family, variant):
    model, directory = model_of(family, variant, Packing.BF16), checkpoint(family, variant)
    ours = model.logits(whole(model, 40))
    exact = reference_logits(directory, prompt_of(model, 40))
    theirs = reference_logits(directory, prompt_of(model, 40), torch.bfloat16)
    assert error(ours, exact) <= 1.5 * error(theirs, exact)


@pytest.mark.parametrize("packing", [Packing.F32, Packing.INT8])
@pytest.mark.parametrize(("family", "variant"), FAMILIES)
def test_one_call_in_float32_has_the_bits_of_the_kernels_one_by_one(family, variant, packing):
    """Nothing is rounded between kernels, so there is nothing that one call could round less often."""
    model = model_of(family, variant, packing, torch.float32)
    assert model.compiled is not None
    ours = whole(model, 40, cache_dtype=torch.float32)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, whole(model, 40, cache_dtype=torch.float32, hidden_caches=True))


@pytest.mark.parametrize(("family", "variant"), FAMILIES)
def test_one_call_in_float32_computes_what_transformers_does(family, variant):
    model = model_of(family, variant, Packing.F32, torch.float32)
    ours = model.logits(whole(model, 40, cache_dtype=torch.float32))
    theirs = reference_logits(checkpoint(family, variant), prompt_of(model, 40))
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(("dtype", "packing"), FORMS)
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gpt2", "odd_heads"),
        ("gpt2", "untied_inner_gelu"),
        ("llama", "all_to_one_biases_llama3"),
        ("qwen3", "wide_heads_tied"),
        ("qwen3", "all_to_one_narrow_heads"),
    ],
)
def test_a_tokens_bits_depend_on_its_own_sequence_alone(family, variant, dtype, packing, cache_dtype):
    cache_dtype = cache_dtype or dtype
    model = model_of(family, variant, packing, dtype)
    alone = [whole(model, length, cache_dtype=cache_dtype) for length in LENGTHS]
    together = Bench(model, block_size=5, packed=False, cache_dtype=cache_dtype)
    for slot, length in enumerate(LENGTHS):
        together.admit(slot, prompt_of(model, length))
    native.set_threads(3)
    for got, wanted in zip(together.step(*((s, 0, n, True) for s, n in enumerate(LENGTHS))), alone, strict=True):
        assert torch.equal(got, wanted)
    native.set_threads(2)
    chunked = Bench(model, block_size=7, cache_dtype=cache_dtype)
    chunked.admit(0, prompt_of(model, 300))
    chunked.admit(1, prompt_of(model, 37))
    first = chunked.step((0, 0, 260, False), (1, 0, 1, False))
    second = chunked.step((1, 1, 35, False), (0, 260, 39, False))
    third = chunked.step((0, 299, 1, True), (1, 36, 1, True))
    assert torch.equal(torch.cat((first[0], second[1], third[0])), alone[2])
    assert torch.equal(torch.cat((first[1], second[0], third[1])), alone[0])


@pytest.mark.parametrize(
    ("dtype", "packing", "cache_dtype"),
    [
        (torch.bfloat16, Packing.INT8, torch.bfloat16),
        (torch.bfloat16, Packing.INT8, torch.int8),
        (torch.float32, Packing.F32, torch.float32),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("family", "variant"), [("gpt2", "tied"), ("qwen3", "wide_heads_tied")])
def test_bits_do_not_depend_on_which_thread_takes_which_part(family, variant, packed, dtype, packing, cache_dtype):
    model = model_of(family, variant, packing, dtype)
    lengths = (301, 3, 64, 1, 90)  # cut in the middle of a prompt, of a block and of a pair of positions
    results = []
    for threads in (1, 2, 3, 8, 16):
        native.set_threads(threads)
        for _ in range(3):
            bench = Bench(model, packed=packed, cache_dtype=cache_dtype)
            for slot, length in enumerate(lengths):
                bench.admit(slot, prompt_of(model, length))
            results.append(torch.cat(bench.step(*((slot, 0, length, True) for slot, length in enumerate(lengths)))))
    assert all(torch.equal(got, results[0]) for got in results[1:])


@pytest.mark.parametrize(("dtype", "packing"), FORMS)
@pytest.mark.parametrize(
    ("family", "variant"),
    [("gpt2", "tied"), ("gpt2", "untied_inner_gelu"), ("gpt2", "one_head_relu"), ("qwen3", "wide_heads_tied")],
)
def test_every_instruction_set_computes_nearly_the_same(family, variant, dtype, packing):
    model, best = model_of(family, variant, packing, dtype), native.isa()
    wanted = whole(model, 40, cache_dtype=dtype).float()
    most = {Packing.F32: 1e-5, Packing.BF16: 0.02}.get(packing, 0.05)  # a last bit may tip a code over, 1 in 127
    try:
        for isa in native.isas():
            native.set_isa(isa)
            assert error(whole(model, 40, cache_dtype=dtype), wanted) < most**2
    finally:
        native.set_isa(best)


@pytest.mark.parametrize(("family", "variant"), [("gpt2", "odd_heads"), ("llama", "wide_heads_untied")])
def test_a_cache_in_float32_serves_too(family, variant):
    model = model_of(family, variant, Packing.BF16)
    ours, wanted = whole(model, 20, cache_dtype=torch.float32).float(), whole(model, 20).float()
    assert (ours - wanted).square().mean() / wanted.square().mean() < 0.02**2


@pytest.mark.parametrize("hidden_caches", [False, True])
@pytest.mark.parametrize(("family", "variant"), FAMILIES)
def test_an_int8_cache_serves_too(family, variant, hidden_caches):
    model = model_of(family, variant, Packing.BF16)
    ours = whole(model, 40, cache_dtype=torch.int8, hidden_caches=hidden_caches)
    assert not torch.equal(ours, whole(model, 40, hidden_caches=hidden_caches)), "nothing was rounded to int8"
    assert error(ours, exact_hidden(model, 40)) < 0.1**2


@pytest.mark.parametrize(("family", "variant"), [("gpt2", "tied"), ("llama", "wide_heads_untied")])
def test_a_model_with_plain_weights_runs_one_by_one(family, variant):
    directory = checkpoint(family, variant)
    files = open_model(directory)
    for dtype in (torch.float32, torch.bfloat16):
        assert load(files.config, Binder(files.source, dtype, "cpu", "m"), "m").compiled is None
    if onednn_linear.available():
        assert model_of("llama", "wide_heads_untied", Packing.ONEDNN).compiled is None


BAD = {
    "positions": ("a position lies outside", lambda a: a["positions"].fill_(512)),
    "negative position": ("a position lies outside", lambda a: a["positions"].fill_(-1)),
    "write_slots": ("write_slots names a slot", lambda a: a["write_slots"].fill_(96 * 16)),
    "q_start": ("q_start must go", lambda a: a["q_start"].fill_(3)),
    "kv_len short": ("kv_len must count", lambda a: a["kv_len"].fill_(1)),
    "kv_len long": ("block_table is too narrow", lambda a: a["kv_len"].fill_(500)),
    "block_table": ("block_table names a block", lambda a: a["block_table"].fill_(96)),
    "stream": ("stream must be", lambda a: a.update(stream=a["stream"][:, :-1])),
    "stream dtype": ("stream must be", lambda a: a.update(stream=a["stream"].bfloat16())),
    "positions dtype": ("positions must be", lambda a: a.update(positions=a["positions"].int())),
    "layers": ("layers", lambda a: a.update(keys=a["keys"][:-1])),
    "shape of keys": ("k_cache must be", lambda a: a.update(keys=[k[..., :1] for k in a["keys"]])),
    "mixed layouts": (
        "must be",
        lambda a: a.update(
            keys=[*a["keys"][:-1], torch.empty(96, 16, 2, 20, dtype=torch.bfloat16)],
        ),
    ),
    "rows of the table": ("block_table must be", lambda a: a.update(block_table=a["block_table"][:0])),
}


@pytest.mark.parametrize("bad", BAD)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(bad):
    model = model_of("llama", "wide_heads_untied", Packing.BF16)
    kv = KVStore(model.shape, 96, 16, torch.bfloat16, CPU, packed=True)
    for held in (*kv.keys, *kv.values):
        held.fill_(3.0)
    step = {
        "stream": torch.ones(4, model.shape.hidden_size),
        "positions": torch.arange(4),
        "write_slots": torch.arange(4) + 32,
        "keys": kv.keys,
        "values": kv.values,
        "q_start": torch.tensor([0, 4], dtype=torch.int32),
        "kv_len": torch.tensor([4], dtype=torch.int32),
        "block_table": torch.tensor([[2]], dtype=torch.int32),
        "scale": 0.2,
    }
    message, spoil = BAD[bad]
    spoil(step)
    before = step["stream"].clone()
    with pytest.raises(ValueError, match=message):
        model.compiled.run(**step)
    assert torch.equal(step["stream"], before)
    assert all(bool((held == 3.0).all()) for held in (*kv.keys, *kv.values))


def plan(**changed: object) -> NativeDecoder:
    """A decoder of one layer, 4 wide, with two heads, of layer norms and without gates or rotation."""
    ones, described = torch.ones(4), {}
    qkv, output, up, down = ((pack_bf16(torch.ones(n, k)), None) for n, k in ((12, 4), (4, 4), (6, 4), (4, 6)))
    described["layers"] = [NativeLayer((ones, ones), qkv, None, None, output, (ones, ones), up, down)]
    described |= {"hidden": 4, "inner": 6, "q_heads": 2, "kv_heads": 2, "head_dim": 2, "eps": 1e-5}
    described |= {"normalise": layer_norm, "activation": gelu_new, "norm": (ones, ones), "rotation": None}
    described |= {"dtype": torch.bfloat16}
    return NativeDecoder(**described | changed)


def test_a_plan_is_refused_that_does_not_fit_its_weights():
    table, ones = torch.ones(9, 1), torch.ones(4)
    assert plan(rotation=(table, table)), "and the rest of it fits"
    for message, changed in {
        "must be one of rms_norm, layer_norm": {"normalise": gelu_new},
        "must be one of silu_and_mul, gelu_new, gelu, relu": {"activation": rms_norm},
        "dtype must be float32 or bfloat16": {"dtype": torch.float16},
        "an RMS norm has no bias": {"normalise": rms_norm},
        "does not have the sizes of its place": {"activation": silu_and_mul},
        "the bias of norm must be": {"norm": (ones, torch.ones(3))},
        r"cos must be \[P, 1\]": {"rotation": (torch.ones(9, 2), table)},
        "cos must be": {"rotation": (table[:0], table[:0])},
        "rotation wants": {"rotation": (table, table), "head_dim": 3},
    }.items():
        with pytest.raises(ValueError, match=message):
            plan(**changed)


def test_learned_positions_are_checked_before_anything_is_written():
    bench = Bench(model_of("gpt2", "tied", Packing.BF16))
    bench.admit(0, prompt_of(bench.model, 4))
    with pytest.raises(ValueError, match="outside the table"):
        bench.step((0, 0, 4, True), shift=509)
    assert all(bool(held.isnan().all()) for held in (*bench.kv.keys, *bench.kv.values))


def test_a_step_without_rows_gives_nothing():
    model = model_of("llama", "wide_heads_untied", Packing.BF16)
    kv = KVStore(model.shape, 2, 16, torch.bfloat16, CPU)
    none, nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    out = model.compiled.run(
        torch.empty(0, model.shape.hidden_size),
        *(none, none, kv.keys, kv.values, torch.zeros(1, dtype=torch.int32), nothing, nothing.view(0, 1), 1.0),
    )
    assert out.shape == (0, model.shape.hidden_size)
