"""What a `generation_config.json` says of sampling, and what of it is taken as defaults."""

from __future__ import annotations

import pytest

from penstock.contract.errors import ModelFileError
from penstock.sampling import PARAMETERS, SamplingParams, read_model_defaults

QWEN = {  # as published with Qwen2.5-0.5B-Instruct
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def test_what_a_publisher_recommends_is_read_and_nothing_else():
    defaults = read_model_defaults(QWEN, "x")
    assert defaults == (("repetition_penalty", 1.1), ("temperature", 0.7), ("top_k", 20), ("top_p", 0.8))
    assert SamplingParams(**dict(defaults)).max_tokens == 16


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, ()),
        ({"do_sample": False}, (("temperature", 0.0),)),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, (("temperature", 0.0), ("top_p", 0.9))),
        ({"do_sample": True, "temperature": 0.6}, (("temperature", 0.6),)),
        ({"temperature": None, "top_p": None}, ()),
        ({"temperature": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, ()),
        ({"max_new_tokens": 2048, "max_length": 4096, "min_new_tokens": 4}, ()),
        ({"min_p": 0.05, "typical_p": 0.9}, (("min_p", 0.05), ("typical_p", 0.9))),
    ],
)
def test_which_entries_become_defaults(config, defaults):
    assert read_model_defaults(config, "x") == defaults


def test_only_what_shapes_the_distribution_may_come_from_a_model():
    assert {p.name for p in PARAMETERS if p.from_model} == {
        "min_p",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", "high"), ("top_k", 2.5)])
def test_a_value_that_cannot_be_used_is_refused_with_file_key_and_remedy(name, value):
    with pytest.raises(ModelFileError, match=rf"a/generation_config.json: {name}: .*--generation-config none"):
        read_model_defaults({name: value}, "a/generation_config.json")
