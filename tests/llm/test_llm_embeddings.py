"""Embeddings by the library, on the default model as it is served: the same bits however a prompt is run."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import EngineFault, InvalidParameter, PromptTooLong
from penstock.llm.embeddings import cosine, embedding_spec, kept_tokens

pytestmark = pytest.mark.model
TEXTS = ["A cat sat on the mat.", "Interest rates rose by half a percent.", "x", "def f(n):\n    return n * f(n - 1)"]


@pytest.fixture(scope="module")
def exact(default_model):
    """The model as it is served: on the file's own blocks, with the compiled kernels."""
    with LLM(str(default_model), kv_cache_memory=60_000_000) as llm:
        yield llm


def vectors(llm, prompts, **options):
    return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **options)]


def ragged_prompts():
    draw = random.Random(3)
    return [[draw.randrange(3, 40_000) for _ in range(length)] for length in (1, 7, 33, 90)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_neighbours_chunks_cache_and_preemption_change_no_bit(default_model, exact, pooling):
    prompts = ragged_prompts()
    alone = [vectors(exact, [prompt], pooling=pooling)[0] for prompt in prompts]
    assert vectors(exact, prompts, pooling=pooling) == alone  # together, and after what ran alone: warm
    assert len({tuple(vector) for vector in alone}) == len(prompts)
    block = 16 * 30 * 2 * 3 * 64 * 2  # tokens x layers x keys and values x heads x width x bytes
    tight = {"kv_cache_memory": 8 * block, "max_num_batched_tokens": 4, "max_num_seqs": 2, "max_model_len": 128}
    with LLM(str(default_model), **tight) as llm:
        llm.add_request(prompts[1], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        llm.step()  # an older request, which will need a block that the longest prompt holds
        assert vectors(llm, prompts[::-1], pooling=pooling) == alone[::-1]
        assert llm.scheduler.stats.preemptions > 0


def test_only_the_last_position_takes_what_is_cached(exact):
    prompt = list(range(500, 570))
    cached = {}
    for pooling in ("mean", "last"):
        for _ in range(2):
            (output,) = exact.embed([prompt], pooling=pooling, use_tqdm=False)
            cached.setdefault(pooling, []).append(output.num_cached_tokens)
    assert cached == {"mean": [0, 0], "last": [64, 64]}


def test_generating_beside_embeddings_changes_no_token(exact):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (expected,) = exact.generate("Once upon a time", params, use_tqdm=False)
    name = exact.add_request("Once upon a time", params)
    exact.embed(TEXTS, use_tqdm=False)
    last = {}
    while exact.has_unfinished_requests():
        last |= {output.request_id: output for output in exact.step()}
    assert last[name].outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_score_is_the_cosine_of_two_embeddings(exact):
    one, two, *_ = found = vectors(exact, TEXTS, normalize=False)
    scores = [output.outputs.score for output in exact.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert scores == pytest.approx([cosine(one, each) for each in found], abs=1e-6)
    assert scores[0] == pytest.approx(1, abs=1e-9)
    (pair,) = exact.score([TEXTS[0]], [TEXTS[1]], use_tqdm=False)
    assert pair.outputs.score == pytest.approx(cosine(one, two), abs=1e-6)
    pairs = [output.outputs.score for output in exact.score(TEXTS, TEXTS[::-1], use_tqdm=False)]
    assert pairs == pytest.approx([cosine(a, b) for a, b in zip(found, found[::-1], strict=True)], abs=1e-6)
    with pytest.raises(InvalidParameter, match="queries"):
        exact.score(TEXTS[:2], TEXTS, use_tqdm=False)


def test_like_meets_like(exact):
    texts = ["A kitten was sitting on a rug.", "The central bank raised its key rate."]
    scores = [[each.outputs.score for each in exact.score(text, texts, use_tqdm=False)] for text in TEXTS[:2]]
    assert scores[0][0] > scores[0][1]
    assert scores[1][1] > scores[1][0]


def test_mistakes_are_named_and_nothing_is_left_behind(exact):
    longest = exact.card.max_model_len
    for options, param in (
        ({"prompts": ["a", ""]}, "prompt"),
        ({"prompts": "a", "pooling": "max"}, "pooling"),
        ({"prompts": "a", "dimensions": 0}, "dimensions"),
        ({"prompts": "a", "dimensions": 577}, "dimensions"),
        ({"prompts": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            exact.embed(use_tqdm=False, **options)
        assert caught.value.param == param
    with pytest.raises(PromptTooLong):
        exact.embed([[5] * (longest + 1)], use_tqdm=False)
    assert not exact.has_unfinished_requests()
    (cut,) = exact.embed([[5] * (longest + 1)], truncate_prompt_tokens=9, use_tqdm=False)
    assert cut.prompt_token_ids == [5] * 9


async def test_many_at_once_and_an_abort(default_model, exact):
    expected = vectors(exact, TEXTS)
    async with AsyncLLM(str(default_model), kv_cache_memory=60_000_000) as llm:
        found = await asyncio.gather(*(llm.embed(text) for text in TEXTS))
        assert [each.outputs.embedding for each in found] == expected
        apart = exact.score(TEXTS[0], TEXTS, use_tqdm=False)
        assert [each.outputs for each in await llm.score(TEXTS[0], TEXTS)] == [each.outputs for each in apart]
        with pytest.raises(InvalidParameter, match="queries"):
            await llm.score(TEXTS[:2], TEXTS)
        long = asyncio.create_task(llm.embed([7] * 1500, request_id="long"))
        while not llm.health().running:
            await asyncio.sleep(0.002)
        await llm.abort("long")
        with pytest.raises(EngineFault, match="aborted"):
            await long


def test_a_cosine_is_one_of_a_direction_and_0_of_none():
    assert cosine((3, 4), (6, 8)) == pytest.approx(1)
    assert cosine((1, 0), (0, 5)) == 0
    assert cosine((0, 0), (1, 2)) == 0
    assert cosine((1, 1), (-2, -2)) == pytest.approx(-1)


def test_options_of_a_vector():
    usual = EmbeddingSpec(Pooling.LAST, normalize=False)
    assert embedding_spec("mean", True, 3, usual) == EmbeddingSpec(Pooling.MEAN, normalize=True, dimensions=3)
    assert embedding_spec(None, None, None, usual) == usual
    assert (kept_tokens(None, 64), kept_tokens(-1, 64), kept_tokens(5, 64)) == (0, 64, 5)
