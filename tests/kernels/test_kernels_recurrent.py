"""Recurrent layers: references against transformers and closed forms, kernels against references; cut into runs."""

from __future__ import annotations

import math
from dataclasses import replace

import compiled_kernels as here
import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_recurrent_gated_delta_rule

from penstock.kernels import native
from penstock.kernels.recurrence import (
    GatedNormCall,
    RecurrenceCall,
    RecurrenceKind,
    RecurrenceRule,
    gated_norm_reference,
    recurrence_reference,
)
from penstock.kernels.short_convolution import ConvolutionCall, short_convolution_reference
from penstock.kernels.state_runs import FROM_ZERO, StateRuns
from penstock.kernels.torch_backend import TorchBackend

COMPILED = list(native.isas()) if native.available() else []
TOKENS = 58  # of three sequences
# (tokens, source, target): the first from zero with a checkpoint on the way, the second going on, the third from a hit
WHOLE = [(37, FROM_ZERO, 0), (1, 1, 1), (20, 5, 2)]
CUT = [(16, FROM_ZERO, 3), (21, 3, 0), (1, 1, 1), (13, 5, 4), (7, 4, 2), (0, 2, 6)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(*shape):
    """Seven places; one that was never written holds NaN."""
    states = torch.full((7, *shape), float("nan"))
    states[1], states[5] = random(*shape, seed=1), random(*shape, seed=5)
    return states


def rule_of(kind, *, key_heads=2, value_heads=6, key_dim=12, value_dim=20):
    scan = kind is RecurrenceKind.SCAN
    return RecurrenceRule(
        kind,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        a_log=random(value_heads, seed=7),
        step_bias=random(value_heads, seed=8),
        skip=random(value_heads, seed=9) if scan else None,
        steps=(0.01, 3.0) if scan else (0.0, math.inf),
    )


def inputs(rule, tokens=TOKENS, dtype=torch.float32):
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    widths = (keys, keys, values, rule.value_heads, rule.value_heads)
    wide = random(tokens, sum(widths), seed=3).to(dtype)
    parts = list(wide.split(widths, dim=1))  # strided views, as in a program
    return parts if rule.kind is RecurrenceKind.DELTA else [*parts[:4], None]


RULES = {
    "delta": rule_of(RecurrenceKind.DELTA),
    "delta_tiled": replace(rule_of(RecurrenceKind.DELTA), tiled=True),
    "delta_wide": rule_of(RecurrenceKind.DELTA, key_heads=1, value_heads=2, key_dim=128, value_dim=128),
    "delta_odd": rule_of(RecurrenceKind.DELTA, key_heads=3, value_heads=3, key_dim=33, value_dim=70),
    "scan": rule_of(RecurrenceKind.SCAN),
    "scan_one_group": rule_of(RecurrenceKind.SCAN, key_heads=1, value_heads=5, key_dim=17, value_dim=64),
}


def test_the_delta_rule_is_that_of_transformers():
    rule = RULES["delta"]
    q, k, v, a, b = inputs(rule, 11)
    states = torch.zeros(1, *rule.state_shape)
    ours = recurrence_reference(RecurrenceCall(rule, q, k, v, a, b, states, StateRuns.of([(11, FROM_ZERO, 0)])))
    g = -rule.a_log.exp() * torch.nn.functional.softplus(a + rule.step_bias)
    groups = rule.value_heads // rule.key_heads
    heads = [each.unflatten(1, (rule.key_heads, -1)).repeat_interleave(groups, dim=1)[None] for each in (q, k)]
    values = v.unflatten(1, (rule.value_heads, -1))[None]
    theirs, state = torch_recurrent_gated_delta_rule(
        *heads,
        values,
        g=g[None],
        beta=b.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(ours, theirs[0].flatten(1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, state, atol=1e-5, rtol=1e-4)


def test_tiled_heads_are_the_same_heads_in_another_order():
    rule, tiled = RULES["delta"], RULES["delta_tiled"]
    order = torch.arange(6).view(2, 3).T.flatten()  # of tiled heads among grouped ones
    q, k, v, a, b = inputs(rule, 11)
    values, runs = v.unflatten(1, (6, -1)), StateRuns.of([(11, FROM_ZERO, 0)])
    moved = replace(tiled, a_log=rule.a_log[order], step_bias=rule.step_bias[order])
    states = [torch.zeros(1, *rule.state_shape) for _ in range(2)]
    ours = recurrence_reference(RecurrenceCall(rule, q, k, v, a, b, states[0], runs)).unflatten(1, (6, -1))
    operands = (q, k, values[:, order].flatten(1), a[:, order], b[:, order])
    theirs = recurrence_reference(RecurrenceCall(moved, *operands, states[1], runs)).unflatten(1, (6, -1))
    torch.testing.assert_close(theirs, ours[:, order], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(states[1], states[0][:, order], atol=1e-6, rtol=1e-5)


def test_a_scan_is_attention_that_decays():
    rule = RULES["scan"]
    q, k, v, a, b = inputs(rule, 11)
    states, runs = torch.zeros(1, *rule.state_shape), StateRuns.of([(11, FROM_ZERO, 0)])
    ours = recurrence_reference(RecurrenceCall(rule, q, k, v, a, b, states, runs))
    for head in range(rule.value_heads):
        group = head // 3
        queries, keys = (each.unflatten(1, (2, 12))[:, group].double() for each in (q, k))
        values = v.unflatten(1, (6, 20))[:, head].double()
        step = torch.nn.functional.softplus(a[:, head].double() + rule.step_bias[head]).clamp(0.01, 3.0)
        passed = (-rule.a_log[head].double().exp() * step).cumsum(0)
        decay = (passed[:, None] - passed).tril().exp().tril()
        expected = (queries @ keys.T * decay) @ (step[:, None] * values) + rule.skip[head] * values
        torch.testing.assert_close(ours.unflatten(1, (6, 20))[:, head].double(), expected, atol=1e-5, rtol=1e-4)


def recur(rule, operands, states, runs):
    return here.backend().recurrence(RecurrenceCall(rule, *operands, states, StateRuns.of(runs)))


@pytest.mark.parametrize("name", RULES)
def test_a_recurrence_is_the_same_however_it_is_cut(name):
    rule = RULES[name]
    here.set_isa("torch")
    operands, whole, cut = inputs(rule), places(*rule.state_shape), places(*rule.state_shape)
    expected, ours = recur(rule, operands, whole, WHOLE), recur(rule, operands, cut, CUT)
    assert expected.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut[:3], whole[:3], atol=1e-6, rtol=1e-5)
    assert torch.equal(cut[6], cut[2]), "a run of no tokens copies"
    first = places(*rule.state_shape)
    recur(rule, [x if x is None else x[:16] for x in operands], first, CUT[:1])
    torch.testing.assert_close(cut[3], first[3], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", COMPILED)
@pytest.mark.parametrize("name", RULES)
def test_a_compiled_recurrence_is_its_reference_and_has_the_same_bits_however_it_is_cut(name, isa):
    rule = RULES[name]
    operands, expected_states, states = inputs(rule), places(*rule.state_shape), places(*rule.state_shape)
    expected = recurrence_reference(RecurrenceCall(rule, *operands, expected_states, StateRuns.of(WHOLE)))
    here.set_isa(isa)
    ours = recur(rule, operands, states, WHOLE)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(states[:3], expected_states[:3], atol=2e-5, rtol=1e-5)
    for threads in (1, 3):
        here.set_threads(threads)
        again, first = places(*rule.state_shape), places(*rule.state_shape)
        assert torch.equal(recur(rule, operands, again, CUT), ours)
        assert torch.equal(again[[0, 1, 2, 6]], states[[0, 1, 2, 2]])
        recur(rule, [x if x is None else x[:16] for x in operands], first, CUT[:1])
        assert torch.equal(again[3], first[3]), "a checkpoint on the way is the state of the tokens before it"
    one_by_one = places(*rule.state_shape)
    rows = []
    for t in range(37):
        operand = [x if x is None else x[t : t + 1] for x in operands]
        rows.append(recur(rule, operand, one_by_one, [(1, 0 if t else FROM_ZERO, 0)]))
    assert torch.equal(torch.cat(rows), ours[:37])


@pytest.mark.parametrize("isa", ["torch", *COMPILED])
@pytest.mark.parametrize("name", ["delta", "scan"])
def test_a_recurrence_rounds_bfloat16_once(name, isa):
    rule = RULES[name]
    here.set_isa(isa)
    operands = inputs(rule, dtype=torch.bfloat16)
    wide = [None if each is None else each.float() for each in operands]
    ours, expected = (recur(rule, each, places(*rule.state_shape), WHOLE) for each in (operands, wide))
    assert torch.equal(ours, expected.bfloat16())


@pytest.mark.parametrize("isa", COMPILED)
def test_steps_of_any_size_are_those_of_the_reference(isa):
    """From steps that keep everything to ones that forget all, whose exponentials leave the range of float32."""
    rule = rule_of(RecurrenceKind.SCAN, key_heads=1, value_heads=1, key_dim=4, value_dim=3)
    q, k, v, _, _ = inputs(rule, 13)
    a = torch.tensor([-200.0, -80.0, -30.0, -9.0, -1.0, -1e-6, 0.0, 0.4, 3.0, 19.0, 30.0, 90.0, 300.0])[:, None]
    operands, runs = [q, k, v, a, None], [(13, FROM_ZERO, 0)]
    here.set_isa("torch")
    expected = recur(rule, operands, places(*rule.state_shape), runs)
    here.set_isa(isa)
    torch.testing.assert_close(recur(rule, operands, places(*rule.state_shape), runs), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", COMPILED)
@pytest.mark.parametrize(("width", "taps"), [(5, 2), (48, 4), (70, 3), (16, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_compiled_convolution_is_its_reference_and_has_the_same_bits_however_it_is_cut(width, taps, gated, isa):
    x, gate_in, gate_out = random(TOKENS, 3 * width).split(width, dim=1)
    weight, bias = random(taps, width, seed=2), None if gated else random(width, seed=4)
    options = {"gate_in": gate_in, "gate_out": gate_out} if gated else {"silu": True}

    def convolve(states, runs):
        return ConvolutionCall(x, weight, bias, states, StateRuns.of(runs), **options)

    expected_states, states = places(taps - 1, width), places(taps - 1, width)
    expected = short_convolution_reference(convolve(expected_states, WHOLE))
    here.set_isa(isa)
    ours = here.backend().short_convolution(convolve(states, WHOLE))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(states[:3], expected_states[:3])
    for threads in (1, 3):
        here.set_threads(threads)
        again = places(taps - 1, width)
        assert torch.equal(here.backend().short_convolution(convolve(again, CUT)), ours)
        assert torch.equal(again[[0, 1, 2, 6]], states[[0, 1, 2, 2]])


@pytest.mark.parametrize("isa", COMPILED)
def test_a_compiled_convolution_rounds_bfloat16_once_and_copies_where_there_is_no_token(isa):
    here.set_isa(isa)
    x, weight = random(TOKENS, 20).bfloat16(), random(3, 20, seed=2)
    results = [
        here.backend().short_convolution(ConvolutionCall(each, weight, None, places(2, 20), StateRuns.of(WHOLE)))
        for each in (x, x.float())
    ]
    assert torch.equal(results[0], results[1].bfloat16())
    states = places(2, 20)
    nothing = here.backend().short_convolution(ConvolutionCall(x[:0], weight, None, states, StateRuns.of([(0, 1, 2)])))
    assert nothing.shape == (0, 20)
    assert torch.equal(states[2], states[1])


@pytest.mark.parametrize("isa", COMPILED)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("width", "group", "period"), [(60, 20, 20), (60, 20, 60), (35, 35, 35), (64, 16, 16)])
def test_compiled_gated_norms_and_gates_are_their_references(width, group, period, gate_first, isa):
    x, gate = random(9, 2 * width).split(width, dim=1)
    call = GatedNormCall(x, gate, random(period, seed=6), 1e-5, group, gate_first)
    here.set_isa(isa)
    ours, gated = here.backend().gated_norm(call), here.backend().gate(x, gate)
    torch.testing.assert_close(ours, gated_norm_reference(call), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gated, x * gate.sigmoid(), atol=1e-6, rtol=1e-5)
    for row in range(len(x)):
        alone = call._replace(x=x[row : row + 1], gate=gate[row : row + 1])
        assert torch.equal(here.backend().gated_norm(alone)[0], ours[row])
        assert torch.equal(here.backend().gate(alone.x, alone.gate)[0], gated[row])


@pytest.mark.parametrize("isa", COMPILED)
@pytest.mark.parametrize("width", [5, 35, 64])
def test_compiled_gates_by_gelu_are_their_reference(width, isa):
    x, gate = random(9, 2 * width).split(width, dim=1)
    here.set_isa(isa)
    ours = here.backend().gate(x, 3 * gate, "gelu_new")
    theirs = x * torch.nn.functional.gelu(3 * gate, approximate="tanh")
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        TorchBackend(torch.device("cpu")).gate(x, 3 * gate, "gelu_new"), theirs, atol=1e-6, rtol=1e-5
    )
    for row in range(len(x)):
        assert torch.equal(here.backend().gate(x[row : row + 1], 3 * gate[row : row + 1], "gelu_new")[0], ours[row])


@pytest.mark.skipif(not native.available(), reason="this installation has no compiled kernels")
@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(57, 0, 0)], "the number of tokens"),
        ([(58, 7, 0)], "reads a place"),
        ([(58, -2, 0)], "reads a place"),
        ([(58, 0, 7)], "writes a place"),
        ([(58, 0, -1)], "writes a place"),
        ([(60, 0, 0), (-2, 0, 0)], "ascend"),
    ],
)
def test_runs_that_do_not_fit_are_refused(runs, message):
    rule = RULES["delta"]
    with pytest.raises(ValueError, match=message):
        recur(rule, inputs(rule), places(*rule.state_shape), runs)


@pytest.mark.skipif(not native.available(), reason="this installation has no compiled kernels")
def test_operands_that_do_not_fit_are_refused():
    rule = RULES["delta"]
    q, k, v, a, b = inputs(rule)
    for operands, message in {
        (q[:, :-1], k, v, a, b): "q must be",
        (q, k, v[:, 1:], a, b): "v must be",
        (q, k, v, a[1:], b): "a must be",
        (q, k, v, a, None): "the delta rule wants b",
        (q.double(), k, v, a, b): "q must be float32 or bfloat16",
    }.items():
        with pytest.raises(ValueError, match=message):
            recur(rule, operands, places(*rule.state_shape), WHOLE)
    with pytest.raises(ValueError, match="does not have the size"):
        recur(rule, (q, k, v, a, b), places(6, 12, 19), WHOLE)


def test_gated_norms_are_those_of_transformers():
    x, gate = random(9, 120).split(60, dim=1)
    after, before = Qwen3_5RMSNormGated(20, eps=1e-5), GraniteMoeHybridRMSNormGated(60, 20, eps=1e-5)
    with torch.no_grad():
        after.weight.copy_(random(20, seed=6))
        before.weight.copy_(random(60, seed=6))
        heads = after(x.reshape(-1, 20), gate.reshape(-1, 20)).view(9, 60)
        rows = before(x, gate)
        ours = [
            gated_norm_reference(GatedNormCall(x, gate, after.weight, 1e-5, 20, gate_first=False)),
            gated_norm_reference(GatedNormCall(x, gate, before.weight, 1e-5, 20, gate_first=True)),
        ]
    torch.testing.assert_close(ours, [heads, rows], atol=1e-5, rtol=1e-5)
