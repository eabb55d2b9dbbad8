"""The default model's first answers are those that docs/sampling.md shows."""

from __future__ import annotations

import dataclasses

import pytest
from test_docs import ROOT, loaded

from penstock import LLM
from penstock.kernels import native

FIRST_ANSWERS = loaded(ROOT / "docs" / "write_sampling.py").FIRST_ANSWERS
CUT = " ..."
ISA = "avx512_bf16"
"""Its kernels drew the answers; the last bits of others may draw other words."""


def is_as_printed(answer: str, printed: str) -> bool:
    """Whether an answer is what the page prints, as far as the page prints it."""
    said = " ".join(answer.split())
    return said.startswith(printed.removesuffix(CUT)) if printed.endswith(CUT) else said == printed


@pytest.mark.deep
@pytest.mark.model
@pytest.mark.skipif(native.isas()[:1] != [ISA], reason=f"the page's answers were drawn on a processor with {ISA}")
@pytest.mark.parametrize(("column", "generation_config"), [(1, "none"), (2, "auto")])
def test_the_page_prints_first_answers_of_the_default_model(default_model, column, generation_config):
    questions = [[{"role": "user", "content": row[0]}] for row in FIRST_ANSWERS]
    with LLM(kv_cache_memory=200_000_000, generation_config=generation_config) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), seed=1, max_tokens=60)
        answers = [output.outputs[0].text for output in llm.chat(questions, params)]
    wrong = [
        (row[column], answer)
        for row, answer in zip(FIRST_ANSWERS, answers, strict=True)
        if not is_as_printed(answer, row[column])
    ]
    assert wrong == []
