"""oneDNN's linear: against float64 and torch, and bit for bit against itself in other company."""

from __future__ import annotations

import threading

import compiled_kernels as here
import pytest
import torch

from needs import COMPILED, ONEDNN
from penstock.kernels import native, onednn_linear
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.onednn_linear import TILES, OneDnnWeight, pack_onednn

pytestmark = pytest.mark.skipif(not onednn_linear.available(), reason=ONEDNN)

linear = here.linear

SHAPES = [(1, 1), (17, 17), (63, 33), (130, 577), (1000, 600)]
"""The last is cut into panels; `test_large_weights_are_cut_into_panels` says so."""


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(autouse=True)
def _leave_threads_as_they_were():
    threads, ours = torch.get_num_threads(), here.threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if native.available():
        here.set_threads(ours)


@pytest.fixture(params=[(1, 1), (2, 1), (3, 2)], ids="{0[0]}-compute-{0[1]}-torch".format)
def threads(request):
    """Compute threads, of which torch has one when a model is served, and all when `verify` sets them."""
    compute, torchs = request.param
    if native.available():
        here.set_threads(compute)
    torch.set_num_threads(torchs)


@pytest.fixture(scope="module")
def weights():
    return {shape: pack_onednn(random(*shape, seed=1)) for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_with_bias_and_residual_is_the_exact_one_rounded_once(weights, shape):
    numbers, bias = random(*shape, seed=1).double(), random(shape[0], seed=2)
    for rows in (1, 5, 32, 70):
        x, residual = random(rows, shape[1], seed=rows), random(rows, shape[0], seed=3)
        bound = 4e-6 * (x.double().abs() @ numbers.abs().T) + 1e-7  # of float32 sums in some order
        for adds in ((None, None), (bias, None), (None, residual), (bias, residual)):
            exact = x.double() @ numbers.T + sum(each.double() for each in adds if each is not None)
            out = linear(x, weights[shape], *adds)
            assert out.dtype == torch.bfloat16
            assert out.shape == exact.shape
            # The nearest bfloat16 of some number that float32 sums may have given.
            assert (out >= (exact - bound).bfloat16()).all()
            assert (out <= (exact + bound).bfloat16()).all()


def test_plain_tensors_have_the_same_products_up_to_rounding(weights):
    for shape in SHAPES:
        x, bias = random(40, shape[1]), random(shape[0], seed=2)
        theirs = linear(x, DenseWeight(random(*shape, seed=1)), bias)
        torch.testing.assert_close(linear(x, weights[shape], bias), theirs, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("shape", [(130, 577), (1000, 600)], ids=str)
def test_a_rows_bits_depend_on_nothing_but_the_row(weights, threads, shape):
    weight, bias = weights[shape], random(shape[0], seed=2)
    x, residual = random(400, shape[1]), random(400, shape[0], seed=3)
    whole = linear(x, weight, bias, residual)
    for count in range(1, 101):  # every number of rows, and with it every place in the last tile
        assert torch.equal(linear(x[:count], weight, bias, residual[:count]), whole[:count]), count
    for start in (1, 31, 77, 300, 399):  # every row in other tiles, and elsewhere in them
        assert torch.equal(linear(x[start:], weight, bias, residual[start:]), whole[start:]), start
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x[order], weight, bias, residual[order]), whole[order])


def test_bits_are_the_same_on_any_number_of_threads(weights):
    x = random(300, 600)
    made = []
    for compute, torchs in ((1, 1), (2, 1), (5, 1), (64, 1), (1, 2), (3, 3)):
        if native.available():
            here.set_threads(compute)
        torch.set_num_threads(torchs)
        packed_there = pack_onednn(random(1000, 600, seed=1))
        made += [linear(x, weights[1000, 600]), linear(x, packed_there)]
    assert all(torch.equal(each, made[0]) for each in made[1:])


def test_an_order_of_summation_that_depends_on_the_shape_is_found_out(monkeypatch):
    """What the trial before packing is for: such a library must not be used."""
    honest = onednn_linear._multiply

    def sum_tail_first(x, panel, bias, residual):
        half = x.shape[1] // 2
        zeros = torch.zeros_like(x[:, half:])
        head = honest(torch.cat((x[:, :half], zeros), dim=1), panel, None, residual)
        return honest(torch.cat((zeros, x[:, half:]), dim=1), panel, bias, head)

    def by_size(x, panel, bias, residual):
        return (sum_tail_first if len(x) == 64 else honest)(x, panel, bias, residual)

    def by_place(x, panel, bias, residual):
        odd = torch.arange(len(x))[:, None] % 2 == 1
        return torch.where(odd, sum_tail_first(x, panel, bias, residual), honest(x, panel, bias, residual))

    tried = onednn_linear._rows_are_alike.__wrapped__
    assert tried(70, 64)
    for broken in (by_size, by_place):
        monkeypatch.setattr(onednn_linear, "_multiply", broken)
        assert not tried(70, 64), broken
    monkeypatch.setattr(onednn_linear, "_rows_are_alike", tried)
    with pytest.raises(RuntimeError, match="64 inputs and 70 outputs"):
        pack_onednn(random(70, 64))


def test_large_weights_are_cut_into_panels_by_their_shape_alone(weights):
    width = onednn_linear._panel_width
    assert [len(panel) for panel in weights[1000, 600].panels] == [512, 488]
    assert [len(panel) for panel in weights[130, 577].panels] == [130]
    assert width(28672, 4096) == 28672 // 16
    assert width(3072, 576) == 768
    assert all(-(-n // width(n, k)) <= 16 for n in (1, 64, 65, 5000, 10**5) for k in (1, 5000, 60000))


def test_tiles_cover_every_row_once_and_leave_no_thread_without_work():
    for rows in (0, 1, 31, 32, 33, 65, 255, 256, 257, 300, 1000):
        for panels, threads in ((1, 1), (1, 4), (4, 2), (3, 64)):
            cuts = onednn_linear._cuts(rows, panels, threads)
            assert [row for start, stop, _ in cuts for row in range(start, stop)] == list(range(rows))
            assert all(stop - start == tile or stop == rows for start, stop, tile in cuts)
            assert {tile for _, _, tile in cuts} <= set(TILES)
            assert len(cuts) * panels >= min(threads, -(-rows // TILES[-1]) * panels)
    assert [tile for _, _, tile in onednn_linear._cuts(300, 1, 1)] == [256, 32, 32]
    assert [tile for _, _, tile in onednn_linear._cuts(256, 1, 4)] == [64] * 4


def test_strided_rows_are_read_where_they_lie(weights):
    wide, others = random(40, 700), random(40, 150, seed=2)
    x, residual = wide[:, 7:584], others[:, 5:135]
    weight = weights[130, 577]
    assert torch.equal(linear(x, weight, None, residual), linear(x.contiguous(), weight, None, residual.contiguous()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(weights, bad):
    weight, x = weights[130, 577], random(40, 577)
    good = linear(x, weight)
    x[4, 40] = bad
    out = linear(x, weight)
    assert not torch.isfinite(out[4]).any()
    others = [row for row in range(40) if row != 4]
    assert torch.equal(out[others], good[others])


def test_the_weight_is_a_copy_and_its_bytes_are_those_that_onednn_keeps():
    numbers = random(130, 577)
    weight, x = pack_onednn(numbers), random(3, 577)
    before = linear(x, weight)
    numbers.zero_()
    assert torch.equal(linear(x, weight), before)
    assert (weight.outputs, weight.inputs) == (130, 577)
    assert weight.nbytes >= 2 * 130 * 577
    assert pack_onednn(random(128, 64)).nbytes == 2 * 128 * 64


def test_float32_numbers_are_rounded_to_bfloat16():
    numbers = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    x = random(3, 30)
    assert torch.equal(linear(x, pack_onednn(numbers)), linear(x, pack_onednn(numbers.bfloat16())))


def test_no_rows_give_no_rows(weights):
    assert linear(torch.empty(0, 577).bfloat16(), weights[130, 577]).shape == (0, 130)


def test_calls_from_several_threads_do_not_meet(weights):
    if native.available():
        here.set_threads(2)
    weight = weights[1000, 600]
    xs = [random(40, 600, seed=seed) for seed in range(3)]
    expected, wrong = [linear(x, weight) for x in xs], []

    def repeat(index):
        wrong.extend(index for _ in range(20) if not torch.equal(linear(xs[index], weight), expected[index]))

    callers = [threading.Thread(target=repeat, args=(index,)) for index in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": random(3, 16)}, "x must be"),
        ({"x": random(17)}, "x must be"),
        ({"x": random(3, 17).float()}, "x must be"),
        ({"bias": random(16)}, "bias must be"),
        ({"bias": random(17).float()}, "bias must be"),
        ({"residual": random(2, 17)}, "residual must be"),
        ({"residual": random(3, 17).float()}, "residual must be"),
    ],
)
def test_operands_that_do_not_fit_are_refused(weights, change, words):
    operands = {"x": random(3, 17), "bias": random(17), "residual": random(3, 17)} | change
    with pytest.raises(ValueError, match=words):
        linear(weight=weights[17, 17], **operands)


@pytest.mark.parametrize("weight", [random(4), random(0, 4), random(4, 4).double()], ids=["vector", "empty", "double"])
def test_weights_that_cannot_be_packed_are_refused(weight):
    with pytest.raises(ValueError, match="a weight must be"):
        pack_onednn(weight)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_shares_are_computed_at_the_same_time(monkeypatch, weights):
    meeting = threading.Barrier(2)
    monkeypatch.setattr(onednn_linear, "_multiply_into", lambda *operands: meeting.wait(timeout=60))
    here.set_threads(2)
    linear(random(3, 600), weights[1000, 600])  # two panels: neither call returns before the other has begun


def test_a_failed_call_is_the_callers_to_hear_of(monkeypatch, weights):
    def fail(out, *operands):
        raise RuntimeError("no memory")

    monkeypatch.setattr(onednn_linear, "_multiply_into", fail)
    torch.set_num_threads(2)  # all calls are made elsewhere
    assert isinstance(weights[17, 17], OneDnnWeight)
    with pytest.raises(RuntimeError, match="no memory"):
        linear(random(3, 17), weights[17, 17])
