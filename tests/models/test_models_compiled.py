"""The whole forward as one compiled call: the numbers of the same kernels one by one, and the laws of exactness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import compiled_kernels as here
import pytest
import torch
from tiny_checkpoints import VARIANTS, cases, reference_logits, write_checkpoint

from needs import COMPILED
from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import SlotTables
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import paged_attend
from penstock.exec.state_store import StateStore
from penstock.kernels import native
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.experts import ExpertStack
from penstock.kernels.packed_stack import FusedStack, PackedStack, pack_stack
from penstock.kernels.packed_weight import PackedWeight, pack_bf16, pack_f32, quantize_int8, unpack
from penstock.kernels.state_runs import FROM_ZERO, StateRuns
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.blocks import Attention, Normalization, PlainMlp, Projection, residual
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.lowering import Gated, lower
from penstock.nn.operations import (
    Activation,
    Attend,
    Embed,
    Experts,
    Heads,
    Linear,
    NormHeads,
    NormKind,
    Operation,
    Register,
    Rotate,
)
from penstock.nn.paged import PagedAttend
from penstock.nn.program import OUT, STREAM, Head, Program
from penstock.nn.reference import ReferenceExecutor
from penstock.nn.rope import Rope, RotaryTable
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

FAMILIES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]
HYBRID = [
    each
    for each in FAMILIES
    if each[0] in ("granitemoehybrid", "lfm2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
]
"""Those that carry state."""

LATENT = [each for each in FAMILIES if each[0].startswith("deepseek")]
"""Those that keep one latent for all heads."""

WEIGHT_FORMATS = [WeightFormat.BF16, WeightFormat.INT8, WeightFormat.INT4]
FORMS = [(torch.bfloat16, fmt) for fmt in WEIGHT_FORMATS]
FORMS += [(torch.float32, WeightFormat.F32), (torch.float32, WeightFormat.INT8)]
CPU = torch.device("cpu")
LENGTHS = (37, 5, 300, 1, 18)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    here.reset()
    yield
    here.reset()


@cache
def checkpoint(family: str, variant: str) -> Path:
    directory = TemporaryDirectory()
    KEPT.append(directory)
    return write_checkpoint(Path(directory.name), family, variant)


KEPT: list[TemporaryDirectory] = []


@cache
def program_of(family: str, variant: str, fmt: WeightFormat, dtype: torch.dtype = torch.bfloat16) -> Program:
    directory = checkpoint(family, variant)
    files = open_model(directory, gguf_dialect)
    return load(files.config, Binder(files.source, dtype, "cpu", str(directory), weight_format=fmt), "m")


@cache
def model_of(family: str, variant: str, fmt: WeightFormat, dtype: torch.dtype = torch.bfloat16) -> CompiledExecutor:
    program = program_of(family, variant, fmt, dtype)
    assert why_not_compiled(program, dtype, here.backend()) is None
    return CompiledExecutor(program, dtype, here.backend())


@cache
def one_by_one_of(family: str, variant: str, fmt: WeightFormat, dtype: torch.dtype = torch.bfloat16):
    """The same program by the same kernels, operation by operation."""
    return ReferenceExecutor(program_of(family, variant, fmt, dtype), dtype, here.backend())


def prompt_of(model, length: int) -> list[int]:
    return [(7 * i + length) % model.shape.vocab_size for i in range(length)]


@dataclass
class Bench:
    """Sequences of a model over a store full of NaN."""

    model: CompiledExecutor | ReferenceExecutor
    block_size: int = 16
    packed: bool = True
    cache_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.kv = KVStore(self.model.program.caches, 96, self.block_size, self.cache_dtype, CPU, packed=self.packed)
        self.kv.fill_with_nan()
        self.tables = SlotTables(8, 512, self.block_size)
        self.states = StateStore(self.model.program.states, 8, 0, CPU)
        self.states.fill_with_nan()
        self.used = 0

    def admit(self, slot: int, tokens: list[int]) -> None:
        count = -(-len(tokens) // self.block_size)
        blocks = tuple(95 - self.used - i for i in range(count))
        self.used += count
        admit = Admit(slot, str(slot), tuple(tokens), blocks, 0, SamplingSpec((("temperature", 0),)), 0)
        self.tables.admit(admit)
        self.states.admit(admit)

    def step(self, *rows: tuple[int, int, int, bool], shift: int = 0) -> list[torch.Tensor]:
        """Hidden states of rows (slot, start, count, whether it is the prompt's last), positions moved by `shift`."""
        planned = [Row(slot, start, count, (), last) for slot, start, count, last in rows]
        for row in planned:
            self.tables.advance(row)
        batch = self.tables.batch(planned, CPU)
        model, backend = copy(self.model), here.backend()
        model.backend = backend
        with torch.inference_mode():
            attend = paged_attend(self.kv, batch, backend, self.states.states, self.states.runs(planned))
            hidden = model.forward(batch.token_ids, batch.positions + shift, attend)
        return list(hidden.split([row.count for row in planned]))


def whole(model, length: int, **options) -> torch.Tensor:
    bench = Bench(model, **options)
    bench.admit(0, prompt_of(model, length))
    return bench.step((0, 0, length, True))[0]


def exact_hidden(model: CompiledExecutor, length: int) -> torch.Tensor:
    """The same program on its packed numbers, in float32 throughout."""
    exact = ReferenceExecutor(unpacked(model.program), torch.float32, TorchBackend())
    with torch.inference_mode():
        return exact.forward(torch.tensor(prompt_of(model, length)), torch.arange(length), DenseAttention())


def unpacked(program: Program) -> Program:
    def wide(value):
        if isinstance(value, PackedWeight):
            return DenseWeight(unpack(value))
        if isinstance(value, PackedStack):
            return torch.stack([unpack(value[each]) for each in range(value.experts)])
        if isinstance(value, ExpertStack):
            return replace(value, gate_up=numbers_of(value.gate_up), down=numbers_of(value.down))
        return value.float() if isinstance(value, torch.Tensor) else value

    def all_of(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        return tuple(
            replace(each, **{field.name: wide(getattr(each, field.name)) for field in fields(each)})
            for each in operations
        )

    layers = tuple(all_of(layer) for layer in program.layers)
    return replace(program, embedding=all_of(program.embedding), layers=layers, final=all_of(program.final))


def numbers_of(stack: PackedStack | FusedStack) -> torch.Tensor:
    experts = [stack[expert] for expert in range(stack.shape[0])]
    return torch.stack([torch.cat([unpack(part) for part in weight.parts]) for weight in experts])


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).square().mean() / exact.square().mean())


def test_gates_of_whole_panels_are_joined_with_their_projection():
    def joined(family: str, variant: str) -> list[Activation]:
        layer = lower(program_of(family, variant, WeightFormat.BF16).layers[0])
        return [each.activation for each in layer if isinstance(each, Gated)]

    assert joined("gemma2", "wide_heads_tied_small_window") == [Activation.GELU_NEW_AND_MUL]
    assert joined("gemma2", "one_to_one_untied_uncapped") == [], "56 gates are no whole panels"
    assert joined("gpt2", "tied") == []
    wide = program_of("gemma2", "wide_heads_tied_small_window", WeightFormat.DENSE)
    assert not any(isinstance(each, Gated) for each in lower(wide.layers[0])), "plain weights have no panels"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize(("family", "variant"), cases(FAMILIES))
def test_one_call_computes_what_the_kernels_one_by_one_do(family, variant, fmt):
    """Both against the same numbers in float32: one call rounds less often, and the rest is the luck of roundings."""
    model = model_of(family, variant, fmt)
    exact = exact_hidden(model, 40)
    ours, one_by_one = whole(model, 40), whole(one_by_one_of(family, variant, fmt), 40)
    assert one_by_one.dtype == torch.bfloat16
    assert not torch.equal(ours, one_by_one), "the second did not run one by one"
    assert error(ours, exact) <= 1.5 * error(one_by_one, exact)
    assert error(ours, exact) < (0.05**2 if fmt is WeightFormat.BF16 else 0.15**2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "variant"), cases(FAMILIES))
def test_one_call_errs_no_more_than_transformers_does_in_bfloat16(family, variant):
    model, directory = model_of(family, variant, WeightFormat.BF16), checkpoint(family, variant)
    ours = model.logits(whole(model, 40))
    exact = reference_logits(directory, prompt_of(model, 40))
    theirs = reference_logits(directory, prompt_of(model, 40), torch.bfloat16)
    assert error(ours, exact) <= 1.5 * error(theirs, exact)


@pytest.mark.parametrize("fmt", [WeightFormat.F32, WeightFormat.INT8])
@pytest.mark.parametrize(("family", "variant"), cases(FAMILIES))
def test_one_call_in_float32_has_the_bits_of_the_kernels_one_by_one(family, variant, fmt):
    """Nothing is rounded between kernels, so there is nothing that one call could round less often."""
    ours = whole(model_of(family, variant, fmt, torch.float32), 40, cache_dtype=torch.float32)
    assert ours.dtype == torch.float32
    one_by_one = one_by_one_of(family, variant, fmt, torch.float32)
    assert torch.equal(ours, whole(one_by_one, 40, cache_dtype=torch.float32))


@pytest.mark.parametrize(("family", "variant"), cases(FAMILIES))
def test_one_call_in_float32_computes_what_transformers_does(family, variant):
    model = model_of(family, variant, WeightFormat.F32, torch.float32)
    ours = model.logits(whole(model, 40, cache_dtype=torch.float32))
    theirs = reference_logits(checkpoint(family, variant), prompt_of(model, 40))
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(("dtype", "fmt"), FORMS)
@pytest.mark.parametrize(
    ("family", "variant"),
    cases(
        [
            *((family, variant) for family, variant in FAMILIES if family in ("gemma2", "gemma3_text", "olmo2")),
            ("gpt2", "odd_heads"),
            ("gpt2", "untied_inner_gelu"),
            ("llama", "all_to_one_biases_llama3"),
            ("phi3", "partial_short_window"),
            ("qwen3", "wide_heads_tied"),
            ("qwen3", "all_to_one_narrow_heads"),
            *(("qwen3_moe", variant) for variant in VARIANTS["qwen3_moe"]),
            *(("gpt_oss", variant) for variant in VARIANTS["gpt_oss"]),
            *(("gemma4_text", variant) for variant in VARIANTS["gemma4_text"]),
            ("mixtral", "all_to_one_narrow_heads_small_window"),
            ("qwen2_moe", "wide_heads_tied_unused_experts"),
            ("granite", "wide_heads_untied_factors"),
            ("smollm3", "all_to_one_biases_llama3_interval"),
            ("qwen3_vl_moe", "wide_heads_untied_unused_experts"),
            ("starcoder2", "wide_heads_tied_small_window"),
            *HYBRID,
        ]
    ),
)
def test_a_tokens_bits_depend_on_its_own_sequence_alone(family, variant, dtype, fmt, cache_dtype):
    assert_bits_depend_on_the_sequence_alone(model_of(family, variant, fmt, dtype), cache_dtype or dtype)


@pytest.mark.parametrize(("dtype", "fmt"), FORMS)
@pytest.mark.parametrize(("family", "variant"), cases(LATENT))
@pytest.mark.parametrize("cache_dtype", [None, pytest.param(torch.int8, marks=pytest.mark.deep)])
def test_a_tokens_bits_over_a_latent_depend_on_its_own_sequence_alone(family, variant, dtype, fmt, cache_dtype):
    assert_bits_depend_on_the_sequence_alone(model_of(family, variant, fmt, dtype), cache_dtype or dtype)


def assert_bits_depend_on_the_sequence_alone(model: CompiledExecutor, cache_dtype: torch.dtype) -> None:
    alone = [whole(model, length, cache_dtype=cache_dtype) for length in LENGTHS]
    together = Bench(model, block_size=5, packed=False, cache_dtype=cache_dtype)
    for slot, length in enumerate(LENGTHS):
        together.admit(slot, prompt_of(model, length))
    here.set_threads(3)
    for got, wanted in zip(together.step(*((s, 0, n, True) for s, n in enumerate(LENGTHS))), alone, strict=True):
        assert torch.equal(got, wanted)
    here.set_threads(2)
    chunked = Bench(model, block_size=7, cache_dtype=cache_dtype)
    chunked.admit(0, prompt_of(model, 300))
    chunked.admit(1, prompt_of(model, 37))
    first = chunked.step((0, 0, 260, False), (1, 0, 1, False))
    second = chunked.step((1, 1, 35, False), (0, 260, 39, False))
    third = chunked.step((0, 299, 1, True), (1, 36, 1, True))
    assert torch.equal(torch.cat((first[0], second[1], third[0])), alone[2])
    assert torch.equal(torch.cat((first[1], second[0], third[1])), alone[0])


@pytest.mark.parametrize(("dtype", "fmt"), FORMS)
def test_soft_capped_logits_do_not_depend_on_the_rows_beside_them(dtype, fmt):
    model = model_of("gemma2", "wide_heads_tied_small_window", fmt, dtype)
    assert model.program.head.softcap is not None
    hidden = whole(model, 37, cache_dtype=dtype)
    with torch.inference_mode():
        together = model.logits(hidden)
        for row in range(len(hidden)):
            assert torch.equal(model.logits(hidden[row : row + 1])[0], together[row])


@pytest.mark.parametrize(("family", "softcap"), [("gemma2", 6.5), ("llama", None)])
def test_a_head_scales_logits_before_it_caps_them(family, softcap):
    variant = VARIANTS[family][0]
    model = copy(model_of(family, variant, WeightFormat.INT8))
    plain = replace(model.program, head=replace(model.program.head, softcap=None))
    hidden = whole(model, 37)
    model.program = plain
    wanted = model.logits(hidden) * 0.125
    if softcap is not None:
        wanted = softcap * torch.tanh(wanted / softcap)
    model.program = replace(plain, head=replace(plain.head, softcap=softcap, scale=0.125))
    assert torch.equal(model.logits(hidden), wanted)
    assert str(model.program).endswith("scale 0.125)" if softcap is None else "scale 0.125, softcap 6.5)")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, WeightFormat.INT8), (torch.float32, WeightFormat.F32)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gpt2", "tied"),
        ("qwen3", "wide_heads_tied"),
        ("qwen3_moe", "wide_heads_tied_unused_experts"),
        *cases(HYBRID[::3]),
        *cases(LATENT),
    ],
)
def test_bits_do_not_depend_on_which_thread_takes_which_part(family, variant, packed, dtype, fmt):
    model = model_of(family, variant, fmt, dtype)
    lengths = (301, 3, 64, 1, 90)  # cut in the middle of a prompt, of a block and of a pair of positions
    for cache_dtype in (dtype, torch.int8) if dtype is torch.bfloat16 else (dtype,):
        results = []
        for threads in (1, 2, 3, 8, 16):
            here.set_threads(threads)
            for _ in range(3):
                bench = Bench(model, packed=packed, cache_dtype=cache_dtype)
                for slot, length in enumerate(lengths):
                    bench.admit(slot, prompt_of(model, length))
                results.append(torch.cat(bench.step(*((slot, 0, length, True) for slot, length in enumerate(lengths)))))
        assert all(torch.equal(got, results[0]) for got in results[1:])


NO_TEAM = ("deepseek", "granitemoehybrid", "lfm2", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5", "moe", "gemma4")
"""Parts of the names of families that no team goes through: experts, states, latents, inputs that are used up."""


@pytest.mark.parametrize("family", VARIANTS)
def test_threads_go_through_dense_models_as_a_team(family):
    model = model_of(family, VARIANTS[family][0], WeightFormat.INT8)
    assert model.suits_team != any(part in family for part in NO_TEAM)


@pytest.mark.parametrize(("family", "variant"), cases(FAMILIES))
def test_bits_of_few_tokens_do_not_depend_on_the_threads_that_walk_together(family, variant):
    model = model_of(family, variant, WeightFormat.INT8)
    lengths = (59, 18, 40)
    results = []
    for threads in (1, 2, 3, 4):
        here.set_threads(threads)
        bench = Bench(model)
        for slot, length in enumerate(lengths):
            bench.admit(slot, prompt_of(model, length))
        parts = bench.step(*((slot, 0, length - 16, False) for slot, length in enumerate(lengths)))
        for at, count in ((0, 1), (1, 1), (2, 4), (6, 5), (11, 1), (12, 4)):  # of each row: 3 to 15 tokens
            rows = [(slot, length - 16 + at, count, at == 12) for slot, length in enumerate(lengths)]
            parts += bench.step(*rows)
        results.append(torch.cat(parts))
    assert all(torch.equal(got, results[0]) for got in results[1:])


@pytest.mark.parametrize(("dtype", "fmt"), FORMS)
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gpt2", "tied"),
        ("gpt2", "untied_inner_gelu"),
        ("gpt2", "one_head_relu"),
        ("qwen3", "wide_heads_tied"),
        ("qwen3_moe", "one_to_one_biases_every_expert_in_every_other_layer"),
        *cases(HYBRID[::3]),
        *cases(LATENT),
    ],
)
def test_every_instruction_set_computes_nearly_the_same(family, variant, dtype, fmt):
    model, best = model_of(family, variant, fmt, dtype), here.isa()
    wanted = whole(model, 40, cache_dtype=dtype).float()
    most = {WeightFormat.F32: 1e-5, WeightFormat.BF16: 0.02}.get(fmt, 0.05)  # a last bit may tip a code over, 1 in 127
    try:
        for isa in native.isas():
            here.set_isa(isa)
            assert error(whole(model, 40, cache_dtype=dtype), wanted) < most**2
    finally:
        here.set_isa(best)


def test_experts_whose_gates_and_ups_differ_in_kind_are_one_exact_compiled_call():
    def apart(operation: Operation) -> Operation:
        if not isinstance(operation, Experts):
            return operation
        gates, ups = numbers_of(operation.stack.gate_up).chunk(2, dim=1)
        stacks = (
            pack_stack(len(gates), lambda e, memory: quantize_int8(gates[e].contiguous(), memory)),
            pack_stack(len(ups), lambda e, memory: pack_bf16(ups[e].bfloat16().contiguous(), memory)),
        )
        return replace(operation, stack=replace(operation.stack, gate_up=FusedStack(stacks)))

    program = program_of("qwen3_moe", "wide_heads_tied_unused_experts", WeightFormat.BF16)
    program = replace(program, layers=tuple(tuple(map(apart, layer)) for layer in program.layers))
    assert why_not_compiled(program, torch.bfloat16, here.backend()) is None
    model = CompiledExecutor(program, torch.bfloat16, here.backend())
    one_by_one = ReferenceExecutor(program, torch.bfloat16, here.backend())
    exact = exact_hidden(model, 40)
    assert error(whole(model, 40), exact) <= 1.5 * error(whole(one_by_one, 40), exact)
    assert_bits_depend_on_the_sequence_alone(model, torch.bfloat16)


@pytest.mark.parametrize(("family", "variant"), [("gpt2", "odd_heads"), ("llama", "wide_heads_untied")])
def test_a_cache_in_float32_serves_too(family, variant):
    model = model_of(family, variant, WeightFormat.BF16)
    ours, wanted = whole(model, 20, cache_dtype=torch.float32).float(), whole(model, 20).float()
    assert (ours - wanted).square().mean() / wanted.square().mean() < 0.02**2


@pytest.mark.parametrize("executor_of", [model_of, one_by_one_of])
@pytest.mark.parametrize(("family", "variant"), cases(FAMILIES))
def test_an_int8_cache_serves_too(family, variant, executor_of):
    model = executor_of(family, variant, WeightFormat.BF16)
    ours = whole(model, 40, cache_dtype=torch.int8)
    assert not torch.equal(ours, whole(model, 40)), "nothing was rounded to int8"
    assert error(ours, exact_hidden(model, 40)) < 0.1**2


def test_rounding_a_latent_to_int8_loses_no_more_than_rounding_keys_and_values():
    """In a latent every head reads the same rounded numbers. Mean KL divergence from a cache in float32."""

    def lost(family: str, variant: str) -> float:
        model = model_of(family, variant, WeightFormat.F32, torch.float32)
        exact, ours = (
            model.logits(whole(model, 300, cache_dtype=dtype)).log_softmax(-1) for dtype in (torch.float32, torch.int8)
        )
        return float((exact.exp() * (exact - ours)).sum(-1).mean())

    of_latents = [lost(*each) for each in LATENT]
    assert 0 < max(of_latents) < lost("llama", "wide_heads_untied")


def test_what_the_compiled_kernels_do_not_do_is_said():
    backend = here.backend()
    for dtype in (torch.float32, torch.bfloat16):
        assert "is not multiplied" in why_not_compiled(
            program_of("gpt2", "tied", WeightFormat.DENSE, dtype), dtype, backend
        )
    packed = program_of("gpt2", "tied", WeightFormat.BF16)
    assert "not in torch.float16" in why_not_compiled(packed, torch.float16, backend)
    assert "the backend torch" in why_not_compiled(packed, torch.bfloat16, TorchBackend())
    assert "heads of 513 are wider than 512" in why_not_compiled(small(head_dim=513), torch.bfloat16, backend)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("there must be 6 states", lambda states, runs: (states[:-1], runs)),
        ("does not have the size", lambda states, runs: (states[::-1], runs)),
        ("wants runs", lambda states, runs: (states, None)),
        ("the number of tokens", lambda states, runs: (states, StateRuns.of([(3, FROM_ZERO, 0)]))),
        ("reads a place", lambda states, runs: (states, StateRuns.of([(4, 8, 0)]))),
        ("a state must be", lambda states, runs: ([each.double() for each in states], runs)),
    ],
)
def test_states_and_runs_that_do_not_fit_are_refused_before_anything_is_written(message, change):
    bench = Bench(model_of("granitemoehybrid", "wide_heads_untied_factors", WeightFormat.BF16))
    bench.admit(0, prompt_of(bench.model, 4))
    row = Row(0, 0, 4, (), True)
    bench.tables.advance(row)
    batch = bench.tables.batch([row], CPU)
    states, runs = change(bench.states.states, bench.states.runs([row]))
    attend = paged_attend(bench.kv, batch, here.backend(), states, runs)
    with pytest.raises(ValueError, match=message):
        bench.model.forward(batch.token_ids, batch.positions, attend)
    assert all(bool(held.isnan().all()) for held in (*bench.states.states, *bench.kv.keys))


BAD = {
    "positions": ("a position lies outside", lambda a: a["positions"].fill_(512)),
    "negative position": ("a position lies outside", lambda a: a["positions"].fill_(-1)),
    "write_slots": ("write_slots names a slot", lambda a: a["write_slots"].fill_(96 * 16)),
    "q_start": ("q_start must go", lambda a: a["q_start"].fill_(3)),
    "kv_len short": ("kv_len must count", lambda a: a["kv_len"].fill_(1)),
    "kv_len long": ("block_table is too narrow", lambda a: a["kv_len"].fill_(500)),
    "block_table": ("block_table names a block", lambda a: a["block_table"].fill_(96)),
    "positions dtype": ("positions must be", lambda a: a.update(positions=a["positions"].int())),
    "caches": ("caches", lambda a: a.update(keys=a["keys"][:-1])),
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
    model = model_of("llama", "wide_heads_untied", WeightFormat.BF16)
    kv = KVStore(model.program.caches, 96, 16, torch.bfloat16, CPU, packed=True)
    for held in (*kv.keys, *kv.values):
        held.fill_(3.0)
    step = {
        "positions": torch.arange(4),
        "write_slots": torch.arange(4) + 32,
        "keys": kv.keys,
        "values": kv.values,
        "q_start": torch.tensor([0, 4], dtype=torch.int32),
        "kv_len": torch.tensor([4], dtype=torch.int32),
        "block_table": torch.tensor([[2]], dtype=torch.int32),
    }
    message, spoil = BAD[bad]
    spoil(step)
    positions = step.pop("positions")
    with pytest.raises(ValueError, match=message):
        model.forward(torch.arange(4), positions, PagedAttend(**step, backend=here.backend()))
    assert all(bool((held == 3.0).all()) for held in (*kv.keys, *kv.values))


def small(
    *, norm_bias: bool = True, norm_kind: NormKind = NormKind.LAYER, head_dim: int = 2, inner: int = 6, rope=None, **mlp
) -> Program:
    """A program of one layer, 4 wide, with two heads."""
    stream, ones = Register(STREAM, 4), torch.ones(4)

    def projection(outputs: int, inputs: int) -> Projection:
        return Projection(pack_bf16(torch.ones(outputs, inputs)))

    norm = Normalization(norm_kind, ones, ones if norm_bias else None, 1e-5)
    width = 2 * head_dim
    attention = Attention(
        Heads(2, 2, head_dim), projection(3 * width, 4), projection(4, width), 0, AttentionSpec(1.0), rope
    )
    feed_forward = PlainMlp(projection(inner, 4), projection(4, 6), 6, **{"activation": Activation.GELU_NEW, **mlp})
    return Program(
        shape=ModelShape(1, 4, 2, 2, head_dim, 8, 9),
        embedding=(Embed(stream, DenseWeight(torch.ones(8, 4))),),
        layers=((*residual(stream, attention, before=norm), *residual(stream, feed_forward, before=norm)),),
        final=norm(stream, Register(OUT, 4)),
        head=Head(DenseWeight(torch.ones(8, 4))),
        caches=(KvCacheSpec(2, head_dim),),
    )


def unlike_layers(pack: Callable[[torch.Tensor], PackedWeight]) -> Program:
    """Three layers, 24 wide, of other heads each: the first sees a window, the third reads the second's cache."""
    generator, stream, rotations = torch.Generator().manual_seed(1), Register(STREAM, 24), {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def projection(outputs: int, inputs: int) -> Projection:
        return Projection(pack(2.0 * random(outputs, inputs)))

    def norm() -> Normalization:
        return Normalization(NormKind.RMS, 1.0 + random(24), None, 1e-5)

    def rope(head_dim: int) -> RotaryTable:
        if head_dim not in rotations:
            rotations[head_dim] = RotaryTable.build(Rope(share=0.5), head_dim, 512, CPU)
        return rotations[head_dim]

    def attention(heads: Heads, cache: int, window: int | None) -> Attention:
        return Attention(
            heads=heads,
            qkv=projection((heads.queries + 2 * heads.keys) * heads.dim, 24),
            output=projection(24, heads.queries * heads.dim),
            cache=cache,
            spec=AttentionSpec(heads.dim**-0.5, window=window),
            rope=rope(heads.dim),
        )

    def reader(heads: Heads, cache: int) -> tuple[Operation, ...]:
        width = heads.queries * heads.dim
        normed, q, mixed = Register("normed", 24), Register("q", width), Register("mixed", width)
        return (
            *norm()(stream, normed),
            Linear(q, normed, projection(width, 24).weight),
            Rotate(q, heads.dim, rope(heads.dim)),
            Attend(mixed, q, None, None, cache, heads, AttentionSpec(heads.dim**-0.5)),
            Linear(stream, mixed, projection(24, width).weight, adds=True),
        )

    return Program(
        shape=ModelShape(3, 24, 6, 2, 20, 101, 512),
        embedding=(Embed(stream, DenseWeight(random(101, 24) * 5.0)),),
        layers=(
            residual(stream, attention(Heads(3, 1, 12), 0, 29), before=norm()),
            residual(stream, attention(Heads(6, 2, 20), 1, None), before=norm()),
            reader(Heads(4, 2, 20), 1),
        ),
        final=norm()(stream, Register(OUT, 24)),
        head=Head(projection(101, 24).weight),
        caches=(KvCacheSpec(1, 12, 29), KvCacheSpec(2, 20)),
    )


UNLIKE = [(pack_f32, torch.float32), (pack_bf16, torch.bfloat16), (quantize_int8, torch.bfloat16)]


@pytest.mark.parametrize(("pack", "dtype"), UNLIKE)
def test_layers_with_heads_of_their_own_and_a_shared_cache_compute_what_the_reference_does(pack, dtype):
    program = unlike_layers(pack)
    model = CompiledExecutor(program, dtype, here.backend())
    ours, one_by_one = (
        whole(executor, 70, cache_dtype=dtype).float()
        for executor in (model, ReferenceExecutor(program, dtype, here.backend()))
    )
    exact = exact_hidden(model, 70)
    if dtype == torch.float32:
        assert torch.equal(ours, one_by_one)
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0)
    else:
        assert error(ours, exact) <= 1.5 * error(one_by_one, exact)
        assert error(ours, exact) < 0.15**2


@pytest.mark.parametrize(("pack", "dtype"), UNLIKE)
def test_bits_of_layers_that_share_a_cache_depend_on_the_sequence_alone(pack, dtype):
    model = CompiledExecutor(unlike_layers(pack), dtype, here.backend())
    alone = [whole(model, length, cache_dtype=dtype) for length in LENGTHS]
    for threads, block_size, packed in ((1, 16, True), (3, 5, False), (16, 7, True)):
        here.set_threads(threads)
        together = Bench(model, block_size=block_size, packed=packed, cache_dtype=dtype)
        for slot, length in enumerate(LENGTHS):
            together.admit(slot, prompt_of(model, length))
        rows = ((slot, 0, length, True) for slot, length in enumerate(LENGTHS))
        assert all(map(torch.equal, together.step(*rows), alone))
        chunked = Bench(model, block_size=block_size, packed=packed, cache_dtype=dtype)
        chunked.admit(0, prompt_of(model, 300))
        chunked.admit(1, prompt_of(model, 37))
        first = chunked.step((0, 0, 261, False), (1, 0, 1, False))
        second = chunked.step((1, 1, 35, False), (0, 261, 38, False))
        third = chunked.step((0, 299, 1, True), (1, 36, 1, True))
        assert torch.equal(torch.cat((first[0], second[1], third[0])), alone[2])
        assert torch.equal(torch.cat((first[1], second[0], third[1])), alone[0])


def test_a_program_is_refused_that_does_not_fit_its_weights():
    def table(width: int, positions: int = 9) -> RotaryTable:
        return RotaryTable(torch.ones(positions, width), torch.ones(positions, width))

    assert CompiledExecutor(small(rope=table(1)), torch.bfloat16, here.backend()), "and the rest of it fits"
    for message, program in {
        "an RMS norm has no bias": small(norm_kind=NormKind.RMS),
        "does not have the sizes of its operands": small(inner=7),
        "widths do not fit": small(activation=Activation.GELU_NEW_AND_MUL),
        "rotation wants an even rotary_dim": small(rope=table(2)),
        "cos must be": small(rope=table(1, positions=0)),
    }.items():
        with pytest.raises(ValueError, match=message):
            CompiledExecutor(program, torch.bfloat16, here.backend())


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (
            "not rotated alike",
            lambda ops, q, k: [each for each in ops if not (isinstance(each, Rotate) and each.x == k)],
        ),
        ("done to no query or key", lambda ops, q, k: [replace(ops[0], x=Register("qkv", 4, 1)), *ops]),
        ("done to no query or key", lambda ops, q, k: ops[:2]),
        (
            "done to no query or key",
            lambda ops, q, k: [
                NormHeads(k, torch.ones(2), 1e-5),
                NormHeads(k, torch.ones(2), 1e-5, out=Register("values", 4)),
                *ops,
            ],
        ),
    ],
)
def test_what_no_kernel_does_alone_is_refused_while_a_program_is_lowered(message, change):
    table = RotaryTable(torch.ones(9, 1), torch.ones(9, 1))
    q, k, v = Register("qkv", 12).columns(0, 4), Register("qkv", 12).columns(4, 4), Register("qkv", 12).columns(8, 4)
    attend = Attend(Register("mixed", 4), q, k, v, 0, Heads(2, 2, 2), AttentionSpec(1.0))
    operations = [Rotate(q, 2, table), Rotate(k, 2, table), attend]
    assert len(lower(tuple(operations))) == 1
    with pytest.raises(ValueError, match=message):
        lower(tuple(change(operations, q, k)))


def test_norms_of_heads_that_are_no_queries_or_keys_run_alone_and_first():
    q, k, v = (Register("qkv", 12).columns(4 * i, 4) for i in range(3))
    values, ones = Register("values", 4), torch.ones(2)
    of_values, of_keys = NormHeads(k, ones, 1e-5, out=values), NormHeads(k, ones, 1e-5)
    attend = Attend(Register("mixed", 4), q, k, values, 0, Heads(2, 2, 2), AttentionSpec(1.0))
    alone, attended = lower((of_values, of_keys, attend))
    assert (alone, attended.k_norm) == (of_values, ones)
    in_place = NormHeads(v, ones, 1e-5)
    alone, attended = lower((of_keys, in_place, replace(attend, v=v)))
    assert (alone, attended.k_norm) == (in_place, ones)
    assert lower((in_place,)) == [in_place]
    assert str(of_values) == "values   <- rms_norm_heads(qkv[4:8], w[2], eps 1e-05)"
    assert str(replace(of_values, adds=True)).startswith("values   <- values + ")


def test_learned_positions_are_checked_before_anything_is_written():
    bench = Bench(model_of("gpt2", "tied", WeightFormat.BF16))
    bench.admit(0, prompt_of(bench.model, 4))
    with pytest.raises(ValueError, match="outside the table"):
        bench.step((0, 0, 4, True), shift=509)
    assert all(bool(held.isnan().all()) for held in (*bench.kv.keys, *bench.kv.values))


def test_a_step_without_rows_gives_nothing():
    model = model_of("llama", "wide_heads_untied", WeightFormat.BF16)
    kv = KVStore(model.program.caches, 2, 16, torch.bfloat16, CPU)
    none, nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    rows = PagedAttend(
        kv.keys, kv.values, none, torch.zeros(1, dtype=torch.int32), nothing, nothing.view(0, 1), here.backend()
    )
    assert model.forward(none, none, rows).shape == (0, model.shape.hidden_size)


def test_a_program_prints_what_it_does_line_by_line():
    lines = str(program_of("qwen3", "wide_heads_tied", WeightFormat.BF16)).splitlines()
    assert lines[0].startswith("stream   <- embed(token_ids, W[")
    assert "  normed   <- rms_norm(stream, w[48], eps 1e-06)" in lines
    assert any(
        line.strip().startswith("mixed    <- attend(qkv[0:120], qkv[120:160], qkv[160:200], cache 0") for line in lines
    )
    assert lines[-1] == "logits   <- head(out)"
