"""LongRoPE: which factors apply is settled by the context that is served, and never by a sequence's own length."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import load_model, reference_logits, write_checkpoint

from penstock import app
from penstock.contract.config import EngineConfig
from penstock.models import gguf_dialect
from penstock.nn.dense import DenseAttention
from penstock.nn.operations import Rotate
from penstock.weights.files import open_model

ORIGINAL = 11
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "phi3", "partial_long")


def logits(checkpoint, length, max_model_len=None):
    model, tokens = load_model(checkpoint, max_model_len=max_model_len), prompt(length)
    with torch.no_grad():
        return model.logits(model.forward(torch.tensor(tokens), torch.arange(length), DenseAttention()))


def prompt(length):
    return [(7 * i + 3) % 127 for i in range(length)]


@pytest.mark.parametrize("max_model_len", [None, ORIGINAL + 1, 512])
def test_long_factors_serve_every_sequence_where_long_ones_are_served(checkpoint, max_model_len):
    ours = logits(checkpoint, 40, max_model_len)
    torch.testing.assert_close(ours, reference_logits(checkpoint, prompt(40)), atol=TOLERANCE, rtol=0)
    beginning = logits(checkpoint, ORIGINAL, max_model_len)
    torch.testing.assert_close(beginning, ours[:ORIGINAL], atol=TOLERANCE, rtol=0)
    assert (beginning - reference_logits(checkpoint, prompt(ORIGINAL))).abs().max() > 0.01, "which chooses anew"


def test_short_factors_serve_every_sequence_where_none_is_longer_than_those_of_the_pretraining(checkpoint):
    for length in (ORIGINAL, 4):
        ours = logits(checkpoint, length, ORIGINAL)
        torch.testing.assert_close(ours, reference_logits(checkpoint, prompt(length)), atol=TOLERANCE, rtol=0)
    assert (ours - logits(checkpoint, length)).abs().max() > 0.01, "the long factors are others"


def test_the_engine_loads_a_model_for_the_context_that_it_is_told_to_serve(checkpoint):
    for told, served in ((0, None), (ORIGINAL, ORIGINAL), (40, None)):
        config = EngineConfig(model=str(checkpoint), threads=1, dtype="float32", max_model_len=told)
        program = app.load_model(config, open_model(checkpoint, gguf_dialect), lambda line: None).program
        assert torch.equal(cosines(program), cosines(load_model(checkpoint, max_model_len=served).program))


def cosines(program):
    return next(each.table.cos for each in program.operations() if isinstance(each, Rotate))
