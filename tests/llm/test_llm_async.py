"""`AsyncLLM`: streams, readers that leave, and the end."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import pytest_asyncio

from penstock import AsyncLLM, SamplingParams
from penstock.contract.errors import EngineDead, InvalidParameter

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
OPTIONS = {"kv_cache_memory": 50_000_000, "dtype": "float32"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(default_model):
    async with AsyncLLM(str(default_model), **OPTIONS) as llm:
        yield llm


async def last(stream):
    return [output async for output in stream][-1]


async def settled(llm) -> None:
    for _ in range(200):
        health = llm.health()
        if health.running == health.waiting == 0 and health.free_blocks == health.total_blocks:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(llm.health())


async def test_outputs_grow_and_the_last_one_is_finished(llm):
    texts = []
    async for output in llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=10)):
        texts.append(output.outputs[0].text)
        assert output.finished == (output.outputs[0].finish_reason is not None)
    assert output.finished
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert "Paris" in texts[-1]


async def test_many_streams_at_once_say_what_they_say_alone(llm):
    prompts = [f"Count from {i}:" for i in range(6)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, logprobs=0)
    alone = [await last(llm.generate(prompt, params)) for prompt in prompts]
    together = await asyncio.gather(*[last(llm.generate(prompt, params)) for prompt in prompts])
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together]
    assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in together)


async def test_leaving_the_loop_aborts(llm):
    stream = llm.chat(
        [{"role": "user", "content": "Tell me a story."}], SamplingParams(max_tokens=2000, ignore_eos=True)
    )
    async for _ in stream:
        break
    await stream.aclose()
    await settled(llm)


async def test_abort_by_id_ends_the_stream(llm):
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    task = asyncio.create_task(last(llm.generate("Once", params, request_id="mine")))
    while not llm.health().running:
        await asyncio.sleep(0.01)
    await llm.abort("mine")
    output = await task
    assert output.outputs[0].finish_reason == "abort"
    await settled(llm)


async def test_mistakes_are_raised_before_anything_runs(llm):
    with pytest.raises(InvalidParameter, match="vocabulary"):
        await last(llm.generate([999_999]))
    with pytest.raises(InvalidParameter, match="prompt"):
        await last(llm.generate({"text": "no"}))


async def test_after_closing_nothing_is_served(default_model):
    llm = AsyncLLM(str(default_model), **OPTIONS)
    llm.close()
    with pytest.raises(EngineDead):
        await last(llm.generate("x"))
    llm.close()
