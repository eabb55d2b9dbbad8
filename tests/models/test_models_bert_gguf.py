"""BERT from GGUF: what llama.cpp's conversion writes of a checkpoint embeds as the checkpoint does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from encoder_vocabularies import ENCODER_TEXTS, write_vocabulary
from safetensors.torch import load_file
from tiny_encoders import write_encoder

from penstock import LLM
from penstock.contract.errors import ModelFileError
from penstock.models import gguf_dialect
from penstock.weights.files import open_model

KEYS = ("cls", "seperator")
"""What older conversions call the tokens around a text."""


def write_bert(
    path: Path, directory: Path, named: tuple[str, str] = KEYS, *, causal: bool = False, **replaced: Any
) -> Path:
    """The checkpoint as llama.cpp's `conversion/bert.py` writes it, in float32; `replaced` are keys, None for none."""
    config, tokenizer = (json.loads((directory / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    before = config["pad_token_id"] + 1 if config["model_type"] != "bert" else 0
    writer = gguf.GGUFWriter(path, "bert")
    keys = {
        "bert.block_count": config["num_hidden_layers"],
        "bert.context_length": config["max_position_embeddings"] - before,
        "bert.embedding_length": config["hidden_size"],
        "bert.feed_forward_length": config["intermediate_size"],
        "bert.attention.head_count": config["num_attention_heads"],
        "bert.pooling_type": 2,
        "tokenizer.ggml.token_type_count": config["type_vocab_size"],
        "tokenizer.ggml.unknown_token_id": 1,
        f"tokenizer.ggml.{named[0]}_token_id": 2,
        f"tokenizer.ggml.{named[1]}_token_id": 3,
    }
    for key, value in (keys | replaced).items():
        if value is not None:
            writer.add_uint32(key, value)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(causal)
    special = {each["id"] for each in tokenizer["added_tokens"]}
    spelled = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokens = [
        token if id_ in special else token[2:] if token.startswith("##") else f"\u2581{token}"
        for id_, token in enumerate(spelled)
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if id_ in special else 1 for id_ in range(len(tokens))])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.startswith("pooler"):
            kept = tensor[before:].contiguous() if "position_embeddings" in name else tensor
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), kept.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def published(directory: Path, family: str, variant: str, vocabulary: str) -> Path:
    directory.mkdir()
    count = write_vocabulary(directory, vocabulary)
    write_encoder(directory, family, variant, vocab_size=count, hidden_act="gelu")
    write_vocabulary(directory, vocabulary)  # in place of the letters
    return directory


@pytest.mark.parametrize(
    ("family", "variant", "vocabulary", "named"),
    [
        ("bert", "three_heads_two_types", "uncased", KEYS),
        ("bert", "one_head_tanh_one_type_large_eps", "cased", ("bos", "eos")),
        ("xlm-roberta", "seven_heads_large_eps", "cased", ("bos", "seperator")),
    ],
)
def test_vectors_are_those_of_the_checkpoint(tmp_path, family, variant, vocabulary, named):
    directory = published(tmp_path / "whole", family, variant, vocabulary)
    path = write_bert(tmp_path / "tiny.gguf", directory, named)
    texts, found = [*ENCODER_TEXTS, "a [MASK] b"], []
    for model in (directory, path):
        with LLM(str(model), dtype="float32", max_model_len=320) as llm:
            outputs = llm.embed(texts, pooling="cls" if model == directory else None, use_tqdm=False)
            found.append([(output.prompt_token_ids, torch.tensor(output.outputs.embedding)) for output in outputs])
    for (ids, wanted), (ours, vector) in zip(*found, strict=True):
        assert ours == ids
        torch.testing.assert_close(vector, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"causal": True}, "bert.attention.causal: must be false in a bert file"),
        ({"bert.pooling_type": 4}, "bert.pooling_type: 4 is not supported"),
        ({"bert.attention.head_count": 7}, "num_attention_heads: must divide hidden_size"),
        ({"tokenizer.ggml.unknown_token_id": None}, "unknown_token_id: is missing"),
        ({"tokenizer.ggml.cls_token_id": None}, "add_bos_token: is true, but there is no bos_token_id"),
    ],
)
def test_what_a_file_says_that_is_not_done_is_refused_by_key(tmp_path, replaced, said):
    directory = published(tmp_path / "whole", "bert", "three_heads_two_types", "uncased")
    path = write_bert(tmp_path / "tiny.gguf", directory, **replaced)
    with pytest.raises(ModelFileError, match=said):
        LLM(str(path), max_model_len=64)


def test_a_file_is_not_written_again(tmp_path):
    from penstock.quantizing import plan_file

    directory = published(tmp_path / "whole", "bert", "three_heads_two_types", "uncased")
    path = write_bert(tmp_path / "tiny.gguf", directory)
    with pytest.raises(ModelFileError, match="cannot be written as GGUF"):
        plan_file(open_model(directory, gguf_dialect), "F32")
    assert open_model(path, gguf_dialect).config["model_type"] == "bert"
