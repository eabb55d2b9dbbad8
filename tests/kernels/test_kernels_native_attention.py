"""Compiled attention against float64, and the promise that a row's bits are its own, on every instruction set here."""

from __future__ import annotations

import math
import random

import compiled_kernels as here
import pytest
import torch

from needs import COMPILED
from penstock.kernels import native, paged_attention
from penstock.kernels.attention_spec import AttentionSpec

if not native.available():
    pytest.skip(COMPILED, allow_module_level=True)

from penstock.kernels.native_attention import (
    int8_keys_shape,
    int8_values_shape,
    packed_keys_shape,
    packed_values_shape,
)

pytestmark = pytest.mark.usefixtures("compiled")

BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
# float32 sums of a few hundred products; beside a bfloat16 cache queries may be rounded to bfloat16 too, beside an int8
# one to int16, which is an error of a score
TOLERANCE = {F32: 3e-6, BF16: 1.5e-2, INT8: 2e-4}


def attend_in_float64(q, k, v, spec, sinks=None):
    """`q` `[C, Hq, D]`, the last C positions of `k` and `v` `[L, Hkv, D]`; `[C, Hq, D]`."""
    count, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))  # [L, Hq, D]
    scores = torch.einsum("chd,lhd->hcl", q.double(), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    behind = torch.arange(length - count, length)[:, None] - torch.arange(length)  # [C, L]
    seen = (behind >= -(length if spec.ahead is None else spec.ahead)) & (behind < (spec.window or length))
    weights = scores.masked_fill(~seen, -math.inf).exp()  # of a few units: nothing overflows
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return torch.einsum("hcl,lhd->chd", weights / total, values.where(seen.any(0)[:, None, None], 0.0))


def rounded_to_int8(x):
    """What an int8 cache holds of heads `[..., D]`: codes, and scales `[..., 1]`."""
    largest = x.float().abs().amax(-1, keepdim=True)
    codes = (x.float() * (127 / largest)).round().where(largest >= 2.0**-100, 0.0)
    return codes, (largest / 127).where(largest >= 2.0**-100, 0.0)


def stored(x, dtype):
    """`x` after it went through a cache of `dtype`."""
    if dtype != INT8:
        return x.to(dtype)
    codes, scales = rounded_to_int8(x)
    return codes * scales


def empty_cache(num_blocks, block_size, kv_heads, dim, dtype, packed):
    """Keys and values, every byte of which is a NaN's."""
    natural = (num_blocks, block_size, kv_heads, dim)
    if dtype == INT8:
        shapes = int8_keys_shape(*natural), int8_values_shape(*natural)
    else:
        shapes = natural, natural
        if packed:
            shapes = packed_keys_shape(*natural, dtype), packed_values_shape(*natural, dtype)
    caches = [torch.empty(shape, dtype=dtype) for shape in shapes]
    for cache in caches:
        cache.view(torch.uint8).fill_(255)
    return caches


def in_natural_order(keys, values, block_size, dim):
    """A packed cache as `[num_blocks, block_size, Hkv, D]`."""
    keys = keys.permute(0, 3, 1, 2, 4).flatten(3)[..., :dim]
    return keys, values.permute(0, 2, 4, 1, 3).flatten(1, 2)[:, :block_size]


class Case:
    """Ragged rows whose keys and values are scattered over a cache of NaN.

    Positions that the windows of all of a row's queries have left are NaN too, and the table omits their blocks.
    """

    def __init__(
        self, lengths, counts, heads, kv_heads, dim, block_size, dtype=F32, packed=False, seed=0, form="plain"
    ):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.counts, self.heads, self.kv_heads, self.dim = lengths, counts, heads, kv_heads, dim
        self.block_size, self.dtype, self.packed = block_size, dtype, packed
        softcap, window, sinks, ahead = FORMS[form]
        self.spec = AttentionSpec(dim**-0.5, softcap, window, ahead)
        self.sinks = torch.linspace(-2, 3, heads) if sinks else None
        self.q = [torch.randn(count, heads, dim, generator=generator) for count in counts]
        self.k, self.v = (
            [torch.randn(n, kv_heads, dim, generator=generator).to(F32 if dtype == INT8 else dtype) for n in lengths]
            for _ in range(2)
        )
        self.place(seed)

    def place(self, seed):
        """Scatter the same rows over other blocks."""
        each = [math.ceil(n / self.block_size) for n in self.lengths]
        ids = random.Random(seed).sample(range(sum(each) + 3), sum(each))
        self.k_cache, self.v_cache = empty_cache(
            sum(each) + 3, self.block_size, self.kv_heads, self.dim, self.dtype, self.packed
        )
        self.table = torch.full(
            (len(each), max(each)), -7, dtype=torch.int32
        )  # where no row reaches, no block is named
        for row, blocks in enumerate(each):
            own = torch.tensor([ids.pop() for _ in range(blocks)])
            first = self.spec.window_start(self.lengths[row] - self.counts[row])  # that one of its queries sees
            kept = first // self.block_size
            self.table[row, kept:blocks] = own[kept:]
            at = torch.arange(first, self.lengths[row])
            slots = own[at // self.block_size] * self.block_size + at % self.block_size
            here.write_kv(self.k_cache, self.v_cache, self.k[row][first:], self.v[row][first:], slots)

    def attend(self, *, rows=None, taken=None):
        """The outputs of `rows`, from each only the queries `taken`, as if the later ones were not known yet."""
        rows = range(len(self.q)) if rows is None else rows
        parts, lengths = [], []
        for row in rows:
            first, last = taken or (0, self.counts[row])
            parts.append(self.q[row][first:last])
            lengths.append(self.lengths[row] - self.counts[row] + last)
        starts = torch.tensor([0, *torch.tensor([len(part) for part in parts]).cumsum(0).tolist()], dtype=torch.int32)
        out = here.paged_attention(
            torch.cat(parts), self.k_cache, self.v_cache, starts, torch.tensor(lengths, dtype=torch.int32),
            self.table[list(rows)], self.spec, self.sinks,
        )  # fmt: skip
        return out.split([len(part) for part in parts])

    def expected(self, row):
        k, v = stored(self.k[row], self.dtype), stored(self.v[row], self.dtype)
        return attend_in_float64(self.q[row], k, v, self.spec, self.sinks)


FORMS = {  # softcap, window, whether there are sinks, positions ahead
    "plain": (None, None, False, 0),
    "softcap": (1.5, None, False, 0),
    "sinks": (None, None, True, 0),
    "window of 1": (None, 1, False, 0),
    "window of 37": (None, 37, False, 0),
    "all, window of 256": (2.0, 256, True, 0),
    "all, window of 270": (2.0, 270, True, 0),
    "both ways": (None, None, False, None),
    "37 and 36 ahead": (None, 37, False, 36),
    "1 and 3 ahead": (None, 1, False, 3),
    "all before, 300 ahead": (None, None, False, 300),
    "all, 270 and 260 ahead": (2.0, 270, True, 260),
}
IN_SHORT = ["plain", "window of 37", "all, window of 270"]
"""What `make test` runs where there are many cases."""
AHEAD_IN_SHORT = ["both ways", "37 and 36 ahead"]
AHEAD = [form for form, (_, _, _, ahead) in FORMS.items() if ahead != 0]
AHEAD_DEEP = [pytest.param(form, marks=pytest.mark.deep) for form in (*AHEAD_IN_SHORT, "all, 270 and 260 ahead")]

ROWS = [
    ([1], [1]),
    ([7, 1, 33, 16], [1, 1, 1, 1]),
    ([9, 40, 12, 1, 70, 2], [1, 13, 1, 1, 70, 2]),
    ([600, 257], [1, 35]),
]
LAYOUTS = [(F32, False), (F32, True), (BF16, False), (BF16, True), (INT8, True)]
SHAPES = [(9, 3, 64), (27, 1, 16), (2, 2, 5)]
SHAPES += [
    pytest.param(*shape, marks=pytest.mark.deep)
    for shape in ((4, 4, 10), (6, 2, 20), (8, 1, 80), (4, 2, 128), (2, 1, 256), (3, 1, 512))
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "packed"), LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("lengths", "counts"), ROWS)
def test_ragged_rows_attend_as_in_float64(lengths, counts, heads, kv_heads, dim, dtype, packed):
    for block_size in (1, 5, 16, 32):
        case = Case(lengths, counts, heads, kv_heads, dim, block_size, dtype, packed)
        for row, out in enumerate(case.attend()):
            assert out.is_contiguous()
            torch.testing.assert_close(out.double(), case.expected(row), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "packed"), LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (27, 1, 16), (2, 2, 5)])
@pytest.mark.parametrize(
    "form",
    [form if form in IN_SHORT else pytest.param(form, marks=pytest.mark.deep) for form in FORMS if form != "plain"],
)
def test_scores_are_capped_hidden_and_sunk_as_in_float64(form, heads, kv_heads, dim, dtype, packed):
    for lengths, counts in (([9, 40, 12, 1, 70, 2], [1, 13, 1, 1, 70, 2]), ([600, 257, 330], [1, 35, 80])):
        for block_size in (5, 16):
            case = Case(lengths, counts, heads, kv_heads, dim, block_size, dtype, packed, form=form)
            for row, out in enumerate(case.attend()):
                torch.testing.assert_close(out.double(), case.expected(row), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.deep if form in AHEAD else []) for form in FORMS]
)
@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
def test_bits_do_not_depend_on_where_keys_lie(dtype, form):
    lengths, counts = [9, 300, 70], [1, 40, 1]
    expected = Case(lengths, counts, 9, 3, 64, 16, dtype, form=form).attend()
    for block_size in (1, 5, 16, 32, 512):
        for packed in (False, True) if dtype != INT8 else (True,):
            for seed in (0, 5):
                case = Case(lengths, counts, 9, 3, 64, block_size, dtype, packed, form=form)
                case.place(seed)
                assert all(map(torch.equal, case.attend(), expected)), (block_size, packed, seed)


@pytest.mark.parametrize("form", [*IN_SHORT, *AHEAD_DEEP])
@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 80), (2, 2, 20)])
def test_bits_do_not_depend_on_the_batch(heads, kv_heads, dim, dtype, form):
    case = Case([9, 300, 12, 520, 70], [1, 13, 1, 1, 70], heads, kv_heads, dim, 16, dtype, True, form=form)
    together = case.attend()
    for row in range(5):
        assert torch.equal(case.attend(rows=[row])[0], together[row])
    assert all(map(torch.equal, case.attend(rows=[4, 1, 2]), (together[4], together[1], together[2])))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", IN_SHORT)
@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 80)])
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(heads, kv_heads, dim, dtype, form):
    case = Case([300], [300], heads, kv_heads, dim, 16, dtype, True, form=form)
    whole = case.attend()[0]
    for size in (1, 7, 64, 255, 256):
        chunks = [case.attend(taken=(at, min(at + size, 300)))[0] for at in range(0, 300, size)]
        assert torch.equal(torch.cat(chunks), whole), size


@pytest.mark.parametrize("form", [*IN_SHORT, *AHEAD_DEEP])
@pytest.mark.parametrize("dtype", [BF16, INT8])
@pytest.mark.parametrize(("lengths", "counts"), [([1100], [1]), ([1100, 3, 700], [2, 1, 1]), ([600], [90])])
def test_bits_do_not_depend_on_threads(lengths, counts, dtype, form):
    case = Case(lengths, counts, 9, 3, 64, 16, dtype, True, form=form)
    here.set_threads(1)
    alone = case.attend()
    for threads in (2, 3, 8):
        here.set_threads(threads)
        assert all(map(torch.equal, case.attend(), alone)), threads


@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
def test_a_later_position_cannot_reach_an_earlier_one(dtype):
    case = Case([300], [300], 6, 2, 64, 16, dtype, True)
    before = case.attend()[0]
    case.k[0][271:], case.v[0][271:] = math.nan, math.inf
    case.place(0)
    after = case.attend()[0]
    assert torch.equal(after[:271], before[:271])
    assert after[271:].isnan().all()


@pytest.mark.parametrize("form", AHEAD_IN_SHORT)
@pytest.mark.parametrize("dtype", [F32, BF16, pytest.param(INT8, marks=pytest.mark.deep)])
def test_rows_look_ahead_as_in_float64_with_the_same_bits_alone_and_on_any_threads(dtype, form):
    case = Case([9, 300, 12], [9, 300, 1], 9, 3, 20, 16, dtype, True, form=form)
    here.set_threads(1)
    together = case.attend()
    for row, out in enumerate(together):
        torch.testing.assert_close(out.double(), case.expected(row), atol=TOLERANCE[dtype], rtol=0)
        assert torch.equal(case.attend(rows=[row])[0], out)
    here.set_threads(3)
    assert all(map(torch.equal, case.attend(), together))


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "packed"), LAYOUTS)
@pytest.mark.parametrize("position", [0, 17, 250, 329])
def test_a_position_reaches_those_whose_sight_holds_it_and_no_other(position, dtype, packed):
    case = Case([330], [330], 6, 2, 64, 16, dtype, packed, form="37 and 36 ahead")
    before = case.attend()[0]
    case.k[0][position], case.v[0][position] = math.nan, math.inf
    case.place(0)
    after = case.attend()[0]
    sees = slice(max(0, position - 36), position + 37)
    assert after[sees].isnan().all()
    after[sees] = before[sees]
    assert torch.equal(after, before)


@pytest.mark.parametrize(("dtype", "packed"), LAYOUTS)
@pytest.mark.parametrize("position", [0, 17, 250, 271])
def test_a_position_that_has_left_the_window_cannot_reach_a_query(position, dtype, packed):
    for block_size in (5, 16):
        case = Case([330], [330], 6, 2, 64, block_size, dtype, packed, form="window of 37")
        before = case.attend()[0]
        case.k[0][position], case.v[0][position] = math.nan, math.inf
        case.place(0)
        after = case.attend()[0]
        sees = slice(position, position + 37)
        assert after[sees].isnan().all()
        after[sees] = before[sees]
        assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
def test_a_window_as_long_as_the_context_and_a_sink_of_no_weight_change_no_bit(dtype):
    lengths, counts = [9, 300, 70], [1, 40, 70]
    case = Case(lengths, counts, 9, 3, 64, 16, dtype, True)
    plain = case.attend()
    case.spec, case.sinks = AttentionSpec(64**-0.5, window=300), torch.full((9,), -math.inf)
    assert all(map(torch.equal, case.attend(), plain))
    case.spec = AttentionSpec(64**-0.5, window=2**40)
    assert all(map(torch.equal, case.attend(), plain))
    case.spec = AttentionSpec(64**-0.5, window=299)
    assert [torch.equal(*both) for both in zip(case.attend(), plain, strict=True)] == [True, False, True]


def test_a_sink_takes_what_it_outweighs_and_no_more():
    case = Case([40], [40], 4, 2, 64, 16)
    plain = case.attend()[0]
    case.sinks = torch.tensor([-math.inf, -200.0, 200.0, 3e38])
    out = case.attend()[0]
    assert torch.equal(out[:, :2], plain[:, :2])
    assert not out[:, 2:].any()


def softcapped(x, softcap):
    """What the softcap makes of scores `[N]`, as `1 / (1 + exp(-.))` in float32: each a head that sees it and a 0."""
    caches = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    table = torch.zeros(1, 1, dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    spec = AttentionSpec(1.0, softcap)
    return here.paged_attention(x.view(1, -1, 1), *caches, starts, lengths, table, spec).flatten()


@pytest.mark.parametrize("softcap", [1.0, 7.0])
def test_the_softcap_is_that_of_float64_odd_and_ascending(softcap):
    x = torch.cat((torch.linspace(-12, 12, 20_001), torch.linspace(-0.63, -0.62, 1001), torch.tensor([-1e30, 1e30])))
    x = x.sort().values * softcap
    out = softcapped(x, softcap)
    exact = torch.sigmoid(softcap * torch.tanh(x.double() / softcap))
    torch.testing.assert_close(out.double(), exact, atol=1.2e-7 * softcap, rtol=0)
    torch.testing.assert_close(softcapped(-x, softcap), 1 - out, atol=1.2e-7, rtol=0)
    assert out.diff().min() >= -6e-8  # a unit of the last place
    assert softcapped(torch.tensor([math.nan]), softcap).isnan().all()


def test_scores_far_apart_neither_overflow_nor_vanish():
    case = Case([700], [1], 2, 1, 64, 16)
    case.q[0].fill_(50.0)
    case.k[0][:] = -50.0
    case.k[0][650] = 50.0
    case.place(0)
    torch.testing.assert_close(case.attend()[0][0], case.v[0][650].expand(2, -1), atol=0, rtol=0)


def test_queries_may_be_views_of_a_fused_row_and_bfloat16():
    case = Case([5, 20], [5, 1], 6, 2, 64, 16, BF16, True)
    case.q = [q.to(BF16) for q in case.q]
    expected = case.attend()
    wide = [torch.cat((q, torch.full((len(q), 4, 64), math.nan, dtype=BF16)), dim=1) for q in case.q]
    both = torch.cat(wide)[:, :6]
    starts, lengths = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([5, 20], dtype=torch.int32)
    out = here.paged_attention(both, case.k_cache, case.v_cache, starts, lengths, case.table, case.spec)
    assert out.dtype == BF16
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_len": torch.tensor([0], dtype=torch.int32)}, "kv_len must count"),
        ({"kv_len": torch.tensor([99], dtype=torch.int32)}, "too narrow"),
        ({"kv_len": torch.tensor([9])}, "kv_len must be"),
        ({"block_table": torch.tensor([[9, 0, 0]], dtype=torch.int32)}, "block that does not exist"),
        ({"block_table": torch.tensor([[-1, 0, 0]], dtype=torch.int32)}, "block that does not exist"),
        ({"q_start": torch.tensor([0, 2], dtype=torch.int32)}, "q_start must go"),
        ({"q": torch.zeros(1, 3, 8)}, "multiple of kv_heads"),
        ({"q": torch.zeros(1, 2, 8, dtype=torch.float16)}, "q must be float32 or bfloat16"),
        ({"k_cache": torch.zeros(4, 2, 4, 8)}, "k_cache must be"),
        ({"spec": AttentionSpec(1.0, window=2), "block_table": torch.tensor([[-1, -9, -1]]).int()}, "does not exist"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
        ({"sinks": torch.zeros(2, dtype=torch.float64)}, "sinks must be"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    good = {
        "q": torch.zeros(1, 2, 8),
        "k_cache": torch.zeros(4, 4, 2, 8),
        "v_cache": torch.zeros(4, 4, 2, 8),
        "q_start": torch.tensor([0, 1], dtype=torch.int32),
        "kv_len": torch.tensor([9], dtype=torch.int32),
        "block_table": torch.tensor([[3, 0, 1]], dtype=torch.int32),
        "spec": AttentionSpec(1.0),
    }
    here.paged_attention(**good)
    with pytest.raises(ValueError, match=message):
        here.paged_attention(**(good | change))


def test_a_bad_slot_is_refused_before_anything_is_written():
    cache = torch.zeros(3, 4, 2, 6), torch.zeros(3, 4, 2, 6)
    k, v = torch.ones(3, 2, 6), torch.ones(3, 2, 6)
    for bad in (12, -1):
        with pytest.raises(ValueError, match="slot that does not exist"):
            here.write_kv(*cache, k, v, torch.tensor([0, 1, bad]))
    assert not cache[0].any()
    assert not cache[1].any()


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.00390625, 1.01171875, 3.4e38, 1e-30, -2.7]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [1, 5, 20, 64])
def test_writing_is_the_reference_in_both_layouts(dim, dtype):
    k, v = torch.randn(7, 2, dim), torch.randn(7, 2, dim)
    k.view(-1)[: min(len(SPECIAL), dim)] = torch.tensor(SPECIAL[:dim])
    slots = torch.tensor([9, 2, 14, 0, 5, 4, 11])
    expected = [torch.zeros(3, 5, 2, dim, dtype=dtype) for _ in range(2)]
    paged_attention.write_kv_reference(*expected, k, v, slots)
    for packed in (False, True):
        cache = [held.zero_() for held in empty_cache(3, 5, 2, dim, dtype, packed)]
        here.write_kv(*cache, k, v, slots)
        keys, values = in_natural_order(*cache, 5, dim) if packed else cache
        assert torch.equal(keys.nan_to_num(7.0), expected[0].nan_to_num(7.0))
        assert torch.equal(values, expected[1])


@pytest.mark.parametrize("dim", [1, 5, 20, 64, 66, 512])
def test_int8_heads_are_stored_as_the_formula_says(dim):
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(7, 2, dim, generator=generator) * 10.0 ** torch.arange(-3, 4)[:, None, None] for _ in range(2))
    k[1, 0], v[2, 1], k[4], v[5, 0, 0] = 0.0, 1e-39, math.inf, math.nan
    slots = torch.tensor([9, 2, 14, 0, 5, 4, 11])
    k_cache, v_cache = empty_cache(3, 5, 2, dim, INT8, True)
    here.write_kv(k_cache, v_cache, k, v, slots)
    blocks, offsets = slots // 5, slots % 5
    held_keys = k_cache[blocks, :, :, offsets]  # [7, 2, words + 1, 4]
    key_scales = held_keys[:, :, -1].contiguous().view(F32)  # [7, 2, 1]
    flat, codes_end = v_cache.flatten(2), 2 * dim * 4  # 5 positions are two groups of 4
    in_order = flat[:, :, :codes_end].unflatten(2, (2, dim, 4))[..., [0, 2, 1, 3]].transpose(3, 4)  # [.., 2, 4, D]
    held_values = in_order.flatten(2, 3)[blocks, :, offsets]
    value_scales = flat[:, :, codes_end:].contiguous().view(F32)[blocks, :, offsets, None]
    for x, codes, scales in ((k, held_keys[:, :, :-1].flatten(2), key_scales), (v, held_values, value_scales)):
        sound = x.isfinite().all(-1)  # [7, 2]
        expected, its_scales = rounded_to_int8(x)
        assert torch.equal(codes[sound][:, :dim].float(), expected[sound])
        assert not codes[..., dim:].any()
        assert torch.equal(scales[sound], its_scales[sound])
        assert scales[~sound].isnan().all()


def test_bits_of_int8_scores_are_those_of_a_cache_written_in_one_go():
    case = Case([40], [1], 6, 2, 64, 16, INT8, True)
    expected = case.attend()[0]
    slots = torch.cat([case.table[0, i] * 16 + torch.arange(16) for i in range(3)])[:40]
    case.k_cache.view(torch.uint8).fill_(255)
    for at in range(40):
        here.write_kv(case.k_cache, case.v_cache, case.k[0][at : at + 1], case.v[0][at : at + 1], slots[at : at + 1])
    assert torch.equal(case.attend()[0], expected)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(10, 10), (20, 20), (64, 64), (80, 80), (128, 128), (128, 96), (80, 32), (21, 20), (5, 2)]
)
def test_rotation_norm_and_storing_in_one_pass_are_those_of_the_references(dim, rotary_dim, packed, normed):
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(9, 10, dim, generator=generator)
    q, k, v = fused.split((6, 2, 2), dim=1)
    angles = torch.randn(30, rotary_dim // 2, generator=generator) * 5
    positions, slots = torch.randint(0, 30, (9,), generator=generator), torch.randperm(12, generator=generator)[:9]
    weights = [torch.rand(dim, generator=generator) + 0.5 for _ in range(2)]
    expected = [torch.zeros(3, 4, 2, dim) for _ in range(2)]
    nq, nk = (here.rms_norm(q, weights[0], 1e-6), here.rms_norm(k, weights[1], 1e-6)) if normed else (q, k)
    cos, sin = angles.cos(), angles.sin()
    turned = [here.rotate(x, cos[positions], sin[positions]) for x in (nq, nk)]
    paged_attention.write_kv_reference(*expected, turned[1], v, slots)
    cache = [held.zero_() for held in empty_cache(3, 4, 2, dim, F32, packed)]
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6} if normed else {}
    out = here.rotate_and_write(q, k, v, positions, cos, sin, *cache, slots, **norms)
    keys, values = in_natural_order(*cache, 4, dim) if packed else cache
    tolerance = {"atol": 3e-6, "rtol": 2e-6} if normed else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(out, turned[0], **tolerance)
    torch.testing.assert_close(keys, expected[0], **tolerance)
    assert torch.equal(values, expected[1])


def test_a_bad_position_is_refused_before_anything_is_written():
    q, k, table = torch.ones(2, 2, 8), torch.ones(2, 1, 8), torch.ones(5, 4)
    cache = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8)
    with pytest.raises(ValueError, match="position lies outside"):
        here.rotate_and_write(q, k, k, torch.tensor([0, 5]), table, table, *cache, torch.tensor([0, 1]))
    assert not cache[0].any()


def test_tables_that_rotate_more_than_a_head_are_refused():
    q, k = torch.ones(2, 2, 8), torch.ones(2, 1, 8)
    cache = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8)
    for cos, sin in ((torch.ones(5, 5), torch.ones(5, 5)), (torch.ones(5, 0), torch.ones(5, 0))):
        with pytest.raises(ValueError, match="R at most 8"):
            here.rotate_and_write(q, k, k, torch.tensor([0, 4]), cos, sin, *cache, torch.tensor([0, 1]))
