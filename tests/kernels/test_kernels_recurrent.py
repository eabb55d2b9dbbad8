"""Recurrent layers: references against transformers and against a closed form, and cut into runs."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_recurrent_gated_delta_rule

from penstock.kernels.recurrence import RecurrenceKind, RecurrenceRule, gated_norm_reference, recurrence_reference
from penstock.kernels.state_runs import FROM_ZERO, StateRuns
from penstock.kernels.torch_backend import TorchBackend

# (tokens, source, target): the first from zero with a checkpoint on the way, the second going on, the third from a hit
WHOLE = [(37, FROM_ZERO, 0), (1, 1, 1), (20, 5, 2)]
CUT = [(16, FROM_ZERO, 3), (21, 3, 0), (1, 1, 1), (13, 5, 4), (7, 4, 2), (0, 2, 6)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(*shape):
    """Seven of them; who reads one that nobody has written finds NaN."""
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


def inputs(rule, tokens=58, dtype=torch.float32):
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    widths = (keys, keys, values, rule.value_heads, rule.value_heads)
    wide = random(tokens, sum(widths), seed=3).to(dtype)
    parts = list(wide.split(widths, dim=1))  # strided views, as in a program
    return parts if rule.kind is RecurrenceKind.DELTA else [*parts[:4], None]


RULES = {
    "delta": rule_of(RecurrenceKind.DELTA),
    "delta_odd": rule_of(RecurrenceKind.DELTA, key_heads=3, value_heads=3, key_dim=33, value_dim=70),
    "scan": rule_of(RecurrenceKind.SCAN),
    "scan_one_group": rule_of(RecurrenceKind.SCAN, key_heads=1, value_heads=5, key_dim=17, value_dim=64),
}


def test_the_delta_rule_is_that_of_transformers():
    rule = RULES["delta"]
    q, k, v, a, b = inputs(rule, 11)
    states = torch.zeros(1, *rule.state_shape)
    ours = recurrence_reference(rule, q, k, v, a, b, states, StateRuns.of([(11, FROM_ZERO, 0)]))
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


def test_a_scan_is_attention_that_decays():
    rule = RULES["scan"]
    q, k, v, a, b = inputs(rule, 11)
    ours = recurrence_reference(
        rule, q, k, v, a, b, torch.zeros(1, *rule.state_shape), StateRuns.of([(11, FROM_ZERO, 0)])
    )
    for head in range(rule.value_heads):
        group = head // 3
        queries, keys = (each.unflatten(1, (2, 12))[:, group].double() for each in (q, k))
        values = v.unflatten(1, (6, 20))[:, head].double()
        step = torch.nn.functional.softplus(a[:, head].double() + rule.step_bias[head]).clamp(0.01, 3.0)
        passed = (-rule.a_log[head].double().exp() * step).cumsum(0)
        decay = (passed[:, None] - passed).tril().exp().tril()
        expected = (queries @ keys.T * decay) @ (step[:, None] * values) + rule.skip[head] * values
        torch.testing.assert_close(ours.unflatten(1, (6, 20))[:, head].double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_a_recurrence_is_the_same_however_it_is_cut(name):
    rule, backend = RULES[name], TorchBackend()
    operands, whole, cut = inputs(rule), places(*rule.state_shape), places(*rule.state_shape)
    expected = backend.recurrence(rule, *operands, whole, StateRuns.of(WHOLE))
    ours = backend.recurrence(rule, *operands, cut, StateRuns.of(CUT))
    assert expected.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut[:3], whole[:3], atol=1e-6, rtol=1e-5)
    assert torch.equal(cut[6], cut[2]), "a run of no tokens copies"
    first = places(*rule.state_shape)
    backend.recurrence(rule, *(x if x is None else x[:16] for x in operands), first, StateRuns.of(CUT[:1]))
    torch.testing.assert_close(cut[3], first[3], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["delta", "scan"])
def test_a_recurrence_rounds_bfloat16_once(name):
    rule = RULES[name]
    operands = inputs(rule, dtype=torch.bfloat16)
    ours = recurrence_reference(rule, *operands, places(*rule.state_shape), StateRuns.of(WHOLE))
    wide = [None if each is None else each.float() for each in operands]
    expected = recurrence_reference(rule, *wide, places(*rule.state_shape), StateRuns.of(WHOLE))
    assert torch.equal(ours, expected.bfloat16())


def test_gated_norms_are_those_of_transformers():
    x, gate = random(9, 120).split(60, dim=1)
    after, before = Qwen3_5RMSNormGated(20, eps=1e-5), GraniteMoeHybridRMSNormGated(60, 20, eps=1e-5)
    with torch.no_grad():
        after.weight.copy_(random(20, seed=6))
        before.weight.copy_(random(60, seed=6))
        heads = after(x.reshape(-1, 20), gate.reshape(-1, 20)).view(9, 60)
        rows = before(x, gate)
        ours = [
            gated_norm_reference(x, gate, after.weight, 1e-5, 20, gate_first=False),
            gated_norm_reference(x, gate, before.weight, 1e-5, 20, gate_first=True),
        ]
    torch.testing.assert_close(ours, [heads, rows], atol=1e-5, rtol=1e-5)
