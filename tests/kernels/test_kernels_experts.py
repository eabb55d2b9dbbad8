"""Experts: the reference against transformers, compiled ones against the reference, and bit for bit in any company."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import compiled_kernels as here
import gguf
import pytest
import torch
from fp8_samples import quantize_fp8
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from penstock.kernels import experts as reference
from penstock.kernels import native
from penstock.kernels.activation import ACTIVATIONS, silu_and_mul_reference
from penstock.kernels.experts import ExpertStack, RouterSpec, bytes_read, experts_read
from penstock.kernels.native_rows import rows as rows_of
from penstock.kernels.packed_stack import FusedStack, pack_stack
from penstock.kernels.packed_weight import (
    PackedKind,
    pack_bf16,
    pack_f32,
    pack_q4_0,
    pack_q4_1,
    pack_q8_0,
    quantize_int4,
    quantize_int8,
    unpack,
)
from penstock.kernels.weight_memory import WeightMemory

ROWS = [1, 2, 7, 33]
GGUF = {
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, pack_q4_0),
    "Q4_1": (gguf.GGMLQuantizationType.Q4_1, pack_q4_1),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, pack_q8_0),
}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack_gguf(kind):
    def pack(weight, memory=None):
        blocks = torch.from_numpy(gguf.quants.quantize(weight.numpy(), GGUF[kind][0])).flatten()
        return GGUF[kind][1](blocks, *weight.shape, memory)

    return pack


PACK = {"f32": pack_f32, "bf16": pack_bf16, "int8": quantize_int8, "int4": quantize_int4, "fp8": quantize_fp8} | {
    kind: pack_gguf(kind) for kind in GGUF
}


FORMS = [pytest.param(form, marks=pytest.mark.deep) if form == "fp8" else form for form in PACK]
"""FP8 among them only in `make test-deep`: bf16 has its arithmetic, and its own tests are of products."""


def packed(form, numbers):
    """`[E, N, K]` as a stack in this form."""
    return pack_stack(len(numbers), lambda expert, memory: PACK[form](numbers[expert], memory))


def stack_of(form, count, hidden, inner, *, gated=True, seed=1, down_form=None):
    """Random experts; forms of whole blocks get whole blocks."""
    if "Q" in form + (down_form or ""):
        hidden, inner = -(-hidden // 32) * 32, -(-inner // 32) * 32
    gate_up = random(count, (2 if gated else 1) * inner, hidden, seed=seed) * hidden**-0.5
    down = random(count, hidden, inner, seed=seed + 1) * inner**-0.5
    return ExpertStack(packed(form, gate_up), packed(down_form or form, down))


def fused_stack_of(forms, count, hidden, inner, *, biases=False):
    """Random experts whose gates, ups and downs have forms of their own."""
    gates, ups = (random(count, inner, hidden, seed=seed) * hidden**-0.5 for seed in (1, 2))
    down = random(count, hidden, inner, seed=3) * inner**-0.5
    gate_up = FusedStack((packed(forms[0], gates), packed(forms[1], ups)))
    added = [random(*weight.shape[:2], seed=7) for weight in (gate_up, down)] if biases else []
    return ExpertStack(gate_up, packed(forms[2], down), *added)


def spec_of(count, k, scoring="softmax", *, normalise=True, scale=1.0):
    return RouterSpec(count, k, scoring, normalise=normalise, scale=scale)


# ---- the reference ---------------------------------------------------------------------------------------------------


def expert_block(block, count, hidden, inner, k):
    """A block of transformers, with weights large enough to make a difference."""
    if block is MixtralSparseMoeBlock:
        config = MixtralConfig(
            hidden_size=hidden, intermediate_size=inner, num_local_experts=count, num_experts_per_tok=k
        )
    else:
        config = Qwen3MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=inner,
            num_experts=count,
            num_experts_per_tok=k,
            norm_topk_prob=block == "qwen3 normalised",
        )
    made = (MixtralSparseMoeBlock if block is MixtralSparseMoeBlock else Qwen3MoeSparseMoeBlock)(config)
    with torch.no_grad():
        for seed, weight in enumerate(made.parameters()):
            weight.copy_(random(*weight.shape, seed=seed) * weight.shape[-1] ** -0.5)
    return made


@pytest.mark.parametrize("block", [MixtralSparseMoeBlock, "qwen3", "qwen3 normalised"])
@pytest.mark.parametrize(("count", "k"), [(4, 1), (8, 2), (16, 4), (8, 8)])
def test_the_reference_and_packed_float32_are_what_transformers_computes(block, count, k):
    made = expert_block(block, count, 40, 24, k)
    x = random(33, 40)
    with torch.no_grad():
        theirs = made(x[None])[0]
        logits = torch.nn.functional.linear(x, made.gate.weight)
    numbers = made.experts.gate_up_proj.detach(), made.experts.down_proj.detach()
    spec = spec_of(count, k, normalise=block != "qwen3")
    ours = reference.experts(x, logits, ExpertStack(*numbers), spec, silu_and_mul_reference)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    stack = ExpertStack(*(packed("f32", weight) for weight in numbers))
    torch.testing.assert_close(
        reference.experts(x, logits, stack, spec, silu_and_mul_reference), theirs, rtol=1e-5, atol=1e-5
    )
    if native.available():
        torch.testing.assert_close(
            here.NativeExperts(stack, spec, "silu_and_mul")(x, logits), theirs, rtol=1e-5, atol=1e-5
        )


def test_sigmoid_scores_a_selection_bias_and_a_scale_are_those_of_deepseek_v3():
    logits, bias = random(20, 8) * 2, random(8, seed=5)
    chosen, weights = reference.route(logits, spec_of(8, 3, "sigmoid", scale=2.5), bias)
    for row in range(20):
        scores = logits[row].sigmoid()
        best = torch.topk(scores + bias, 3).indices
        assert chosen[row].tolist() == sorted(best.tolist())
        torch.testing.assert_close(weights[row], scores[chosen[row]] / (scores[best].sum() + 1e-20) * 2.5)
    without = reference.route(logits, spec_of(8, 3, "sigmoid"))[0]
    assert not torch.equal(chosen, without)  # else the bias was never used


def test_the_residual_is_added_to_the_finished_sum_and_gives_its_dtype():
    stack, spec = ExpertStack(random(4, 16, 24), random(4, 24, 8, seed=1)), spec_of(4, 2)
    x, logits, residual = random(5, 24), random(5, 4, seed=2), random(5, 24, seed=3)
    plain = reference.experts(x, logits, stack, spec, silu_and_mul_reference)
    added = reference.experts(x, logits, stack, spec, silu_and_mul_reference, residual=residual)
    assert torch.equal(added, residual + plain)
    narrow = residual.bfloat16()
    added = reference.experts(x, logits, stack, spec, silu_and_mul_reference, residual=narrow)
    assert torch.equal(added, (narrow.float() + plain).bfloat16())


def test_plain_bfloat16_weights_are_near_float32_ones():
    numbers = random(4, 32, 24) * 0.2, random(4, 24, 16, seed=1) * 0.2
    x, logits, spec = random(9, 24), random(9, 4, seed=2), spec_of(4, 2)
    wide = reference.experts(x, logits, ExpertStack(*numbers), spec, silu_and_mul_reference)
    narrow = ExpertStack(*(weight.bfloat16() for weight in numbers))
    out = reference.experts(x.bfloat16(), logits, narrow, spec, silu_and_mul_reference)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("top_k", "scoring", "named"), [(0, "softmax", "top_k"), (5, "softmax", "top_k"), (2, "max", "scoring")]
)
def test_a_router_that_cannot_be_is_refused_by_name(top_k, scoring, named):
    with pytest.raises(ValueError, match=named):
        RouterSpec(4, top_k, scoring, normalise=True)


@pytest.mark.parametrize("down", [(4, 24, 9), (3, 24, 8), (4, 23, 8)])
def test_weights_that_do_not_belong_together_are_refused(down):
    with pytest.raises(ValueError, match="do not belong together"):
        ExpertStack(torch.empty(4, 16, 24), torch.empty(down))


# ---- routing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
def test_compiled_routing_is_the_reference(compiled, scoring, normalise):
    for count, k in [(1, 1), (4, 1), (8, 2), (15, 4), (16, 16), (17, 5), (128, 8), (1000, 30)]:
        spec = spec_of(count, k, scoring, normalise=normalise, scale=1.5)
        logits, bias = random(40, count, seed=count) * 3, random(count, seed=2)
        for selection_bias in (None, bias):
            ours, theirs = here.route(logits, spec, selection_bias), reference.route(logits, spec, selection_bias)
            assert torch.equal(ours[0].long(), theirs[0]), (count, k)
            torch.testing.assert_close(ours[1], theirs[1], rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_compiled_routing_in_groups_is_the_reference(compiled, scoring):
    for count, k, groups, top_groups in [(8, 2, 4, 1), (12, 3, 4, 2), (15, 4, 3, 3), (16, 1, 8, 4), (256, 8, 8, 4)]:
        spec = replace(spec_of(count, k, scoring, scale=1.5), groups=groups, top_groups=top_groups)
        logits, bias = random(40, count, seed=count) * 3, random(count, seed=2)
        logits[:4] = logits[:4].round()  # many equal ones
        logits[5, 3], logits[6, count - 1] = float("nan"), float("inf")
        for selection_bias in (None, bias):
            ours, theirs = here.route(logits, spec, selection_bias), reference.route(logits, spec, selection_bias)
            assert torch.equal(ours[0].long(), theirs[0]), (count, k)
            torch.testing.assert_close(ours[1], theirs[1], rtol=3e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (2, 1), (4, 4), (1, 1)])
def test_experts_in_groups_are_chosen_as_both_versions_of_deepseek_choose(groups, top_groups):
    shared = {"n_routed_experts": 12, "num_experts_per_tok": 3, "hidden_size": 24, "n_group": groups}
    shared |= {"topk_group": top_groups, "routed_scaling_factor": 1.5, "num_attention_heads": 2}
    second = DeepseekV2TopkRouter(DeepseekV2Config(topk_method="group_limited_greedy", **shared))
    third = DeepseekV3TopkRouter(DeepseekV3Config(norm_topk_prob=True, **shared))
    x = random(50, 24)
    second.weight.data = third.weight.data = random(12, 24, seed=3)
    third.e_score_correction_bias.data = random(12, seed=4)
    plain = replace(spec_of(12, 3, scale=1.5, normalise=False), groups=groups, top_groups=top_groups)
    cases = [(second, plain, None), (third, replace(plain, scoring="sigmoid", normalise=True), random(12, seed=4))]
    for router, spec, bias in cases:
        with torch.no_grad():
            logits, weights, indices = router(x)
        order = indices.argsort(dim=-1)
        for choose in (reference.route, *([here.route] if native.available() else [])):
            chosen, weighed = choose(logits, spec, bias)
            assert torch.equal(chosen.long(), indices.gather(1, order))
            torch.testing.assert_close(weighed, weights.gather(1, order), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("named", "groups", "top_groups"), [("groups", 5, 1), ("groups", 0, 1), ("top_groups", 4, 5), ("top_groups", 4, 1)]
)
def test_groups_that_cannot_be_are_refused_by_name(named, groups, top_groups):
    with pytest.raises(ValueError, match=named):
        RouterSpec(12, 4, "softmax", normalise=True, groups=groups, top_groups=top_groups)


@pytest.mark.parametrize("implementation", ["compiled", "reference"])
def test_ties_go_to_the_lower_index_and_the_order_is_ascending(implementation):
    choose = {"compiled": here.route, "reference": reference.route}[implementation]
    logits = torch.tensor(
        [[1.0, 1, 1, 1, 1], [0, 3, 0, 3, 3], [-0.0, 0, -0.0, 0, -1], [5, 4, 3, 2, 1], [-1e30, -1e30, 0, -1e30, -1e30]]
    )
    for scoring in ("softmax", "sigmoid"):
        chosen = choose(logits, spec_of(5, 2, scoring))[0]
        assert chosen.tolist() == [[0, 1], [1, 3], [0, 1], [0, 1], [0, 2]]
        biased = choose(torch.zeros(1, 5), spec_of(5, 2, scoring), torch.tensor([0.0, 1, 0, 1, 1]))[0]
        assert biased.tolist() == [[1, 3]]


@pytest.mark.parametrize("implementation", ["compiled", "reference"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_logits_that_are_no_numbers_still_choose_different_experts_and_show(implementation, scoring):
    choose = {"compiled": here.route, "reference": reference.route}[implementation]
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0, nan, 3, nan, 2], [nan] * 5, [nan, 1, 2, 3, nan], [inf, 0, 0, inf, 0]])
    chosen, weights = choose(logits, spec_of(5, 2, scoring))
    assert chosen.tolist() == [[1, 3], [0, 1], [0, 4], [0, 3]]
    assert torch.isnan(weights[:3]).all()
    assert torch.isnan(weights[3]).all() == (scoring == "softmax")
    low = choose(torch.full((1, 5), -inf if scoring == "sigmoid" else -1e38), spec_of(5, 2, scoring))[1]
    assert torch.isfinite(low).all()


# ---- compiled experts ------------------------------------------------------------------------------------------------


def tolerance(form):
    """For float32 sums in another order; where activations are rounded, also for one step of their rounding."""
    return 3e-5 if form == "f32" else 3e-3 if form == "bf16" else 2e-2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("count", "k", "hidden", "inner"), [(4, 1, 33, 17), (8, 2, 64, 48), (16, 4, 96, 40), (8, 3, 130, 16)]
)
@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_new_and_mul"])
def test_compiled_experts_are_the_reference(compiled, form, count, k, hidden, inner, activation):
    stack, spec = stack_of(form, count, hidden, inner), spec_of(count, k)
    for rows in ROWS:
        x, logits = random(rows, stack.hidden, seed=rows), random(rows, count, seed=rows + 1)
        residual = random(rows, stack.hidden, seed=rows + 2)
        ours = here.NativeExperts(stack, spec, activation)(x, logits, residual)
        theirs = reference.experts(x, logits, stack, spec, ACTIVATIONS[activation], residual=residual)
        torch.testing.assert_close(ours, theirs, rtol=tolerance(form), atol=tolerance(form))


@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "Q4_0"])
@pytest.mark.parametrize("inner", [17, 48])  # gates apart, and in the product
@pytest.mark.parametrize("activation", ["silu_and_mul", "clamped_swiglu_and_mul"])
def test_experts_add_the_biases_of_their_projections(compiled, form, inner, activation):
    plain, spec = stack_of(form, 8, 64, inner), spec_of(8, 3)
    biases = [3 * random(*weight.shape[:2], seed=7 + i) for i, weight in enumerate((plain.gate_up, plain.down))]
    for chosen in (biases, [biases[0], None], [None, biases[1]]):
        stack = ExpertStack(plain.gate_up, plain.down, *chosen)
        run = here.NativeExperts(stack, spec, activation)
        x, logits = random(9, stack.hidden), random(9, 8, seed=1)
        ours = run(x, logits)
        theirs = reference.experts(x, logits, stack, spec, ACTIVATIONS[activation])
        assert (theirs - reference.experts(x, logits, plain, spec, ACTIVATIONS[activation])).abs().max() > 0.5
        bound = 10 * tolerance(form)  # a rounding of the gates is multiplied by ups of up to 8
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)
        for row in range(9):
            assert torch.equal(run(x[row : row + 1], logits[row : row + 1])[0], ours[row])


@pytest.mark.parametrize("form", ["f32", "int8"])
def test_what_an_expert_says_is_multiplied_by_its_scale(compiled, form):
    plain, spec = stack_of(form, 8, 64, 48), replace(spec_of(8, 3), normalise=True)
    stack = replace(plain, scale=random(8, seed=7))
    x, logits = random(9, stack.hidden), random(9, 8, seed=1)
    run = here.NativeExperts(stack, spec, "gelu_new_and_mul")
    ours = run(x, logits)
    theirs = reference.experts(x, logits, stack, spec, ACTIVATIONS["gelu_new_and_mul"])
    torch.testing.assert_close(ours, theirs, rtol=tolerance(form), atol=tolerance(form))
    assert torch.equal(run(x[3:4], logits[3:4])[0], ours[3])
    one = torch.full((1, 8), -50.0).index_fill(1, torch.tensor([5]), 50.0)  # all but one of them have no weight
    alone = here.NativeExperts(plain, spec, "gelu_new_and_mul")(x[:1], one)
    torch.testing.assert_close(run(x[:1], one), stack.scale[5] * alone)


def test_scales_that_do_not_belong_to_their_experts_are_refused():
    stack = stack_of("f32", 4, 32, 16)
    for scale in (torch.ones(3), torch.ones(4, 1), torch.ones(4).bfloat16()):
        with pytest.raises(ValueError, match="scale must be"):
            replace(stack, scale=scale)


def test_biases_that_do_not_belong_to_their_weights_are_refused():
    stack = stack_of("f32", 4, 32, 16)
    for biases in ((torch.zeros(4, 31), None), (None, torch.zeros(3, 32)), (None, torch.zeros(4, 32).bfloat16())):
        with pytest.raises(ValueError, match=r"(gate_up|down)_bias must be"):
            ExpertStack(stack.gate_up, stack.down, *biases)


@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "int4"])
def test_the_sum_over_experts_is_exactly_that_of_the_products_in_ascending_order(compiled, form):
    stack, spec = stack_of(form, 8, 64, 32), spec_of(8, 4, scale=1.25)
    x, logits, residual = random(9, 64), random(9, 8, seed=1), random(9, 64, seed=2)
    chosen, weights = here.route(logits, spec)
    for row in range(9):
        sums = torch.zeros(64)
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            inside = here.silu_and_mul(here.linear(x[row : row + 1], stack.gate_up[expert], out_dtype=torch.float32))
            sums += weight * here.linear(inside, stack.down[expert], out_dtype=torch.float32)[0]
        out = here.NativeExperts(stack, spec, "silu_and_mul")(
            x[row : row + 1], logits[row : row + 1], residual[row : row + 1]
        )
        assert torch.equal(out[0], residual[row] + sums)


@pytest.mark.parametrize(("form", "down_form"), [("Q4_0", "Q8_0"), ("int4", "int8"), ("bf16", "f32"), ("f32", "bf16")])
def test_the_two_weights_may_have_different_forms(compiled, form, down_form):
    stack, spec = stack_of(form, 4, 64, 32, down_form=down_form), spec_of(4, 2)
    x, logits = random(7, stack.hidden), random(7, 4, seed=1)
    ours = here.NativeExperts(stack, spec, "silu_and_mul")(x, logits)
    theirs = reference.experts(x, logits, stack, spec, silu_and_mul_reference)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("forms", "biases"),
    [
        (("Q4_0", "Q8_0", "Q4_1"), True),
        (("int8", "bf16", "f32"), False),
        pytest.param(("f32", "Q4_1", "bf16"), True, marks=pytest.mark.deep),
        pytest.param(("bf16", "f32", "int8"), False, marks=pytest.mark.deep),
    ],
)
def test_gates_and_ups_of_different_forms_are_multiplied_as_they_are(compiled, forms, biases):
    stack, spec = fused_stack_of(forms, 8, 64, 32, biases=biases), spec_of(8, 3)
    x, logits, residual = random(70, 64), random(70, 8, seed=1), random(70, 64, seed=2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    ours = run(x, logits, residual)
    theirs = reference.experts(x, logits, stack, spec, silu_and_mul_reference, residual=residual)
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    wide = run(x.bfloat16().float(), logits, residual)
    assert torch.equal(run(x.bfloat16(), logits, residual), wide)
    alone = torch.cat([run(x[i : i + 1], logits[i : i + 1], residual[i : i + 1]) for i in range(70)])
    for threads in (1, 2, 3):
        here.set_threads(threads)
        for rows in (2, 7, 70):
            assert torch.equal(run(x[:rows], logits[:rows], residual[:rows]), alone[:rows]), (threads, rows)
        order = torch.randperm(70, generator=torch.Generator().manual_seed(threads))
        assert torch.equal(run(x[order], logits[order], residual[order]), alone[order])


def test_gates_and_ups_of_one_form_have_the_same_bits_together_and_apart(compiled):
    numbers, down = random(4, 64, 96), packed("Q8_0", random(4, 96, 32, seed=2))
    together = ExpertStack(packed("Q4_0", numbers), down)
    apart = ExpertStack(FusedStack((packed("Q4_0", numbers[:, :32]), packed("Q4_0", numbers[:, 32:]))), down)
    x, logits = random(9, 96), random(9, 4, seed=1)
    ours, theirs = (here.NativeExperts(each, spec_of(4, 2), "silu_and_mul")(x, logits) for each in (apart, together))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("form", ["f32", "int8"])
def test_experts_without_gates_have_the_other_activations(compiled, activation, form):
    stack, spec = stack_of(form, 4, 40, 24, gated=False), spec_of(4, 2)
    x, logits = random(7, 40), random(7, 4, seed=1)
    ours = here.NativeExperts(stack, spec, activation)(x, logits)
    theirs = reference.experts(x, logits, stack, spec, ACTIVATIONS[activation])
    torch.testing.assert_close(ours, theirs, rtol=tolerance(form), atol=tolerance(form))


@pytest.mark.parametrize("form", ["f32", "bf16", "int4"])
def test_bfloat16_rows_and_strided_rows_are_read_where_they_lie(compiled, form):
    stack, spec = stack_of(form, 8, 64, 48), spec_of(8, 2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    wide, others, many = random(9, 200), random(9, 100, seed=1), random(9, 20, seed=2)
    x, residual, logits = wide[:, 5:69], others[:, 3:67], many[:, 1:9]
    out = run(x, logits, residual)
    assert torch.equal(out, run(x.contiguous(), logits.contiguous(), residual.contiguous()))
    narrow = x.bfloat16()
    assert torch.equal(run(narrow, logits, residual), run(narrow.float(), logits, residual))
    assert torch.equal(run(x, logits, residual.bfloat16()), run(x, logits, residual.bfloat16().float()).bfloat16())
    assert run(narrow, logits).dtype == torch.bfloat16


def test_the_result_may_take_the_place_of_the_residual_or_of_x():
    stack, spec = stack_of("f32", 8, 64, 48), spec_of(8, 2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x, logits, residual = random(9, 64), random(9, 8, seed=1), random(9, 64, seed=2)
    wanted, without = run(x, logits, residual), run(x, logits)
    stream = residual.clone()
    run.run_into(stream, x, logits, stream)
    assert torch.equal(stream, wanted)
    stream = x.clone()
    run.run_into(stream, stream, logits)
    assert torch.equal(stream, without)


# ---- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PACK)
@pytest.mark.parametrize(("count", "k", "hidden", "inner"), [(4, 1, 33, 20), (16, 4, 96, 48)])
def test_a_tokens_bits_depend_on_nothing_but_the_token(compiled, form, count, k, hidden, inner):
    stack, spec = stack_of(form, count, hidden, inner), spec_of(count, k)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x, logits = random(70, stack.hidden, seed=3), random(70, count, seed=4)
    residual = random(70, stack.hidden, seed=5)
    alone = torch.cat([run(x[i : i + 1], logits[i : i + 1], residual[i : i + 1]) for i in range(70)])
    for threads in (1, 2, 3):
        here.set_threads(threads)
        for rows in (2, 7, 33):
            assert torch.equal(run(x[:rows], logits[:rows], residual[:rows]), alone[:rows]), (threads, rows)
            last = slice(70 - rows, 70)
            assert torch.equal(run(x[last], logits[last], residual[last]), alone[last]), (threads, rows)
        order = torch.randperm(70, generator=torch.Generator().manual_seed(threads))
        assert torch.equal(run(x[order], logits[order], residual[order]), alone[order])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(["f32", "bf16", "int8", "int4"]),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 40)),
    experts=st.integers(1, 20).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))),
    rows=st.integers(1, 20),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_sizes_are_near_the_reference_and_exact(compiled, form, sizes, experts, rows, threads, seed):
    stack, spec = stack_of(form, experts[0], *sizes, seed=seed), spec_of(*experts, normalise=seed % 2 == 0)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x, logits = random(rows, stack.hidden, seed=seed + 2), random(rows, spec.experts, seed=seed + 3)
    here.set_threads(threads)
    out = run(x, logits)
    here.set_threads(1)
    assert torch.equal(out, torch.cat([run(x[i : i + 1], logits[i : i + 1]) for i in range(rows)]))
    theirs = reference.experts(x, logits, stack, spec, silu_and_mul_reference)
    torch.testing.assert_close(out, theirs, rtol=10 * tolerance(form), atol=10 * tolerance(form))


def test_many_tokens_go_through_experts_one_after_the_other_with_the_same_bits(compiled):
    stack, spec = stack_of("bf16", 8, 48, 32), spec_of(8, 4)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x, logits = random(300, 48), random(300, 8, seed=1)  # above the pairs that may be kept apart
    alone = torch.cat([run(x[i : i + 1], logits[i : i + 1]) for i in range(300)])
    for threads in (1, 2, 3):
        here.set_threads(threads)
        assert torch.equal(run(x, logits), alone)


def test_all_tokens_may_choose_the_same_experts(compiled):
    stack, spec = stack_of("int8", 16, 64, 32), spec_of(16, 2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x = random(33, 64)
    logits = random(33, 16, seed=1)
    logits[:, [3, 11]] += 100
    assert run.run_into(torch.empty(33, 64), x, logits) == 2
    out = run(x, logits)
    here.set_threads(3)
    assert torch.equal(run(x, logits), out)
    theirs = reference.experts(x, logits, stack, spec, silu_and_mul_reference)
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("where", ["x", "logits", "residual"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_in_its_row(compiled, form, where):
    stack, spec = stack_of(form, 8, 64, 32), spec_of(8, 2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    given = {"x": random(9, 64), "logits": random(9, 8, seed=1), "residual": random(9, 64, seed=2)}
    good = run(given["x"], given["logits"], given["residual"])
    given[where][4, 3] = torch.nan
    for threads in (1, 2):
        here.set_threads(threads)
        out = run(given["x"], given["logits"], given["residual"])
        assert torch.isnan(out[4]).any()
        others = [row for row in range(9) if row != 4]
        assert torch.equal(out[others], good[others])


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_weights_of_experts_that_nobody_chose_are_not_multiplied(compiled):
    stack, spec = stack_of("bf16", 16, 64, 32), spec_of(16, 4)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    for rows, threads in itertools.product((1, 2, 7), (1, 2)):
        here.set_threads(threads)
        x, logits = random(rows, 64, seed=rows), random(rows, 16, seed=rows + 1)
        wanted = run(x, logits)
        chosen = set(here.route(logits, spec)[0].flatten().tolist())
        poisoned = ExpertStack(
            *(packed("bf16", torch.full(weight.shape, torch.nan)) for weight in (stack.gate_up, stack.down))
        )
        for mine, theirs in ((poisoned.gate_up, stack.gate_up), (poisoned.down, stack.down)):
            for expert in chosen:
                mine[expert].data.copy_(theirs[expert].data)
        out = torch.empty_like(wanted)
        assert here.NativeExperts(poisoned, spec, "silu_and_mul").run_into(out, x, logits) == len(chosen)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_one_stream_reads_the_bytes_of_its_experts_and_many_read_all(form):
    stack, spec = stack_of(form, 8, 64, 32), spec_of(8, 2)
    of_each = stack.gate_up.stride + stack.down.stride
    assert bytes_read(stack, spec, 1) == 2 * of_each
    assert bytes_read(stack, spec, 1000) == stack.nbytes == 8 * of_each
    assert bytes_read(stack, spec, 0) == 0
    plain = ExpertStack(torch.empty(8, 64, 64), torch.empty(8, 64, 32))
    assert bytes_read(plain, spec, 1) == 2 * 4 * (64 * 64 + 64 * 32)


def test_experts_read_is_what_evenly_popular_experts_come_to():
    spec, trials = spec_of(16, 4), 400
    for tokens in (1, 3, 8):
        logits = random(trials * tokens, 16, seed=tokens)
        chosen = reference.route(logits, spec)[0].view(trials, -1)
        mean = sum(len(row.unique()) for row in chosen) / trials
        assert abs(mean - experts_read(spec, tokens)) < 0.25


# ---- stacks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_each_weight_of_a_stack_is_what_it_is_alone(form):
    numbers = random(5, 17 if not form.startswith("Q") else 33, 32)
    memory = WeightMemory()
    memory.take(3)
    stack = pack_stack(5, lambda expert, room: PACK[form](numbers[expert], room), memory)
    assert stack.shape == numbers.shape
    assert stack.stride % 64 == stack.data.data_ptr() % 64 == 0
    assert stack.nbytes == 5 * stack.stride
    for expert in range(5):
        alone = PACK[form](numbers[expert])
        assert torch.equal(stack[expert].data, alone.data)
        assert stack[expert].data.data_ptr() == stack.data.data_ptr() + expert * stack.stride
        assert torch.equal(unpack(stack[expert]), unpack(alone))
    after = memory.take(5)
    assert not 0 <= after.data_ptr() - stack.data.data_ptr() < stack.nbytes


def test_a_stack_is_of_one_form():
    numbers = random(3, 32, 32)
    with pytest.raises(ValueError, match="expert 2"):
        pack_stack(3, lambda expert, room: (pack_f32 if expert == 2 else pack_bf16)(numbers[expert], room))
    with pytest.raises(ValueError, match="expert 1"):
        pack_stack(2, lambda expert, room: pack_f32(numbers[expert, : 32 - expert], room))
    with pytest.raises(ValueError, match="experts"):
        pack_stack(0, lambda _, room: pack_f32(numbers[0], room))


def test_parts_of_a_fused_stack_belong_together():
    gates = packed("f32", random(4, 16, 32))
    for other in (packed("f32", random(3, 16, 32)), packed("f32", random(4, 16, 31))):
        with pytest.raises(ValueError, match="do not belong together"):
            FusedStack((gates, other))
    narrow = ExpertStack(FusedStack((gates, packed("bf16", random(4, 8, 32)))), packed("f32", random(4, 32, 12)))
    with pytest.raises(ValueError, match="ups of their own must have the shape of the gates"):
        here.NativeExperts(narrow, spec_of(4, 2), "silu_and_mul")


def test_stacks_without_compiled_kernels_have_the_same_bytes(monkeypatch):
    numbers = random(3, 20, 32)
    wanted = {form: packed(form, numbers) for form in PACK}
    monkeypatch.setattr(native, "module", None)
    for form, stack in wanted.items():
        ours = packed(form, numbers)
        assert torch.equal(ours.data[: ours.weight_bytes], stack.data[: stack.weight_bytes])
        assert (ours.kind, ours.stride, ours.shape) == (stack.kind, stack.stride, stack.shape)
    assert wanted["Q4_0"].kind is PackedKind.Q4


# ---- rows behind a gate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_a_gate_are_the_reference_and_row_by_row_the_same(compiled, dtype):
    for rows, width in itertools.product(ROWS, (1, 16, 33, 576)):
        x, gate, residual = random(rows, width, dtype=dtype), random(rows, 1, seed=1) * 3, random(rows, width, seed=2)
        for added in (None, residual):
            ours, theirs = here.gate_rows(x, gate, added), reference.gate_rows(x, gate, added)
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=1e-2 if ours.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
            here.set_threads(3)
            assert torch.equal(here.gate_rows(x, gate, added), ours)
            here.set_threads(1)
            some = None if added is None else added[:1]
            assert torch.equal(here.gate_rows(x[:1], gate[:1], some), ours[:1])


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_operands_that_do_not_fit_are_refused_by_name():
    stack, spec = stack_of("f32", 4, 32, 16), spec_of(4, 2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x, logits = random(3, 32), random(3, 4)
    for name, arguments in {
        "x": (random(3, 31), logits),
        "router_logits": (x, random(3, 5)),
        "residual": (x, logits, random(2, 32)),
    }.items():
        with pytest.raises(ValueError, match=name):
            run(*arguments)
    with pytest.raises(ValueError, match="out"):
        run.run_into(torch.empty(2, 32), x, logits)
    with pytest.raises(ValueError, match="x must be float32"):
        run(x.double(), logits)
    with pytest.raises(ValueError, match="router_logits must be float32"):
        run(x, logits.half())


def test_layers_that_do_not_fit_are_refused_by_name():
    stack, spec = stack_of("f32", 4, 32, 16), spec_of(4, 2)
    plain = ExpertStack(torch.empty(4, 32, 32), torch.empty(4, 32, 16))
    for named, arguments in {
        "activation": (stack, spec, "tanh"),
        "gate_up must be packed": (plain, spec, "silu_and_mul"),
        "experts": (stack, spec_of(5, 2), "silu_and_mul"),
        "gate_up must have as many outputs": (stack, spec, "gelu"),
        "selection_bias": (stack, spec, "silu_and_mul", torch.zeros(3)),
    }.items():
        with pytest.raises(ValueError, match=named):
            here.NativeExperts(*arguments)


def test_no_tokens_are_no_work():
    stack, spec = stack_of("f32", 4, 32, 16), spec_of(4, 2)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    assert run(torch.empty(0, 32), torch.empty(0, 4)).shape == (0, 32)
    assert run.run_into(torch.empty(0, 32), torch.empty(0, 32), torch.empty(0, 4)) == 0
    assert reference.experts(torch.empty(0, 32), torch.empty(0, 4), stack, spec, silu_and_mul_reference).shape == (
        0,
        32,
    )


def test_scratch_of_one_thread_grows_by_the_same_for_each_token_and_more_threads_need_no_less():
    for stack in (
        *(stack_of(form, 8, 33, 20) for form in PACK),
        fused_stack_of(("f32", "int8", "bf16"), 8, 33, 20),
    ):
        layer = here.NativeExperts(stack, spec_of(8, 3), "silu_and_mul")
        here.set_threads(1)
        sizes = [layer.scratch_bytes(rows) for rows in range(200)]
        steps = {after - before for before, after in itertools.pairwise(sizes)}
        assert len(steps) == 1
        assert steps.pop() % 64 == sizes[0] % 64 == 0
        here.set_threads(3)
        assert all(layer.scratch_bytes(rows) >= size for rows, size in enumerate(sizes))


@pytest.mark.parametrize("apart", [False, True])
def test_scratch_is_not_written_beyond_its_end(apart):
    stack, spec = stack_of("int8", 8, 70, 24), spec_of(8, 3)
    if apart:
        stack = fused_stack_of(("int8", "f32", "int8"), 8, 70, 24)
    run = here.NativeExperts(stack, spec, "silu_and_mul")
    x, logits = random(33, stack.hidden), random(33, 8, seed=1)
    wanted = run(x, logits)
    for threads in (1, 2):
        here.set_threads(threads)
        size = run.scratch_bytes(33)
        memory = torch.full((size + 192,), 0xA5, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        out = torch.empty_like(x)
        operands = {
            "x": rows_of("x", x),
            "logits": rows_of("logits", logits),
            "residual": None,
            "out": rows_of("out", out),
        }
        address, run_experts = memory.data_ptr() + start, partial(here.cpu().run_experts, run.layer, 33, **operands)
        run_experts(scratch=native.module.Memory(address, size))
        assert torch.equal(out, wanted)
        assert (memory[:start] == 0xA5).all()
        assert (memory[start + size :] == 0xA5).all()
        with pytest.raises(ValueError, match="scratch"):
            run_experts(scratch=native.module.Memory(address, size - 1))
