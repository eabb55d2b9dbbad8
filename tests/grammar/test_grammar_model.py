"""The three hundred schemas on the default model, at a high temperature, with just enough tokens and with more."""

from __future__ import annotations

import json

import pytest
from grammar_fewest import Trie
from grammar_harness import library
from grammar_large import large_schemas
from grammar_schemas import schemas
from test_grammar_oracle import assert_the_fewest_tokens_are_found
from test_grammar_schemas import CHECKED, FORMATS

from penstock import LLM, SamplingParams
from penstock.contract.config import EngineConfig
from penstock.contract.errors import InvalidParameter
from penstock.loading import find_model
from penstock.model_text import vocabulary_of
from penstock.text import open_text

pytestmark = pytest.mark.model

SCHEMAS = schemas()


@pytest.fixture(scope="module")
def llm(default_model):
    with LLM(str(default_model), kv_cache_memory=200_000_000, max_num_seqs=32) as llm:
        yield llm


def hot(schema: dict, limit: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=limit, structured_outputs={"json": schema})


def fewest_tokens(llm, schema: dict) -> int:
    """The fewest tokens, as the refusal of a request with too few tokens names them."""
    with pytest.raises(InvalidParameter, match="shortest document found takes") as refused:
        llm.generate("x", hot(schema, 1, 0), use_tqdm=False)
    assert refused.value.param == "max_tokens"
    return int(refused.value.message.split("takes ")[1].split()[0])


def assert_all_valid(llm, asked: list[dict]) -> None:
    for schema in asked:
        limit = fewest_tokens(llm, schema)
        with pytest.raises(InvalidParameter):
            llm.generate("x", hot(schema, limit - 1, 0), use_tqdm=False)
        params = [hot(schema, limit, 1), hot(schema, limit + 3, 2), hot(schema, limit + 40, 3)]
        prompts = [f"A document of the schema {json.dumps(schema)[:200]}:"] * len(params)
        for output, its in zip(llm.generate(prompts, params, use_tqdm=False), params, strict=True):
            answer = output.outputs[0]
            assert answer.finish_reason == "stop", (schema, answer.text)
            assert len(answer.token_ids) <= its.max_tokens
            CHECKED(schema, format_checker=FORMATS).validate(json.loads(answer.text))


@pytest.fixture(scope="module")
def its_library(default_model):
    text = open_text(find_model(EngineConfig(model=str(default_model))).text)
    return library(vocabulary_of(text, text.tokenizer.vocab_size))


@pytest.fixture(scope="module")
def its_trie(its_library):
    return Trie(its_library._ready().tokens)


def test_documents_of_every_sixtieth_schema_are_whole_and_valid(llm):
    assert_all_valid(llm, SCHEMAS[4::60])


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_documents_of_all_schemas_are_whole_and_valid(llm, part):
    assert_all_valid(llm, SCHEMAS[part::10])


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_the_fewest_tokens_of_all_schemas_is_found(its_library, its_trie, part):
    assert_the_fewest_tokens_are_found(its_library, SCHEMAS[part::10], its_trie)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(3))
def test_the_fewest_tokens_of_large_schemas_is_found(its_library, its_trie, part):
    """Nine of them: the oracle takes its time."""
    assert_the_fewest_tokens_are_found(its_library, large_schemas()[part:24:9], its_trie)
