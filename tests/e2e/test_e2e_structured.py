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
    """Hot, tight and loose, and every fifth one free."""
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
        squeezed = cramped.generate(prompts, params, use_tqdm=False)
        assert cramped.scheduler.stats.preemptions > 0
    assert tokens_of(squeezed) == tokens_of(together)


def test_conflicts_are_refused_at_the_door(llm):
    for field in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(InvalidParameter) as refused:
            llm.generate("x", SamplingParams(structured_outputs={"choice": ["a"]}, **field), use_tqdm=False)
        assert refused.value.param == next(iter(field))
    with pytest.raises(InvalidParameter, match="only 3 may be generated"):
        llm.generate("x", SamplingParams(structured_outputs={"json": PERSON}, max_tokens=3), use_tqdm=False)
