"""The licence that a model's files name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import write_lettered

from penstock.models import gguf_dialect
from penstock.quantizing import plan_file, write_file
from penstock.weights.files import open_model
from penstock.weights.licence import licence_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lettered(tmp_path_factory.mktemp("tiny"), "llama", "wide_heads_untied")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n", "apache-2.0"),
        (
            "---\nlicense: other\nlicense_name: llama3.2\nlicense_link: LICENSE.txt\n---\n",
            "other llama3.2 LICENSE.txt",
        ),
        ("---\r\nlicense: mit\r\n---\r\n", "mit"),
        ("---\nlanguage: en\n---\nlicense: mit\n", ""),
        ("license: mit\n", ""),
        ("---\nlicense: mit\n", ""),
        ("---\nlicense: [\n---\n", ""),
        ("---\n- license\n---\n", ""),
        ("", ""),
    ],
)
def test_a_model_card_names_it(directory, card, said):
    (directory / "README.md").write_text(card, encoding="utf-8", newline="")
    assert licence_of(open_model(directory, gguf_dialect)) == said


def test_it_goes_into_a_gguf_file_and_is_found_there(directory, tmp_path):
    (directory / "README.md").write_text("---\nlicense: gemma\n---\n")
    write_file(plan_file(open_model(directory, gguf_dialect), "F32"), tmp_path / "tiny.gguf", lambda _: None)
    assert licence_of(open_model(tmp_path / "tiny.gguf", gguf_dialect)) == "gemma"
