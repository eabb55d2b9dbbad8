"""`penstock tokenizer`: transformers counts and writes prompts of the default model as the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import only_line, penstock
from transformers import AutoTokenizer

from penstock.contract.config import DEFAULT_MODEL, EngineConfig
from penstock.contract.request import Message

TEXTS = (
    "The capital of France is Paris.",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_sep|>",
    "  two  spaces,\ttabs\r\n\n\nlines \u00a0\u2003 ",
    "1234567890 3.14159 ٣٤٥ x²",
    "Grüße 日本語 한국어 हिन्दी 👩🏽‍🚀 e\u0301 é \u200b\ufeff \ufffd \0",
    "def f(x):\n    return x ** 2  # <reponame> <file_sep>\n",
    "",
    " ",
    "a" * 500,
)
TURNS = ("What is the capital of France?", "Paris. <|im_end|> 🙂", "  And\nof Italy? ")


@pytest.mark.model
def test_the_default_models_directory_is_the_default_model_to_transformers(default_model: Path, tmp_path):
    done = penstock("tokenizer", DEFAULT_MODEL, str(tmp_path / "tokenizer"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'tokenizer'}\n"), done.stderr
    from penstock.loading import find_model
    from penstock.text import open_text

    ours = open_text(find_model(EngineConfig(model=str(default_model))).text)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for text in (*TEXTS, *default_model_texts()):
        assert list(ours.tokenizer.encode(text)) == theirs(text)["input_ids"], text
    for count in (1, 3):
        messages = [Message("assistant" if turn % 2 else "user", TURNS[turn]) for turn in range(count)]
        turns = [{"role": message.role, "content": message.content} for message in messages]
        rendered = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert rendered == ours.chat_template.render(messages).text


def default_model_texts() -> list[str]:
    """The project's own pages: prose, code and tables."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return [line for page in pages for line in page.read_text(encoding="utf-8").splitlines(keepends=True)]


def test_a_directory_with_something_in_it_is_refused(default_model: Path, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = penstock("tokenizer", str(default_model), str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert only_line(done.stderr) == (
        f"penstock: DIR: {tmp_path} is not empty; name a new directory, nothing is overwritten"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    done = penstock("tokenizer", "smollm2-135m-instruct", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "is a file" in done.stderr
