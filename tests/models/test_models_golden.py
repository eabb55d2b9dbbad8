"""Every family computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import VARIANTS, cases, load_model, reference_greedy, reference_logits, write_checkpoint
from tiny_encoders import ENCODERS

from penstock.models.families import families
from penstock.nn.dense import DenseAttention

PROMPT_LENGTH = 12
TOLERANCE = 1e-4


@pytest.fixture(
    scope="module", params=[pytest.param(each.values, marks=each.marks) for each in cases(every=True)], ids="-".join
)
def checkpoint(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), *request.param)


def sequence(vocab_size, length):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def dense_logits(model, token_ids, attend, start=0):
    with torch.no_grad():
        positions = torch.arange(start, start + len(token_ids))
        return model.logits(model.forward(torch.tensor(token_ids), positions, attend))


def greedy(model, prompt, count):
    attend, tokens, latest = DenseAttention(), [], list(prompt)
    for _ in range(count):
        start = len(prompt) + len(tokens) - len(latest)
        latest = [int(dense_logits(model, latest, attend, start)[-1].argmax())]
        tokens += latest
    return tokens


def test_every_family_has_at_least_three_golden_checkpoints():
    written = {family.replace("-", "_") for family in [*VARIANTS, *ENCODERS]}
    assert written == set(families())
    assert all(len(variants) >= 3 for variants in [*VARIANTS.values(), *ENCODERS.values()])


@pytest.mark.one_in(2)
def test_logits_of_every_position_are_those_of_transformers(checkpoint):
    model = load_model(checkpoint)
    token_ids = sequence(model.shape.vocab_size, 80)  # as long as the smallest sliding window
    logits = dense_logits(model, token_ids, DenseAttention())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference_logits(checkpoint, token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [44, pytest.param(64, marks=pytest.mark.deep)])
def test_greedy_tokens_with_kept_keys_and_values_are_those_of_transformers(checkpoint, count):
    model = load_model(checkpoint)
    prompt = sequence(model.shape.vocab_size, PROMPT_LENGTH)
    tokens = greedy(model, prompt, count)
    assert tokens == reference_greedy(checkpoint, prompt, tokens)
    assert len(set(tokens)) > 3  # a model stuck on one token would agree with almost anything


@pytest.mark.one_in(2)
def test_a_sequence_in_chunks_has_the_logits_of_the_whole(checkpoint):
    model = load_model(checkpoint)
    token_ids = sequence(model.shape.vocab_size, 30)
    whole = dense_logits(model, token_ids, DenseAttention())
    attend, start, parts = DenseAttention(), 0, []
    for chunk in (1, 7, 13, 9):
        parts.append(dense_logits(model, token_ids[start : start + chunk], attend, start))
        start += chunk
    torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(3)
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16_is(checkpoint):
    model = load_model(checkpoint, torch.bfloat16)
    token_ids = sequence(model.shape.vocab_size, 40)
    logits = dense_logits(model, token_ids, DenseAttention())
    exact = reference_logits(checkpoint, token_ids)
    theirs = reference_logits(checkpoint, token_ids, torch.bfloat16)
    assert logits.isfinite().all()
    ours, allowed = ((each - exact).pow(2).mean() for each in (logits, theirs))
    assert ours <= 1.5 * allowed


def test_the_shape_is_what_transformers_says(checkpoint):
    from transformers import AutoConfig

    config, shape = AutoConfig.from_pretrained(checkpoint).get_text_config(), load_model(checkpoint).shape
    config.allow_global_per_layer_attribute_access = True  # what all layers have that are not said to differ
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.vocab_size,
    )
    assert shape.num_kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert shape.max_positions == config.max_position_embeddings
