"""What the tests of the command line share."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from command_line import only_line, penstock

TEMPLATE = "{% for m in messages %}{{ m.content }}. {% endfor %}"


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> str:
    """A model that never ends an answer by itself, with a context that takes minutes to fill."""
    from tiny_checkpoints import write_checkpoint, write_letters  # imports transformers

    directory = write_checkpoint(
        tmp_path_factory.mktemp("endless"), "llama", "wide_heads_untied", max_position_embeddings=1_000_000
    )
    write_letters(directory, 101)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return str(directory)


@pytest.fixture
def refused() -> Callable[..., str]:
    """Run a command that must print nothing and exit with code 2; returns its one line of error."""

    def call(*arguments: str, isa: str = "") -> str:
        done = penstock(*arguments, isa=isa)
        assert (done.returncode, done.stdout) == (2, ""), done
        return only_line(done.stderr)

    return call
