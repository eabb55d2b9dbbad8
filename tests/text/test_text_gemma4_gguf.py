"""A Gemma 4 with its own tokenizer as a GGUF file: read back the same, and by llama.cpp too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from text_vocabularies import CORPUS, GEMMA4, save
from tiny_checkpoints import VARIANTS, write_checkpoint

from needs import LLAMA_CPP
from peers.llama_server import post, serving
from peers.process import NotInstalledError, program
from penstock.models import gguf_dialect
from penstock.quantizing import plan_file, write_file
from penstock.text import TextModel, open_text
from penstock.weights.files import open_model
from penstock.weights.locate import default_cache_dir

TEXTS = (
    *CORPUS,
    "\n".join(CORPUS),
    "".join(GEMMA4) + 'x<|turn>model\n\nhi<turn|>\n<|tool_call>call:f{a:<|"|>1<|"|>}<tool_call|>',
    "a\n\nb\n\n\nc\n",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[TextModel, Path]:
    """The tokenizer of a directory, and the file made of it."""
    directory = tmp_path_factory.mktemp("gemma4")
    variant = next(iter(VARIANTS["gemma4_text"]))
    write_checkpoint(directory, "gemma4_text", variant, vocab_size=720, vocab_size_per_layer_input=720)
    save("gemma4", directory)
    files = open_model(directory, gguf_dialect)
    write_file(plan_file(files, "F32"), directory / "gemma4.gguf", lambda _: None)
    return open_text(files.text), directory / "gemma4.gguf"


def test_a_gemma_4_is_quantised_with_its_tokenizer(written):
    theirs, file = written
    ours = open_text(open_model(file, gguf_dialect).text)
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text), text
    assert ours.eos_token_ids >= theirs.eos_token_ids
    assert ours.bos_token_id == theirs.bos_token_id


@pytest.mark.deep
def test_llama_cpp_reads_the_same_ids_from_it(written):
    theirs, file = written
    try:
        server = program(default_cache_dir(os.environ) / "peers", "llama.cpp", "llama-server")
    except NotInstalledError:
        pytest.skip(LLAMA_CPP)
    with serving(server, file, ["-c", "256", "-t", "1", "--no-ui"]) as served:
        for text in TEXTS:
            body = {"content": text, "add_special": True, "parse_special": True}
            assert post(f"{served.url}/tokenize", body)["tokens"] == list(theirs.tokenizer.encode(text)), text
