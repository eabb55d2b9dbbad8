"""A tiny model and its scoring, shared by the quality tests with and without other engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tiny_checkpoints import write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.bench import quality
from penstock.contract.config import EngineConfig
from penstock.models import gguf_dialect
from penstock.weights.files import open_model


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def write_tiny(target: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    directory = write_checkpoint(target, "llama", "wide_heads_untied", torch.bfloat16)
    vocab = {letter: index for index, letter in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:100]])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<s>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>").save_pretrained(directory)
    return directory


def opened(directory: Path, context: int, **options) -> quality.ScoredModel:
    config = EngineConfig(model=str(directory), dtype="float32", threads=1)
    return quality.load_scored(replace(config, **options), open_model(directory, gguf_dialect), context)


def scored(
    directory: Path, tokens: list[int], context: int = 20, **options
) -> tuple[quality.Reference, quality.Scores]:
    chunks = quality.Chunks(context, tuple(tuple(tokens[i : i + context]) for i in range(0, len(tokens), context)))
    steps: list[None] = []
    reference = quality.Reference(opened(directory, context), chunks, lambda: steps.append(None))
    scores = quality.score(reference, opened(directory, context, **options).scorer, lambda: steps.append(None))
    assert len(steps) == 2 * len(chunks.tokens)
    return reference, scores


TOKENS = torch.randint(3, 100, (60,), generator=torch.Generator().manual_seed(3)).tolist()
