"""The half of a model that needs no tensors: its tokenizer, chat template, formats of answers, and grammars.

Names concrete classes of several rooms, as `app`, `building` and `loading` do. A process that only serves imports this,
but not torch; one that computes needs it too, for the vocabulary of grammars.
"""

from __future__ import annotations

from functools import partial

from penstock.contract.config import EngineConfig
from penstock.contract.model import TextFiles
from penstock.grammar import GrammarLibrary, Vocabulary
from penstock.text import TextModel, open_text

__all__ = ["grammars_of", "open_model_text", "vocabulary_of"]


def open_model_text(config: EngineConfig, files: TextFiles) -> TextModel:
    """A model's tokenizer, chat template and formats of answers, with the operator's options applied.

    Raises:
        SetupError: they cannot be read.
    """
    return open_text(
        files,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        chat_template=config.chat_template,
    )


def grammars_of(text: TextModel, vocab_size: int, *, compiles: bool = True) -> GrammarLibrary:
    """Grammars over a model's vocabulary, which is read when the first one is needed.

    Args:
        text: the model's tokenizer and formats.
        vocab_size: number of logits in a row.
        compiles: whether matchers are made in this process too; otherwise requests are only checked.
    """
    return GrammarLibrary(partial(vocabulary_of, text, vocab_size), compiles=compiles, encode=text.tokenizer.encode)


def vocabulary_of(text: TextModel, width: int) -> Vocabulary:
    """A model's vocabulary as grammars see it, `width` tokens wide."""
    tokenizer = text.tokenizer
    special = tuple(id_ for id_ in range(width) if tokenizer.is_special(id_) or id_ in text.eos_token_ids)
    hidden = frozenset(special)
    tokens = tuple(b"" if id_ in hidden else tokenizer.token_bytes(id_) for id_ in range(width))
    return Vocabulary(tokens, special, tuple(sorted(text.eos_token_ids)))
