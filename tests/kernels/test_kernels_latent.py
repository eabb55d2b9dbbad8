"""Attention over a latent cache, and projections of each head: as the references, and each token's bits its own."""

from __future__ import annotations

import compiled_kernels as here
import pytest
import torch

from needs import COMPILED
from penstock.contract.model import KvCacheSpec
from penstock.exec.kv_store import KVStore, block_bytes
from penstock.kernels import native
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.head_projection import project_heads
from penstock.kernels.native_attention import cache_of, is_latent
from penstock.kernels.packed_stack import pack_stack
from penstock.kernels.packed_weight import pack_bf16, pack_f32, quantize_int4, quantize_int8, unpack
from penstock.kernels.torch_backend import TorchBackend

CPU = torch.device("cpu")
BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
TOLERANCE = {F32: 3e-6, BF16: 1.5e-2}
SIZES = [(1, 7, 3), (3, 40, 34), (6, 32, 20), (9, 576, 512), (16, 1024, 1000), (8, 33, 32)]
"""Heads, width of keys, width of values."""
LENGTHS = (37, 5, 300, 1, 513, 18)


def store_of(dim, value_dim, dtype=F32, block_size=16):
    kv = KVStore([KvCacheSpec(1, dim, value_dim=value_dim)], 256, block_size, dtype, CPU, packed=True)
    kv.fill_with_nan()
    return kv


class Case:
    """Rows of a step: the last `counts` positions of sequences, whose earlier keys are there already."""

    def __init__(self, heads, dim, value_dim, dtype, lengths, counts, block_size=16, seed=0):
        generator = torch.Generator().manual_seed(seed + heads * dim)
        self.kv, self.dim, self.value_dim = store_of(dim, value_dim, dtype, block_size), dim, value_dim
        written = BF16 if dtype == INT8 else dtype
        self.keys = [torch.randn(length, 1, dim, generator=generator).to(written) for length in lengths]
        everything = [torch.randn(length, heads, dim, generator=generator) * 0.3 for length in lengths]
        self.q = torch.cat([q[length - count :] for q, length, count in zip(everything, lengths, counts, strict=True)])
        blocks = iter(torch.randperm(256, generator=generator).tolist())
        tables = [[next(blocks) for _ in range(-(-length // block_size))] for length in lengths]
        widest = max(map(len, tables))
        self.table = torch.tensor([[*table, *[0] * (widest - len(table))] for table in tables], dtype=torch.int32)
        self.starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.slots = [
            torch.tensor([table[at // block_size] * block_size + at % block_size for at in range(length)])
            for table, length in zip(tables, lengths, strict=True)
        ]

    def write(self, backend):
        for keys, slots in zip(self.keys, self.slots, strict=True):
            backend.write_kv(self.kv.keys[0], self.kv.values[0], keys, keys[..., self.dim - self.value_dim :], slots)

    def attend(self, backend, spec, q=None, sinks=None):
        q = self.q if q is None else q
        rows = self.starts, self.lengths, self.table
        return backend.paged_attention(q, self.kv.keys[0], self.kv.values[0], *rows, spec, sinks)


def decoded(kv, dim, value_dim):
    """What an int8 cache stands for, as a latent cache in float32: keys, and values that are a view of them."""
    rows, rotated = kv.keys[0], dim - value_dim
    first = -(-rotated // 16) * 16
    scales = rows[..., first + -(-value_dim // 16) * 16 :].contiguous().view(F32)
    groups = torch.cat((torch.zeros(rotated, dtype=torch.long), 1 + torch.arange(value_dim) // 128))
    codes = torch.cat((rows[..., :rotated], rows[..., first : first + value_dim]), dim=-1)
    keys = codes * scales[..., groups]
    return keys, keys[..., rotated:]


SPECS = [AttentionSpec(0.2), AttentionSpec(0.3, softcap=3.0), AttentionSpec(0.2, window=29)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_compiled_attention_is_the_reference(compiled, dtype, spec):
    for heads, dim, value_dim in SIZES:
        case = Case(heads, dim, value_dim, dtype, LENGTHS, (37, 1, 90, 1, 1, 3), block_size=5 if heads == 3 else 16)
        case.write(here.backend())
        sinks = torch.randn(heads) if spec.window else None
        ours, theirs = (case.attend(each, spec, sinks=sinks) for each in (here.backend(), TorchBackend()))
        assert ours.shape == (len(case.q), heads, value_dim)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[F32] * 4, rtol=1e-5)


def test_what_is_written_is_keys_alone_and_the_same_by_torch(compiled):
    stores = []
    for backend in (here.backend(), TorchBackend()):
        case = Case(3, 40, 34, BF16, LENGTHS, LENGTHS)
        case.write(backend)
        stores.append(case.kv)
        held = case.kv.keys[0].flatten(0, 2)[case.slots[2]]
        assert torch.equal(held, case.keys[2][:, 0])
    assert stores[0].values[0].data_ptr() == stores[0].keys[0].data_ptr() + 2 * 6
    ours, theirs = (store.keys[0].view(torch.int16) for store in stores)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("spec", [SPECS[0], *(pytest.param(spec, marks=pytest.mark.deep) for spec in SPECS[1:])])
def test_compiled_attention_in_int8_is_the_reference_over_what_was_stored(compiled, spec):
    for heads, dim, value_dim in SIZES:
        case = Case(heads, dim, value_dim, INT8, LENGTHS, (37, 1, 90, 1, 1, 3), block_size=5 if heads == 3 else 16)
        case.write(here.backend())
        sinks = torch.randn(heads) if spec.window else None
        ours = case.attend(here.backend(), spec, sinks=sinks)
        rows = case.starts, case.lengths, case.table
        theirs = TorchBackend().paged_attention(case.q, *decoded(case.kv, dim, value_dim), *rows, spec, sinks)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[F32] * 4, rtol=1e-5)


def test_int8_keys_are_rounded_on_a_scale_of_what_is_rotated_and_one_for_128_elements_of_the_value(compiled):
    for _, dim, value_dim in SIZES:
        case = Case(1, dim, value_dim, INT8, LENGTHS, LENGTHS)
        case.keys[2][7, 0, dim - value_dim :] *= 100  # one part's size does not affect another
        case.keys[2][8] = 0.0
        case.write(here.backend())
        stored = decoded(case.kv, dim, value_dim)[0].flatten(0, 1)
        for keys, slots in zip(case.keys, case.slots, strict=True):
            for part in ((0, dim - value_dim), *((at, at + 128) for at in range(dim - value_dim, dim, 128))):
                wanted = keys[..., slice(*part)].float()
                largest = wanted.abs().amax(dim=-1, keepdim=True)
                inverse = torch.full_like(largest, 127.0) / largest  # 127 / largest would be 127 * (1 / largest)
                codes = (wanted * inverse).round().where(largest > 0, 0.0)
                assert torch.equal(stored[slots][..., slice(*part)], codes * (largest / 127))


def test_a_number_that_is_none_stays_at_its_position_in_int8(compiled):
    case = Case(2, 40, 34, INT8, (20, 20), (20, 20))
    case.keys[0][13, 0, 20] = float("inf")
    case.write(here.backend())
    out = case.attend(here.backend(), AttentionSpec(0.2))
    assert out[:13].isfinite().all()
    assert out[13:20].isnan().all()
    assert out[20:].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
@pytest.mark.parametrize("q_dtype", [F32, BF16])
def test_a_tokens_bits_depend_on_its_own_sequence_alone(compiled, dtype, q_dtype):
    spec = AttentionSpec(0.2)
    together = Case(6, 48, 36, dtype, LENGTHS, LENGTHS)
    together.q = together.q.to(q_dtype)
    together.write(here.backend())
    results = []
    for threads in (1, 2, 7):
        here.set_threads(threads)
        results.append(together.attend(here.backend(), spec))
    assert all(torch.equal(each, results[0]) for each in results)
    starts = together.starts.tolist()
    for row, length in enumerate(LENGTHS):
        wanted = results[0][starts[row] : starts[row + 1]]
        for count in {1, min(length, 11), length}:  # in the last chunk of a prompt, its last token alone, or whole
            alone = Case(6, 48, 36, dtype, (length,), (count,), block_size=7)
            alone.keys = [together.keys[row]]
            alone.write(here.backend())
            q = together.q[starts[row + 1] - count : starts[row + 1]]
            assert torch.equal(alone.attend(here.backend(), spec, q), wanted[length - count :])


def test_a_latent_cache_takes_the_memory_of_its_keys():
    spec = KvCacheSpec(1, 576, value_dim=512)
    assert block_bytes([spec], 16, BF16) == 16 * 576 * 2
    kv = store_of(576, 512, BF16)
    assert is_latent(kv.keys[0], kv.values[0])
    with kv.borrowed_block(3):
        kv.keys[0][3] = 1.0
    assert bool(kv.keys[0].isnan().all())
    assert block_bytes([spec], 16, INT8) == 16 * (576 + 4 * (1 + 4))
    small = store_of(576, 512, INT8)
    assert small.keys[0].nbytes == 256 * 16 * 596
    assert is_latent(small.keys[0], small.values[0])


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize(
    ("message", "heads", "dim", "value_dim"),
    [("one head", 2, 20, 9), ("between 1 and 1024", 1, 1025, 9), ("between 1 and head_dim", 1, 20, 21)],
)
def test_sizes_of_a_latent_cache_that_cannot_be_are_refused(message, heads, dim, value_dim):
    with pytest.raises(ValueError, match=message):
        native.required().Heads(queries=heads, keys=heads, dim=dim, value_dim=value_dim)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_cache_whose_values_are_no_part_of_its_keys_is_refused():
    keys = torch.empty(4, 16, 1, 20)
    with pytest.raises(ValueError, match="and v_cache its last 9 columns"):
        cache_of(keys, torch.empty(4, 16, 1, 9), 1, 20, 9)


# ---- projections of each head --------------------------------------------------------------------------------------


PACK = {"f32": pack_f32, "bf16": pack_bf16, "int8": quantize_int8, "int4": quantize_int4}


@pytest.mark.parametrize("form", PACK)
@pytest.mark.parametrize(("heads", "outputs", "inputs", "passed"), [(3, 20, 10, 12), (1, 33, 64, 0), (5, 17, 7, 2)])
def test_heads_are_projected_each_by_its_own_weight(compiled, form, heads, outputs, inputs, passed):
    generator = torch.Generator().manual_seed(heads)
    numbers = torch.randn(heads, outputs, inputs, generator=generator)
    stack = pack_stack(heads, lambda head, memory: PACK[form](numbers[head], memory))
    x = torch.randn(9, heads * (passed + inputs), generator=generator)
    ours = project_heads(here.cpu(), x, stack, passed)
    exact = torch.stack([unpack(stack[head]) for head in range(heads)])
    plain = project_heads(None, x, exact, passed)
    of_heads = [each.unflatten(1, (heads, -1)) for each in (ours, plain, x)]
    assert torch.equal(of_heads[0][..., :passed], of_heads[2][..., :passed])
    error = (of_heads[0] - of_heads[1]).square().mean() / plain.square().mean()
    assert error < {"f32": 1e-6, "bf16": 4e-3}.get(form, 1e-2) ** 2
    for row in range(9):
        assert torch.equal(project_heads(here.cpu(), x[row : row + 1], stack, passed)[0], ours[row])
