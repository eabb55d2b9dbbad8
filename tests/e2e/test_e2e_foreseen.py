"""Guided answers of the default model with what their forms foresee, and without: the same bits, in far fewer steps."""

from __future__ import annotations

import json

import pytest

from penstock import LLM, SamplingParams

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 20},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_colour": {"enum": ["red", "green", "dark green"]},
        "nickname": {"type": "string", "maxLength": 12},
    },
    "required": ["full_name", "age_in_years", "favourite_colour"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 4}
CALL = '{"type": "object", "properties": {"command": {"const": "switch on"}}, "required": ["command"]}'
ASKED = [
    SamplingParams(temperature=0, max_tokens=150, structured_outputs={"json": PEOPLE}),
    SamplingParams(temperature=0, max_tokens=150, structured_outputs={"json": PEOPLE}, logprobs=2, n=2, seed=3),
    SamplingParams(temperature=1.3, seed=5, max_tokens=70, structured_outputs={"json": PEOPLE}, logprobs=0),
    SamplingParams(temperature=1.0, seed=6, max_tokens=60, structured_outputs={"json": PERSON}, n=3),
    SamplingParams(temperature=0.9, seed=7, max_tokens=150, structured_outputs={"json": PEOPLE}, stop=["favourite_c"]),
    SamplingParams(temperature=0.9, seed=8, max_tokens=150, structured_outputs={"json": PEOPLE}, min_p=0.1),
    SamplingParams(temperature=0.9, seed=9, max_tokens=99, structured_outputs={"json": PEOPLE}, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, seed=9, max_tokens=9, structured_outputs={"json": json.loads(CALL)}),
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, structured_outputs={"regex": "(colour: (red|green), ){9}!"}),
    SamplingParams(temperature=0, max_tokens=60),
]
PROMPTS = [f"Describe some people, number {number}, as JSON:" for number in range(len(ASKED))]


def answers(llm: LLM, every: int) -> tuple[list[object], int]:
    """Everything that is said of each `every`th answer, and the number of steps that they took."""
    before = llm.scheduler.stats.steps
    outputs = llm.generate(PROMPTS[::every], ASKED[::every], use_tqdm=False)
    said = [
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]
        for output in outputs
    ]
    return said, llm.scheduler.stats.steps - before


@pytest.mark.parametrize(
    ("memory", "every"),
    [
        pytest.param(50_000_000, 4, id="a few"),
        pytest.param(50_000_000, 1, id="all", marks=pytest.mark.deep),
        pytest.param(12_000_000, 1, id="preempting", marks=pytest.mark.deep),
    ],
)
def test_no_answer_differs_and_steps_are_saved(default_model, memory, every):
    with LLM(str(default_model), kv_cache_memory=50_000_000, speculate=False) as llm:
        plain, plain_steps = answers(llm, every)
    with LLM(str(default_model), kv_cache_memory=memory, max_model_len=256) as llm:
        said, steps = answers(llm, every)
        preempted = llm.scheduler.stats.preemptions
    assert said == plain
    if memory == 50_000_000:
        assert steps < plain_steps
    else:
        assert preempted > 0


def test_the_form_is_named_as_who_guessed_and_is_often_right(default_model):
    """How far a guess goes depends on measured times, so its end may be wrong on a busy machine.

    By chance, one token in 49,152 is right.
    """
    with LLM(str(default_model), kv_cache_memory=50_000_000) as llm:
        llm.generate(PROMPTS[0], ASKED[0], use_tqdm=False)
        drafts = dict(llm._engine.measurements().drafts)
    assert drafts["grammar"].tokens > 20
    assert drafts["grammar"].accepted > 0.2 * drafts["grammar"].tokens


def test_nothing_is_foreseen_where_nothing_is_guessed(default_model):
    with LLM(str(default_model), kv_cache_memory=50_000_000, speculate=False) as llm:
        llm.generate(PROMPTS[0], ASKED[0], use_tqdm=False)
        assert llm._engine.measurements().drafts == ()
