"""Guided answers on the default model: valid, whole, and the same alone, in a batch and after preemptions."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from penstock import LLM, SamplingParams
from penstock.contract.errors import InvalidParameter

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = [{"json": PERSON}, {"json_object": True}, {"regex": "[a-f]{3,9}-[0-9]+"}, {"choice": ["red", "green"]}, None]


def asked(count: int) -> list[SamplingParams]:
    """Parameters with a high temperature, with tight and loose forms, and without a form for every fifth."""
    return [
        SamplingParams(
            temperature=1.5, seed=index, max_tokens=20 + 7 * (index % 4), structured_outputs=FORMS[index % len(FORMS)]
        )
        for index in range(count)
    ]


def tokens_of(outputs) -> list:
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def llm(default_model):
    with LLM(str(default_model), kv_cache_memory=50_000_000) as llm:
        yield llm


def test_hot_answers_are_valid_and_the_same_alone_batched_and_preempted(llm, default_model):
    params = asked(10)
    prompts = [f"Describe person {index} as JSON:" for index in range(len(params))]
    together = llm.generate(prompts, params, use_tqdm=False)
    for output, its in zip(together, params, strict=True):
        answer = output.outputs[0]
        match its.grammar() and its.grammar().kind.value:
            case None:
                continue
            case "json":
                schema = json.loads(its.grammar().source)
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
            case "regex":
                assert re.fullmatch(its.grammar().source, answer.text)
            case "choice":
                assert answer.text in ("red", "green")
        assert answer.finish_reason == "stop"
    alone = [llm.generate(p, its, use_tqdm=False)[0] for p, its in zip(prompts, params, strict=True)]
    assert tokens_of(alone) == tokens_of(together)
    small = {"kv_cache_memory": 7 * 16 * 23_040, "max_num_seqs": 8, "max_model_len": 64}
    with LLM(str(default_model), **small) as cramped:
        for _ in range(2):  # on a busy machine forms are ready one by one; the second time all answers run at once
            squeezed = cramped.generate(prompts, params, use_tqdm=False)
            assert tokens_of(squeezed) == tokens_of(together)
        assert cramped.scheduler.stats.preemptions > 0


@pytest.mark.parametrize(
    "field",
    [{"ignore_eos": True}, {"min_tokens": 3}, {"allowed_token_ids": [1, 2]}, {"bad_words": ["red"]}],
    ids=lambda field: next(iter(field)),
)
def test_conflicts_are_refused_at_the_door(llm, field):
    with pytest.raises(InvalidParameter, match="contradicts structured_outputs") as refused:
        llm.generate("x", SamplingParams(structured_outputs={"choice": ["a"]}, **field), use_tqdm=False)
    assert refused.value.param == next(iter(field))


def test_a_room_that_no_document_fits_is_refused_at_the_door(llm):
    with pytest.raises(InvalidParameter, match="only 3 may be generated"):
        llm.generate("x", SamplingParams(structured_outputs={"json": PERSON}, max_tokens=3), use_tqdm=False)


def biased(token_ids, by: float) -> dict:
    return {"logit_bias": dict.fromkeys(token_ids, by)}


def test_no_other_parameter_leads_out_of_the_grammar_or_past_its_end(llm):
    """Parameters that shift, filter or penalise tokens do so among those that the grammar allows."""
    text = llm._assembly.intake._text
    ends, quotes = sorted(text.eos_token_ids), list(text.tokenizer.encode('"}{:,'))
    fields = [
        biased(ends, 100.0),  # an end is no more likely than the grammar allows
        biased(ends, -100.0),  # and comes in time even so
        biased(quotes, -100.0),
        biased(quotes, 100.0),
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"top_n_sigma": 0.1},
        {"typical_p": 0.1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"dry_multiplier": 5.0, "dry_allowed_length": 1},
        {"temperature": 0.0},
        {"logprobs": 5, "logprobs_mode": "processed_logprobs"},
    ]
    schema = PERSON | {"properties": PERSON["properties"] | {"name": {"type": "string", "minLength": 8}}}
    params = [
        SamplingParams(**{"temperature": 1.5, "seed": 3, "max_tokens": 60} | field, structured_outputs={"json": schema})
        for field in fields
    ]
    for output, field in zip(llm.generate(["Someone:"] * len(params), params, use_tqdm=False), fields, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", (field, answer)
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


@pytest.mark.parametrize("expression", [".*foo", "[a-z]*z", "(.*x.*){3}", "[^\\n]*(end|fin)[.!]"])
def test_a_literal_behind_a_wildcard_is_reached_in_time(llm, expression):
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=16, structured_outputs={"regex": expression})
        for seed in range(4)
    ]
    for output in llm.generate(["Once"] * 4, params, use_tqdm=False):
        assert re.fullmatch(expression, output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"


def test_forced_text_is_spelled_as_the_model_spells_it(llm):
    """Not one byte a token: `{"name": ` takes a handful of tokens."""
    form = {"json": {"type": "object", "properties": {"description": {"type": "integer"}}, "required": ["description"]}}
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=form)
    answer = llm.generate("A JSON object with a description:", params, use_tqdm=False)[0].outputs[0]
    head = answer.text[: answer.text.index(":")]
    assert head.replace(" ", "") == '{"description"'
    tokenizer = llm._assembly.intake._text.tokenizer
    spelled = [tokenizer.decode(answer.token_ids[:count], skip_special_tokens=False) for count in range(12)]
    assert next(count for count, text in enumerate(spelled) if ":" in text) <= 6
