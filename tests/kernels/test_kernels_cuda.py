"""The torch path on a real CUDA device beside the CPU in float32, and that a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import VARIANTS, write_lettered

from penstock import LLM, SamplingParams
from penstock.contract.sampling import SamplingSpec
from penstock.exec.sampler import RowSampling, sample
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.torch_backend import TorchBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_right_and_the_same_for_any_number_of_rows(dtype, bias):
    x, weight = drawn(300, 200).to("cuda", dtype), DenseWeight(drawn(120, 200, seed=1).to("cuda", dtype))
    offset = drawn(120, seed=2).to("cuda", dtype) if bias else None
    whole = weight.matmul(None, x, offset)
    expected = torch.nn.functional.linear(
        x.double().cpu(), weight.numbers.double().cpu(), None if offset is None else offset.double().cpu()
    )
    torch.testing.assert_close(whole.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
    for first, last in [(0, 1), (3, 4), (0, 64), (60, 70), (1, 300)]:
        assert torch.equal(weight.matmul(None, x[first:last], offset), whole[first:last]), (first, last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_right_and_the_same_for_any_number_of_rows(dtype):
    x, weight = drawn(200, 96).to("cuda", dtype), drawn(96, seed=1).to("cuda", dtype)
    whole = rms_norm_reference(x, weight, 1e-5)
    expected = rms_norm_reference(x.cpu().float(), weight.cpu().float(), 1e-5)
    torch.testing.assert_close(whole.cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for first, last in [(0, 1), (3, 4), (0, 64), (60, 70)]:
        assert torch.equal(rms_norm_reference(x[first:last], weight, 1e-5), whole[first:last]), (first, last)


class Rows:
    """Rows of a step over scattered blocks; `select` makes the step of one of them alone."""

    def __init__(self, dtype, lengths, counts, heads=6, kv_heads=2, width=40):
        self.size, self.lengths, self.counts = 16, lengths, counts
        blocks = [-(-length // self.size) for length in lengths]
        self.tables = [list(range(sum(blocks[:at]), sum(blocks[: at + 1]))) for at in range(len(blocks))]
        shape = (sum(blocks) + 1, self.size, kv_heads, width)
        self.k, self.v = drawn(*shape, seed=1).to("cuda", dtype), drawn(*shape, seed=2).to("cuda", dtype)
        for table, length in zip(self.tables, lengths, strict=True):
            for cache in (self.k, self.v):
                cache[table[-1], (length - 1) % self.size + 1 :] = float("nan")
        self.q = drawn(sum(counts), heads, width, seed=3).to("cuda", dtype)

    def attend(self, chosen, spec, sinks=None, device="cuda"):
        counts = [self.counts[row] for row in chosen]
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        starts = [sum(self.counts[:row]) for row in chosen]
        q = torch.cat([self.q[start : start + count] for start, count in zip(starts, counts, strict=True)])
        width = max(len(self.tables[row]) for row in chosen)
        table = torch.tensor([self.tables[row] + [0] * (width - len(self.tables[row])) for row in chosen])
        dtype = q.dtype if device == "cuda" else torch.float32
        tensors = [each.to(device, dtype) for each in (q, self.k, self.v)]
        return TorchBackend().paged_attention(
            *tensors,
            torch.tensor(bounds, dtype=torch.int32),
            torch.tensor([self.lengths[row] for row in chosen], dtype=torch.int32),
            table.int().to(device),
            spec,
            None if sinks is None else sinks.to(device),
        )


SPECS = {
    "causal": AttentionSpec(0.2),
    "window": AttentionSpec(0.2, window=20),
    "softcap": AttentionSpec(0.2, softcap=10.0),
    "both ways": AttentionSpec(0.2, ahead=None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_attention_is_right_and_the_same_whoever_else_attends(dtype, with_sinks, name):
    rows = Rows(dtype, lengths=[1, 17, 300, 64, 130, 33], counts=[1, 1, 1, 40, 129, 1])
    sinks = drawn(6, seed=4).to("cuda") if with_sinks else None
    everyone = range(len(rows.lengths))
    whole = rows.attend(everyone, SPECS[name], sinks)
    expected = rows.attend(everyone, SPECS[name], sinks, device="cpu")
    torch.testing.assert_close(whole.float().cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if name != "softcap":
        for row in everyone:
            start = sum(rows.counts[:row])
            alone = rows.attend([row], SPECS[name], sinks)
            assert torch.equal(alone, whole[start : start + rows.counts[row]]), row


@pytest.mark.parametrize(
    "stage", [("top_k", 50), ("top_p", 0.7), ("typical_p", 0.6), ("top_n_sigma", 1.5), ("min_p", 0.1)]
)
def test_draws_are_the_same_for_any_number_of_rows(stage):
    logits = drawn(64, 32000).to("cuda") * 3
    specs = [SamplingSpec(tuple(sorted([("seed", seed), ("temperature", 1.0), stage]))) for seed in range(64)]
    samplings = [RowSampling.of(spec, 0) for spec in specs]
    whole = sample(logits, samplings, [0] * 64)
    on_host = sample(logits.cpu(), samplings, [0] * 64)
    assert whole.tokens == on_host.tokens
    for row in (0, 5, 63):
        assert sample(logits[row : row + 1], samplings[row : row + 1], [0]).tokens == [whole.tokens[row]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "lfm2", "qwen3_next"])
def test_answers_are_those_of_the_cpu(family, tmp_path):
    model = str(write_lettered(tmp_path, family, VARIANTS[family][0]))
    prompts = [[5, 9, 7, 11, 4, 8, 6], [8], [9, 9, 5] * 9]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = {}
    for device in ("cpu", "cuda"):
        options = {"dtype": "float32", "kv_cache_memory": 1 << 22, "max_model_len": 128, "kv_store": "off"}
        with LLM(model, device=device, max_num_batched_tokens=24, max_num_seqs=4, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers[device] = [each.outputs[0].token_ids for each in outputs]
    assert answers["cuda"] == answers["cpu"]
