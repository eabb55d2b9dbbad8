"""A tiny model that can follow grammars, with a conversation's form in plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import BYTE_VOCABULARY, write_byte_tokenizer, write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("certified")
    write_checkpoint(directory, "llama", "wide_heads_untied", intermediate_size=96, vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(directory)
    return directory
