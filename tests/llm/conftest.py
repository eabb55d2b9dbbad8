"""A tiny model with a tokenizer of letters, and an `LLM` of it for each test file that asks for one."""

from __future__ import annotations

import pytest
from llm_harness import OPTIONS
from tiny_checkpoints import write_lettered

from penstock import LLM


@pytest.fixture(scope="session")
def lettered(tmp_path_factory):
    return str(write_lettered(tmp_path_factory.mktemp("lettered"), "llama", "wide_heads_untied"))


@pytest.fixture(scope="module")
def llm(lettered):
    with LLM(lettered, **OPTIONS) as llm:
        yield llm
