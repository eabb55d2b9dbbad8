"""Beam search against transformers' own on a tiny checkpoint in float32, and against a reference of a few lines."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import LETTERS, write_checkpoint, write_letters
from transformers import AutoModelForCausalLM

from penstock import LLM, AsyncLLM, BeamSearchParams
from penstock.contract.errors import InvalidParameter

OPTIONS = {"kv_cache_memory": 10_000_000, "dtype": "float32", "block_size": 4}
ENDS = (2, 54, 90)  # two of them ids that this model likes
PROMPTS = [[5, 9, 31], [20], [7, 8, 9, 10, 11, 12, 13, 14, 15]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("beams") / "tiny-llama", "llama", "wide_heads_untied")
    write_letters(directory, 101)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS)}))
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def by_transformers(model, prompt, params):
    """[(generated tokens, score)], best first."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            eos_token_id=None if params.ignore_eos else list(ENDS),
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    return [(_until_end(row, params), score) for row, score in zip(rows, out.sequences_scores.tolist(), strict=True)]


def _until_end(row, params):
    ends = [at for at, token in enumerate(row) if token in ENDS and not params.ignore_eos]
    return row[: ends[0] + 1] if ends else row


@pytest.mark.parametrize(("width", "length_penalty"), [(2, 0.0), (3, 2.5), (4, 1.0), (7, -0.5), (12, 1.0)])
def test_it_finds_what_transformers_finds(llm, theirs, width, length_penalty):
    params = BeamSearchParams(beam_width=width, max_tokens=8, length_penalty=length_penalty)
    found = llm.beam_search(PROMPTS, params, use_tqdm=False)
    reasons = set()
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = by_transformers(theirs, prompt, params)
        assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in expected]
        assert [each.score for each in output.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)
        reasons |= {each.finish_reason for each in output.sequences}
    assert "stop" in reasons  # some are complete before the last step


def test_it_finds_what_transformers_finds_where_nothing_ends(llm, theirs):
    params = BeamSearchParams(beam_width=5, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params, use_tqdm=False), strict=True):
        expected = by_transformers(theirs, prompt, params)
        assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in expected]
        assert {each.finish_reason for each in output.sequences} == {"length"}


def reference(model, prompt, width, length, temperature):
    """Beam search without end tokens: keep the `width` best sums, step by step."""
    beams = [([], 0.0)]
    for _ in range(length):
        grown = []
        for tokens, total in beams:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, -1].double()
            for token, logprob in enumerate((logits / temperature).log_softmax(-1).tolist()):
                grown.append(([*tokens, token], total + logprob))
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return beams


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_a_temperature_changes_what_is_summed(llm, theirs, temperature):
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, temperature=temperature)
    [output] = llm.beam_search([PROMPTS[0]], params, use_tqdm=False)
    expected = reference(theirs, PROMPTS[0], 3, 5, temperature)
    assert [each.tokens for each in output.sequences] == [PROMPTS[0] + tokens for tokens, _ in expected]
    assert [each.cum_logprob for each in output.sequences] == pytest.approx([s for _, s in expected], abs=1e-3)
    assert [each.score for each in output.sequences] == pytest.approx([s / 5 for _, s in expected], abs=1e-3)


def test_a_beam_of_one_is_greedy_and_sequences_say_how_they_came_about(llm):
    [output] = llm.beam_search("hello", BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True), use_tqdm=False)
    [sequence] = output.sequences
    prompt = [3 + LETTERS.index(letter) for letter in "hello"]
    assert sequence.tokens[:5] == prompt
    assert sequence.text.startswith("hello")
    chosen = [here[token] for here, token in zip(sequence.logprobs, sequence.tokens[5:], strict=True)]
    assert [found.rank for found in chosen] == [1] * 6
    assert sequence.cum_logprob == pytest.approx(math.fsum(found.logprob for found in chosen))
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)


def test_an_end_is_the_reason_to_stop(llm):
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=8), use_tqdm=False)
    ended = [each for output in found for each in output.sequences if each.finish_reason == "stop"]
    assert ended
    assert all(each.stop_reason == each.tokens[-1] in ENDS for each in ended)


async def test_asynchronously_it_finds_the_same(checkpoint, llm):
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    expected = llm.beam_search(PROMPTS, params, use_tqdm=False)
    async with AsyncLLM(str(checkpoint), **OPTIONS) as other:
        found = await asyncio.gather(*(other.beam_search(prompt, params) for prompt in PROMPTS))
        for one, other_one in zip(found, expected, strict=True):  # float32 is exact up to rounding
            assert [each.tokens for each in one.sequences] == [each.tokens for each in other_one.sequences]
        long = BeamSearchParams(beam_width=4, max_tokens=400, ignore_eos=True)
        running, before = asyncio.create_task(other.beam_search(PROMPTS[0], long)), other.health().steps
        while other.health().steps < before + 3:
            await asyncio.sleep(0.001)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(400):
            if not other.health().running and not other.health().waiting:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(other.health())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("beam_width", bad) for bad in (0, 17, 1.0, True)],
        *[("max_tokens", bad) for bad in (0, None, 2.0)],
        *[("length_penalty", bad) for bad in (math.nan, 11, "1")],
        *[("temperature", bad) for bad in (-1, 2.1, None)],
        ("ignore_eos", 1),
    ],
)
def test_a_wrong_parameter_is_named(field, value):
    with pytest.raises(InvalidParameter) as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3} | {field: value})
    assert refused.value.param == field


def test_a_prompt_that_cannot_be_served_is_refused_and_nothing_is_left(llm):
    with pytest.raises(InvalidParameter, match="vocabulary"):
        llm.beam_search([[5], [1000]], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
    assert not llm.has_unfinished_requests()
