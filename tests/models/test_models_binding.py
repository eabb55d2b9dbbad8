"""What checkpoints hold beside a model's weights, and what they lack."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import forget_references, load_model, reference_logits, write_checkpoint

from penstock.contract.errors import ModelFileError
from penstock.nn.dense import DenseAttention

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def logits(directory):
    with torch.no_grad():
        model = load_model(directory)
        return model.logits(model.forward(torch.tensor(TOKENS), torch.arange(len(TOKENS)), DenseAttention()))


@pytest.fixture
def rewrite(tmp_path):
    """Write a checkpoint, let a function change its tensors; gives the directory and the logits before the change."""

    def write(family, variant, change):
        directory = write_checkpoint(tmp_path, family, variant)
        expected = reference_logits(directory, TOKENS)
        tensors = change(load_file(directory / "model.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
        forget_references()
        return directory, expected

    return write


def test_gpt2_loads_without_prefix_and_with_the_buffers_of_the_original_release(rewrite):
    def change(tensors):
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        for layer in range(3):
            bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
            bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        return bare

    directory, expected = rewrite("gpt2", "tied", change)
    torch.testing.assert_close(logits(directory), expected, atol=1e-4, rtol=0)


def test_stored_rotary_frequencies_are_ignored(rewrite):
    def change(tensors):
        stored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(10) for layer in range(3)}
        return tensors | stored | {"model.rotary_emb.inv_freq": torch.zeros(10)}

    directory, expected = rewrite("llama", "wide_heads_untied", change)
    torch.testing.assert_close(logits(directory), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "variant", "embedding"),
    [
        ("llama", "one_to_one_tied_linear", "model.embed_tokens.weight"),
        ("gpt2", "tied", "transformer.wte.weight"),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_stored_head_beside_tied_embeddings_is_used_as_transformers_uses_it(
    rewrite, family, variant, embedding, factor
):
    directory, expected = rewrite(
        family, variant, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].flip(0) * factor}
    )
    theirs = reference_logits(directory, TOKENS)
    assert not torch.allclose(theirs, expected, atol=1e-2), "transformers ignores the stored head"
    torch.testing.assert_close(logits(directory), theirs, atol=1e-4, rtol=0)


def test_a_stored_copy_of_the_embedding_is_no_second_weight(rewrite):
    directory, expected = rewrite(
        "llama",
        "one_to_one_tied_linear",
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    )
    program = load_model(directory).program
    assert program.head.weight is program.embedding[0].table
    torch.testing.assert_close(logits(directory), expected, atol=1e-4, rtol=0)


def test_an_untied_model_without_head_is_refused_by_name(rewrite):
    directory, _ = rewrite(
        "llama", "wide_heads_untied", lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    )
    with pytest.raises(ModelFileError) as caught:
        load_model(directory)
    assert caught.value.key == "lm_head.weight"


@pytest.mark.parametrize(
    ("family", "variant", "extra"),
    [
        ("llama", "wide_heads_untied", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen2", "gqa3_tied", "model.layers.0.self_attn.o_proj.bias"),
        ("mistral", "wide_heads_no_window", "model.layers.3.input_layernorm.weight"),
        ("gpt2", "tied", "transformer.h.0.crossattention.c_attn.weight"),
        ("qwen3", "wide_heads_tied", "score.weight"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(rewrite, family, variant, extra):
    directory, _ = rewrite(family, variant, lambda tensors: tensors | {extra: torch.zeros(4)})
    with pytest.raises(ModelFileError, match=extra.replace(".", r"\.")):
        load_model(directory)


def test_a_tensor_of_another_shape_is_refused_by_name(rewrite):
    name = "model.layers.1.mlp.down_proj.weight"
    directory, _ = rewrite("qwen3", "wide_heads_tied", lambda tensors: tensors | {name: tensors[name].T})
    with pytest.raises(ModelFileError) as caught:
        load_model(directory)
    assert caught.value.key == name


def test_layers_do_not_share_memory_with_each_other_unless_tied(tmp_path):
    tied = load_model(write_checkpoint(tmp_path, "llama", "one_to_one_tied_linear"))
    assert tied.program.head.weight.numbers.data_ptr() == tied.program.embedding[0].table.numbers.data_ptr()
    untied = load_model(write_checkpoint(tmp_path, "llama", "wide_heads_untied"))
    assert untied.program.head.weight.numbers.data_ptr() != untied.program.embedding[0].table.numbers.data_ptr()
