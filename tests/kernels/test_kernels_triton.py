"""The Triton kernels beside the references: on a CUDA device, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from scattered_rows import COUNTS, HEADS, KV_HEADS, LENGTHS, drawn, step

from penstock.kernels.activation import ACTIVATIONS
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.paged_attention import paged_attention_reference, write_kv_reference
from penstock.kernels.rope import rotate_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from penstock.kernels import triton_attention, triton_rows  # noqa: E402
from penstock.kernels.cuda_backend import CudaBackend  # noqa: E402
from penstock.kernels.triton_step import fill_step  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter does not multiply bfloat16
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
SPECS = [
    AttentionSpec(0.3),
    AttentionSpec(0.3, window=5),
    AttentionSpec(0.3, softcap=4.0),
    AttentionSpec(0.3, ahead=None),
    AttentionSpec(0.3, window=6, ahead=2),
]


def assert_like(made, expected, dtype=torch.float32):
    torch.testing.assert_close(made.float().cpu(), expected.float().cpu(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 40, 96])
def test_rms_norms_are_those_of_the_reference(dtype, weight_dtype, width):
    x, weight = drawn(7, width + 8).to(DEVICE, dtype)[:, :width], drawn(width, seed=1).to(DEVICE, weight_dtype)
    made = triton_rows.rms_norm(x, weight, 1e-5)
    assert_like(made, rms_norm_reference(x.cpu(), weight.cpu(), 1e-5), dtype)
    assert made.is_contiguous()
    assert torch.equal(triton_rows.rms_norm(x[3:5], weight, 1e-5), made[3:5])


def test_heads_of_strided_rows_are_normed_alone():
    x, weight = drawn(5, 60).to(DEVICE), drawn(12, seed=1).to(DEVICE)
    heads = x[:, 12:48].unflatten(1, (3, 12))
    assert_like(triton_rows.rms_norm(heads, weight, 1e-5), rms_norm_reference(heads.cpu(), weight.cpu(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(triton_rows.ACTIVATIONS))
def test_activations_are_those_of_the_references(name, dtype):
    x = (4 * drawn(6, 88)).to(DEVICE, dtype)
    for part in (x, x[:, 8:80]):
        assert_like(triton_rows.activate(part, name), ACTIVATIONS[name](part.cpu()), dtype)


def test_all_activations_have_a_kernel_but_relu():
    assert set(ACTIVATIONS) - triton_rows.ACTIVATIONS == {"relu"}
    x = drawn(3, 8).to(DEVICE)
    assert torch.equal(CudaBackend(torch.device(DEVICE)).activate(x, "relu"), x.relu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turning", [16, 10, 6])
@pytest.mark.parametrize("heads", [1, 3, 11])
def test_rotations_are_those_of_the_reference(dtype, turning, heads):
    whole = drawn(5, (heads + 1) * 16).to(DEVICE, dtype)
    x = whole[:, 16:].unflatten(1, (heads, 16))
    angles = drawn(5, turning // 2, seed=1)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    expected, beside = rotate_reference(x.cpu(), cos.cpu(), sin.cpu()), whole[:, :16].clone()
    assert triton_rows.rotate(x, cos, sin) is x
    assert_like(x, expected, dtype)
    assert torch.equal(whole[:, :16], beside)


def test_heads_that_do_not_lie_side_by_side_are_not_rotated_in_place():
    x = drawn(4, 16, 3).to(DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="heads of 16"):
        triton_rows.rotate(x, x[:, 0, :8], x[:, 0, :8])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_written_where_the_reference_writes_them(dtype):
    k, v = (drawn(6, KV_HEADS, 10, seed=seed).to(DEVICE, dtype) for seed in (1, 2))
    slots = torch.tensor([3, 9, 0, 14, 7, 1])
    caches = [torch.zeros(4, 4, KV_HEADS, 10, dtype=dtype, device=DEVICE) for _ in range(4)]
    write_kv_reference(caches[0], caches[1], k, v, slots.to(DEVICE))
    triton_rows.write_kv(caches[2], caches[3], k, v, slots.to(DEVICE))
    assert torch.equal(caches[2], caches[0])
    assert torch.equal(caches[3], caches[1])


def test_a_token_without_a_slot_is_not_written():
    k = torch.ones(3, KV_HEADS, 10, device=DEVICE)
    cache, other = (torch.zeros(4, 4, KV_HEADS, 10, device=DEVICE) for _ in range(2))
    triton_rows.write_kv(cache, other, k, k, torch.tensor([-1, 5, -1], device=DEVICE))
    assert cache.flatten(0, 1).sum((1, 2)).nonzero().flatten().tolist() == [5]


def attend(given, spec, sinks=None, dtype=torch.float32):
    q, k, v, bounds, lengths, table = given
    backend = CudaBackend(torch.device(DEVICE))
    tensors = (each.to(DEVICE, dtype) for each in (q, k, v))
    sinks = None if sinks is None else sinks.to(DEVICE)
    return backend.paged_attention(*tensors, bounds, lengths, table.to(DEVICE), spec, sinks)


@pytest.fixture(params=["one program", "split"])
def short_segments(request, monkeypatch):
    """Steps and segments so short that the rows here have several, computed by one program or shared out."""
    monkeypatch.setattr(triton_attention, "KEYS", 16 if DEVICE == "cuda" else 4)
    monkeypatch.setattr(triton_attention, "SEGMENT", 16 if DEVICE == "cuda" else 8)
    monkeypatch.setattr(triton_attention, "_BUSY", 0 if request.param == "one program" else 1000)


@pytest.mark.one_in(6)  # Triton's interpreter takes a third of a second for each
@pytest.mark.parametrize("rows", [[0], [0, 1, 4], [2], range(6), [5, 1]])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.usefixtures("short_segments")
def test_attention_is_that_of_the_reference(rows, with_sinks, spec):
    given = step(list(rows), 16, 16)
    sinks = drawn(HEADS, seed=5) if with_sinks else None
    assert_like(attend(given, spec, sinks), paged_attention_reference(*given, spec, sinks))


def test_attention_of_odd_widths_and_of_half_precision_is_that_of_the_reference():
    given = step(list(range(6)), 10, 7)
    assert_like(attend(given, SPECS[0]), paged_attention_reference(*given, SPECS[0]))
    given = step(list(range(6)), 16, 16)
    rounded = [each.to(HALF).float() for each in given[:3]]
    expected = paged_attention_reference(*rounded, *given[3:], SPECS[0])
    assert_like(attend(given, SPECS[0], dtype=HALF), expected, torch.bfloat16)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_segments_shared_out_have_the_bits_of_one_program(spec, monkeypatch):
    given, made = step(list(range(6)), 16, 16), []
    monkeypatch.setattr(triton_attention, "KEYS", 16 if DEVICE == "cuda" else 4)
    monkeypatch.setattr(triton_attention, "SEGMENT", 16 if DEVICE == "cuda" else 8)
    for busy in (0, 1000):
        monkeypatch.setattr(triton_attention, "_BUSY", busy)
        made.append(attend(given, spec, drawn(HEADS, seed=5)))
    assert torch.equal(*made)


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_a_query_has_the_same_bits_in_a_prompt_and_alone(spec):
    given = step([3], 16, 16)
    whole = attend(given, spec)
    q, k, v, _, _, table = given
    for at in range(COUNTS[3]):
        length = LENGTHS[3] - COUNTS[3] + at + 1
        alone = (q[at : at + 1], k, v, torch.tensor([0, 1]).int(), torch.tensor([length]).int(), table)
        assert torch.equal(attend(alone, spec)[0], whole[at])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", [64, 80, 256])
def test_small_tiles_have_the_bits_of_large_ones(dtype, width):
    """A prompt of 20 tokens behind 600, and each of some of them alone; several segments and steps."""
    length, count = 620, 20
    k, v = (drawn(160, 4, KV_HEADS, width, seed=seed).to(DEVICE, dtype) for seed in (1, 2))
    table = torch.randperm(155, generator=torch.Generator().manual_seed(4)).int()[None].to(DEVICE)
    q, backend = drawn(count, HEADS, width, seed=3).to(DEVICE, dtype), CudaBackend(torch.device(DEVICE))

    def attended(part, end):
        given = torch.tensor([0, len(part)]).int(), torch.tensor([end]).int(), table.clone()
        return backend.paged_attention(part, k, v, *given, AttentionSpec(0.2))

    whole = attended(q, length)
    for at in (0, 7, count - 1):
        assert torch.equal(attended(q[at : at + 1], length - count + at + 1)[0], whole[at])


def test_blocks_that_windows_have_left_may_not_be_there():
    q, k, v, bounds, lengths, table = step(list(range(6)), 16, 16)
    spec, gone = AttentionSpec(0.3, window=5), table.clone()
    for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        gone[row, : spec.window_start(length - count) // 4] = 1 << 20
    expected = paged_attention_reference(q, k, v, bounds, lengths, table, spec)
    assert_like(attend((q, k, v, bounds, lengths, gone), spec), expected)


def test_heads_that_the_kernel_does_not_support_go_to_torch():
    given = step([0, 1], 272, 272)
    assert triton_attention.why_not(272, 3) == "heads of 272 are wider than 256"
    if DEVICE == "cuda":  # which torch's kernel needs
        assert_like(attend(given, SPECS[0]), paged_attention_reference(*given, SPECS[0]))
    assert triton_attention.why_not(64, 65)
    assert triton_attention.why_not(64, 4, latent=True)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_captured_step_is_told_which_tokens_there_are(drafts):
    rows = torch.tensor([0, 1, 1]).int().to(DEVICE) if drafts else None
    table = torch.tensor([[5, 6], [7, 8], [9, 4]]).int().to(DEVICE)[: 2 if drafts else 3]
    numbers = [torch.tensor(values).to(DEVICE) for values in ([30, 31, 32], [4, 2, 3], [20, 34, 35])]
    into = [torch.full((5,), 99, device=DEVICE) for _ in range(3)]
    places, tables = (torch.full((5, width), 99, device=DEVICE).int() for width in (5, 4))
    fill_step(*numbers, table, rows, (*into, places, tables))
    assert [each[:3].tolist() for each in into] == [each.tolist() for each in numbers]
    assert into[2][3:].tolist() == [-1, -1]
    assert places[:3].tolist() == [[0, 1, 0, 4, 5], [1, 1, 1, 2, 3], [2, 1, 2, 3, 4]]
    assert places[3:, 1].tolist() == [0, 0]
    assert tables[:3, :2].tolist() == ([[5, 6], [7, 8], [7, 8]] if drafts else [[5, 6], [7, 8], [9, 4]])
