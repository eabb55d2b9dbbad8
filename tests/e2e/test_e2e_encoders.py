"""BERT and XLM-RoBERTa as they are published, tokenizer and pooling included, through a server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from encoder_vocabularies import write_vocabulary
from served import serve
from tiny_encoders import states_of, write_encoder, write_modules

TEXTS = ["Hello, the quick brown fox!", "naïve Café 日本語", "words " * 90, "a"]
CASES = {
    "bert": ("three_heads_two_types", "uncased", {"pooling_mode_cls_token": True}),
    "xlm-roberta": ("three_heads_padding_1", "unigram", {"pooling_mode_mean_tokens": True}),
}


@pytest.fixture(scope="module", params=CASES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant, vocabulary, pooling = CASES[request.param]
    directory = tmp_path_factory.mktemp("published")
    count = write_vocabulary(directory, vocabulary)
    write_encoder(directory, request.param, variant, vocab_size=count)
    write_vocabulary(directory, vocabulary)  # in place of the letters
    return write_modules(directory, pooling, "Normalize")


def vector_of(directory: Path, text: str, longest: int | None = None) -> torch.Tensor:
    """The text's embedding by transformers, as sentence-transformers pools it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    cut = {"truncation": longest is not None, "max_length": longest}
    states = states_of(directory, tokenizer(text, padding=False, **cut)["input_ids"])
    pooling = json.loads((directory / "1_Pooling" / "config.json").read_text())
    pooled = states[0] if pooling.get("pooling_mode_cls_token") else states.mean(0)
    return torch.nn.functional.normalize(pooled, dim=0)


@pytest.mark.one_in(2)
def test_vectors_are_transformers_alone_and_together_and_a_text_too_long_is_refused(published, tmp_path):
    with serve(tmp_path / "trace", str(published), "--dtype", "float32") as served:
        ask = {"model": published.name, "encoding_format": "float"}

        def post(**fields: object) -> httpx.Response:
            return httpx.post(f"{served.url}/v1/embeddings", json=ask | fields, timeout=120)

        together = [each["embedding"] for each in post(input=TEXTS).json()["data"]]
        alone = [post(input=text).json()["data"][0]["embedding"] for text in TEXTS]
        long = "words " * 600
        refused, cut = post(input=long), post(input=long, truncate_prompt_tokens=-1)
        generating = httpx.post(f"{served.url}/v1/completions", json={"model": published.name, "prompt": "a"})
    assert together == alone
    for text, vector in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(torch.tensor(vector), vector_of(published, text), atol=1e-5, rtol=0)
    assert refused.status_code == 400
    assert "maximum context length is 512" in refused.text
    expected = vector_of(published, long, longest=512)
    torch.testing.assert_close(torch.tensor(cut.json()["data"][0]["embedding"]), expected, atol=1e-5, rtol=0)
    assert generating.status_code == 400
    assert "only embeds" in generating.text
