"""A program divided among ranks computes what the whole one does, and every rank has its share of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import compiled_kernels as here
import pytest
import torch
from dividing_harness import DenseCutter, on_ranks
from tiny_checkpoints import VARIANTS, cases, load_model, write_checkpoint

from needs import COMPILED
from penstock.contract.errors import ConfigError
from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import SlotTables
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import paged_attend
from penstock.exec.state_store import StateStore
from penstock.kernels import native
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.divided import DividedExecutor
from penstock.nn.dividing import divide, vocabulary_share
from penstock.nn.operations import AllReduce, Attend, Experts, Linear
from penstock.nn.program import Program
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.divided_binder import DividedBinder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

KEPT: list[TemporaryDirectory] = []
CPU = torch.device("cpu")

ONE_KEY_HEAD = ("all_to_one", "one_head", "one_to_one_tied_biases_keys_as_values", "partial")
"""How the names of variants begin in which some layer has a single key head, which two ranks cannot share."""

LATENT = [(family, variant) for family in ("deepseek_v2", "deepseek_v3") for variant in VARIANTS[family]]
"""Those whose attention is not divided, whatever it has."""

DIVISIBLE = LATENT + [
    (family, variant)
    for family, variants in VARIANTS.items()
    for variant in variants
    if not variant.startswith(ONE_KEY_HEAD) and not family.startswith("deepseek")
]

compiled = pytest.mark.skipif(not native.available(), reason=COMPILED)


@cache
def checkpoint(family: str, variant: str) -> Path:
    KEPT.append(directory := TemporaryDirectory())
    return write_checkpoint(Path(directory.name), family, variant)


@cache
def whole_of(family: str, variant: str) -> ReferenceExecutor:
    return load_model(checkpoint(family, variant))


def ids_of(vocab_size: int, count: int) -> list[int]:
    return [(7 * at + 3) % vocab_size for at in range(count)]


def logits_of(model: ReferenceExecutor, chunks: tuple[int, ...] = (23, 1, 9)) -> torch.Tensor:
    attend, start, found = DenseAttention(), 0, []
    ids = torch.tensor(ids_of(model.shape.vocab_size, sum(chunks)))
    with torch.inference_mode():
        for count in chunks:
            positions = torch.arange(start, start + count)
            found.append(model.logits(model.forward(ids[start : start + count], positions, attend)))
            start += count
    return torch.cat(found)


def divided_logits(model: ReferenceExecutor, ranks: int) -> list[torch.Tensor]:
    def work(group):
        own = divide(model.program, group.rank, ranks, DenseCutter())
        return logits_of(ReferenceExecutor(own, torch.float32, TorchBackend(), group))

    return on_ranks(ranks, work)


@pytest.mark.parametrize(("family", "variant"), cases(DIVISIBLE))
def test_two_ranks_compute_what_one_does(family, variant):
    model = whole_of(family, variant)
    whole = logits_of(model)
    first, second = divided_logits(model, 2)
    assert torch.equal(first, second), "the ranks have different bits"
    assert not torch.equal(first, whole), "nothing was added up in another order: was anything divided?"
    assert (first - whole).abs().max() < 2e-5 * whole.abs().max()


FOUR_HEADS = "gemma2", "one_to_one_untied_uncapped"
"""Of 24 columns, with as many key heads."""


def test_four_ranks_share_four_heads():
    model = whole_of(*FOUR_HEADS)
    whole, parts = logits_of(model), divided_logits(model, 4)
    assert all(torch.equal(parts[0], each) for each in parts)
    assert (parts[0] - whole).abs().max() < 2e-5 * whole.abs().max()


@pytest.mark.parametrize(
    ("family", "variant"), [(family, next(iter(VARIANTS[family]))) for family in ("llama", "gpt_oss", "lfm2")]
)
def test_every_number_of_a_large_matrix_belongs_to_one_rank(family, variant):
    """Only routers are whole on each rank; heads, MLPs, experts, convolutions and the vocabulary are shared out."""
    program, whole, parts = whole_of(family, variant).program, DenseCutter(), [DenseCutter(), DenseCutter()]
    divide(program, 0, 1, whole)
    for rank, cutter in enumerate(parts):
        divide(program, rank, 2, cutter)
    routers = sum(
        each.spec.experts * program.shape.hidden_size for each in program.operations() if isinstance(each, Experts)
    )
    assert parts[0].numbers + parts[1].numbers == whole.numbers + routers
    assert max(each.numbers for each in parts) < 0.6 * whole.numbers


def test_heads_caches_and_biases_are_those_of_the_share():
    program = whole_of("gpt_oss", "wide_heads_unused_experts_small_window").program
    first, second = (divide(program, rank, 2, DenseCutter()) for rank in range(2))
    for own in (first, second):
        assert {cache.heads for cache in own.caches} == {1}
        attends = [each for each in own.operations() if isinstance(each, Attend)]
        assert {(each.heads.queries, each.heads.keys, len(each.sinks)) for each in attends} == {(3, 1, 3)}
        assert sum(isinstance(each, AllReduce) for each in own.operations()) == 2 * len(program.layers) + 1

    def biased(own: Program) -> int:
        outs = [each for each in own.operations() if isinstance(each, Linear) and each.out.name == "partial"]
        return sum(each.bias is not None for each in outs)

    assert biased(first) == len(program.layers)
    assert biased(second) == 0, "a bias would be added twice"


def test_more_ranks_than_key_heads_are_refused_by_the_name_of_the_setting():
    program = whole_of("llama", next(v for v in VARIANTS["llama"] if v.startswith("all_to_one"))).program
    with pytest.raises(ConfigError, match=r"2 ranks cannot share 1 key heads \(num_key_value_heads\)") as refused:
        divide(program, 0, 2, DenseCutter())
    assert refused.value.option == "tensor_parallel"


def test_heads_stay_together_where_a_block_of_a_quantised_weight_holds_several(tmp_path):
    program = load_model(write_checkpoint(tmp_path, *FOUR_HEADS, intermediate_size=192)).program
    own = divide(program, 0, 2, DenseCutter(block=48))
    assert {cache.heads for cache in own.caches} == {2}
    with pytest.raises(ConfigError, match="cannot share 2 groups of 2 key heads"):
        divide(program, 0, 3, DenseCutter(block=48))
    with pytest.raises(ConfigError, match="blocks of quantised weights span 32 of 4 units"):
        divide(program, 0, 2, DenseCutter(block=256))


@pytest.mark.parametrize("size", [2, 7, 97, 1000, 49152])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_vocabulary_is_shared_out_once_and_evenly(size, ranks):
    if size < ranks:
        with pytest.raises(ConfigError, match="vocab_size"):
            vocabulary_share(size, 0, ranks)
        return
    shares = [vocabulary_share(size, rank, ranks) for rank in range(ranks)]
    assert [at for each in shares for at in each] == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 31


FORMS = [
    (torch.float32, WeightFormat.F32),
    (torch.float32, WeightFormat.INT8),
    (torch.bfloat16, WeightFormat.BF16),
    (torch.bfloat16, WeightFormat.INT8),
    (torch.bfloat16, WeightFormat.INT4),
]


def share_of(family: str, variant: str, rank: int, dtype: torch.dtype, fmt: WeightFormat) -> Program:
    directory = checkpoint(family, variant)
    files = open_model(directory, gguf_dialect)
    binder = DividedBinder(files.source, dtype, "cpu", str(directory), weight_format=fmt)
    return divide(load(files.config, binder, "m"), rank, 2, binder)


def paged_logits(model, dtype: torch.dtype, chunks: tuple[int, ...] = (40,)) -> torch.Tensor:
    """Logits of every position of a sequence, over a store full of NaN."""
    ids, start, found = ids_of(model.shape.vocab_size, sum(chunks)), 0, []
    kv = KVStore(model.program.caches, 4, 16, dtype, CPU, packed=True)
    kv.fill_with_nan()
    tables, states = SlotTables(1, 64, 16), StateStore(model.program.states, 1, 0, CPU)
    admit = Admit(0, "0", tuple(ids), (3, 1, 2), 0, SamplingSpec((("temperature", 0),)), 0)
    tables.admit(admit)
    states.admit(admit)
    for count in chunks:
        row = Row(0, start, count, (), start + count == len(ids))
        tables.advance(row)
        batch = tables.batch([row], CPU)
        with torch.inference_mode():
            attend = paged_attend(kv, batch, model.backend, states.states, states.runs([row]))
            found.append(model.logits(model.forward(batch.token_ids, batch.positions, attend)))
        start += count
    return torch.cat(found)


@compiled
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "fmt"), FORMS)
@pytest.mark.parametrize(("family", "variant"), cases([each for each in DIVISIBLE if each not in LATENT]))
def test_calls_between_sums_have_the_bits_of_every_schedule(family, variant, dtype, fmt):
    """In float32 those of the kernels one by one; in every form, those of the same sequence in other chunks."""

    def work(group):
        program = share_of(family, variant, group.rank, dtype, fmt)
        assert why_not_compiled(program, dtype, here.backend()) is None
        model = DividedExecutor(program, dtype, here.backend(), group)
        whole, parts = paged_logits(model, dtype), paged_logits(model, dtype, (1, 17, 3, 19))
        one_by_one = paged_logits(ReferenceExecutor(program, dtype, here.backend(), group), dtype)
        return whole, parts, one_by_one

    (whole, parts, one_by_one), (other, _, _) = on_ranks(2, work)
    assert torch.equal(whole, other), "the ranks have different bits"
    assert torch.equal(whole, parts), "other chunks, other bits"
    assert torch.equal(whole, one_by_one) == (dtype == torch.float32)


@compiled
@pytest.mark.parametrize(("family", "variant"), cases(DIVISIBLE))
def test_shares_read_from_files_compute_what_the_whole_model_does(family, variant):
    directory, fmt = checkpoint(family, variant), WeightFormat.F32
    files = open_model(directory, gguf_dialect)
    binder = Binder(files.source, torch.float32, "cpu", str(directory), weight_format=fmt)
    model = CompiledExecutor(load(files.config, binder, "m"), torch.float32, here.backend())

    def work(group):
        program = share_of(family, variant, group.rank, torch.float32, fmt)
        return paged_logits(DividedExecutor(program, torch.float32, here.backend(), group), torch.float32)

    whole, (first, _) = paged_logits(model, torch.float32), on_ranks(2, work)
    assert (first - whole).abs().max() < 2e-5 * whole.abs().max()
