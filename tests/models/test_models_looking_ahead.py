"""Models that look ahead: states and embeddings are transformers', the same bits alone and among others."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import load_model, write_checkpoint
from tiny_encoders import ENCODERS, encoder_cases, states_of, write_encoder, write_modules

from penstock import LLM
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, InvalidParameter, ModelFileError, PromptTooLong
from penstock.kernels import native
from penstock.loading import plan_model, resolve_choices, with_whole_prompts
from penstock.models import gguf_dialect
from penstock.nn.dense import DenseAttention
from penstock.quantizing import plan_directory, plan_file, write_directory
from penstock.weights.files import open_model

TOLERANCE = 1e-4
LENGTHS = (1, 7, 90, 20, 300)


@pytest.fixture(scope="module", params=encoder_cases())
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), *request.param)


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), "modernbert", "three_heads_small_window")


def prompts_of(directory: Path) -> list[list[int]]:
    """Of all tokens but padding, which no tokenizer puts into a text."""
    config = json.loads((directory / "config.json").read_text())
    tokens = torch.tensor([each for each in range(config["vocab_size"]) if each != config.get("pad_token_id")])
    generator = torch.Generator().manual_seed(len(tokens))
    return [tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist() for length in LENGTHS]


def embedded(llm: LLM, prompts: list[list[int]], **options: object) -> list[torch.Tensor]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [torch.tensor(output.outputs.embedding) for output in llm.embed(asked, use_tqdm=False, **options)]


def test_states_of_every_position_are_those_of_transformers(encoder):
    model, prompt = load_model(encoder), prompts_of(encoder)[2]
    with torch.no_grad():
        ours = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), DenseAttention())
    torch.testing.assert_close(ours, states_of(encoder, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(2)
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16_is(encoder):
    model, ours, theirs = load_model(encoder, torch.bfloat16), [], []
    for prompt in prompts_of(encoder):
        with torch.no_grad():
            states = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), DenseAttention()).float()
        exact = states_of(encoder, prompt)
        ours.append((states - exact).square().mean())
        theirs.append((states_of(encoder, prompt, torch.bfloat16) - exact).square().mean())
    # Errors of one prompt differ by a factor of two either way, so it is their mean over the prompts that is compared.
    assert sum(ours) <= 1.5 * sum(theirs)


@pytest.mark.parametrize("backend", ["compiled", pytest.param("torch", marks=pytest.mark.deep)])
def test_embeddings_are_the_pooled_states_of_transformers(encoder, backend, monkeypatch):
    if backend == "torch":
        monkeypatch.setenv("PENSTOCK_ISA", "torch")
    prompts = prompts_of(encoder)
    with LLM(str(encoder), dtype="float32", max_model_len=320) as llm:
        found = {way: embedded(llm, prompts, pooling=way, normalize=False) for way in ("mean", "cls", "last")}
    for index, prompt in enumerate(prompts):
        states = states_of(encoder, prompt)
        for way, wanted in (("mean", states.mean(0)), ("cls", states[0]), ("last", states[-1])):
            torch.testing.assert_close(found[way][index], wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(not native.available(), reason="torch's kernels are exact up to rounding only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["modernbert", "bert", "xlm-roberta"])
def test_bits_depend_neither_on_the_batch_nor_on_threads(family, dtype, tmp_path):
    directory = write_encoder(tmp_path, family, next(iter(ENCODERS[family])))
    prompts, found = prompts_of(directory), []
    for threads, options in ((1, {}), (3, {}), (2, {"max_num_seqs": 2}), (1, {"block_size": 5})):
        with LLM(str(directory), dtype=dtype, threads=threads, max_model_len=320, **options) as llm:
            found += [embedded(llm, prompts), [embedded(llm, [prompt])[0] for prompt in prompts]]
    for one, other in pairwise(found):
        assert all(map(torch.equal, one, other))


def test_nothing_is_generated_and_a_prompt_longer_than_a_step_is_refused(modernbert):
    with LLM(str(modernbert), max_model_len=40, max_num_batched_tokens=64) as llm:
        assert not llm.card.generates
        assert any(line.startswith("embeds only") for line in llm.report)
        assert llm.report[-1] == "longest request  40 tokens"
        with pytest.raises(InvalidParameter, match="model: only embeds"):
            llm.generate("what is it")
        with pytest.raises(PromptTooLong, match="maximum context length is 40"):
            embedded(llm, [[3] * 41])
        assert len(embedded(llm, [[3] * 40])) == 1


def test_the_context_is_what_the_model_was_made_for_whatever_the_step_was_to_be(modernbert):
    with LLM(str(modernbert), max_num_batched_tokens=64) as llm:
        assert llm.card.max_model_len == 512
        [whole] = embedded(llm, [[3, 4] * 256])
    with LLM(str(modernbert), kv_cache_memory="100KB") as llm:
        assert 16 <= llm.card.max_model_len < 512
        with pytest.raises(PromptTooLong):
            embedded(llm, [[3, 4] * 256])
    assert whole.norm() == pytest.approx(1)


def test_a_step_takes_no_more_than_a_quarter_of_the_memory(modernbert):
    config, files = EngineConfig(model=str(modernbert), max_num_seqs=1), open_model(modernbert, gguf_dialect)
    planned = plan_model(config, files, resolve_choices(config, files))
    found = [with_whole_prompts(config, planned, free) for free in (1 << 40, 4 << 20, 1 << 20, 1)]
    lengths = [each.max_model_len for each in found]
    assert lengths[0] == 512 > lengths[1] > lengths[2] > lengths[3] == 1
    assert [each.max_num_batched_tokens for each in found] == [512, *[max(256, length) for length in lengths[1:]]]
    wanted = with_whole_prompts(replace(config, max_model_len=300), planned, 1)
    assert (wanted.max_model_len, wanted.max_num_batched_tokens) == (300, 300)


def test_nothing_of_a_prompt_is_found_again(modernbert):
    with LLM(str(modernbert), max_model_len=128) as llm:
        outputs = [llm.embed({"prompt_token_ids": [3, 4] * 40}, pooling="last", use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].outputs == outputs[1].outputs


def test_dense_modules_are_part_of_the_vector(tmp_path):
    """As EmbeddingGemma is published: mean, two layers without activation, length 1."""
    directory = write_encoder(tmp_path, "gemma3_text", "wide_heads_tied_small_window")
    write_modules(directory, {"pooling_mode_mean_tokens": True}, "Dense", "Dense", "Normalize")
    generator, weights = torch.Generator().manual_seed(0), []
    for index, (inputs, outputs, activation) in enumerate(
        ((48, 100, "torch.nn.modules.linear.Identity"), (100, 36, "torch.nn.modules.activation.Tanh")), start=2
    ):
        module = directory / f"{index}_Dense"
        module.mkdir()
        config = {"in_features": inputs, "out_features": outputs, "bias": index == 3, "activation_function": activation}
        (module / "config.json").write_text(json.dumps(config))
        weights.append([torch.randn(outputs, inputs, generator=generator) / inputs**0.5])
        tensors = {"linear.weight": weights[-1][0]}
        if index == 3:
            weights[-1].append(torch.randn(outputs, generator=generator))
            tensors["linear.bias"] = weights[-1][1]
        save_file(tensors, module / "model.safetensors")
    prompts = prompts_of(directory)
    with LLM(str(directory), dtype="float32", max_model_len=320) as llm:
        assert llm.card.hidden_size == 36
        found, cut = embedded(llm, prompts), embedded(llm, prompts, dimensions=9)
        alone = [embedded(llm, [prompt])[0] for prompt in prompts]
    write_directory(plan_directory(open_model(directory, gguf_dialect), "F32"), tmp_path / "copy", lambda _: None)
    with LLM(str(tmp_path / "copy"), dtype="float32", max_model_len=320) as llm:
        assert all(map(torch.equal, embedded(llm, prompts), found))
    for index, prompt in enumerate(prompts):
        vector = states_of(directory, prompt).mean(0) @ weights[0][0].T
        vector = (vector @ weights[1][0].T + weights[1][1]).tanh()
        wanted = torch.nn.functional.normalize(vector, dim=0)
        torch.testing.assert_close(found[index], wanted, atol=TOLERANCE, rtol=0)
        wanted = torch.nn.functional.normalize(vector[:9], dim=0)
        torch.testing.assert_close(cut[index], wanted, atol=TOLERANCE, rtol=0)
        if native.available():
            assert torch.equal(alone[index], found[index])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"in_features": 47}, "in_features: must be 48"),
        ({"out_features": 0}, "out_features: must lie in 1.."),
        (
            {"activation_function": "torch.nn.modules.activation.GELU"},
            "activation_function: .*GELU' is not implemented",
        ),
        ({"dropout": 0.1}, "dropout: is not implemented"),
        ({"bias": True}, "linear.bias"),
    ],
)
def test_a_dense_module_that_is_not_understood_is_refused(tmp_path, changes, said):
    directory = write_encoder(tmp_path, "gemma3_text", "wide_heads_tied_small_window")
    write_modules(directory, {"pooling_mode_mean_tokens": True}, "Dense")
    (directory / "2_Dense").mkdir()
    config = {"in_features": 48, "out_features": 20, "bias": False, **changes}
    (directory / "2_Dense" / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.zeros(20, 48)}, directory / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelFileError, match=said):
        LLM(str(directory), max_model_len=64)


@pytest.mark.parametrize("family", list(ENCODERS))
def test_a_model_that_guesses_masked_tokens_is_read_without_its_head(tmp_path, family):
    from transformers import AutoModelForMaskedLM

    directory = write_encoder(tmp_path / "bare", family, next(iter(ENCODERS[family])))
    AutoModelForMaskedLM.from_pretrained(directory).save_pretrained(tmp_path / "headed")
    prompt = torch.tensor(prompts_of(directory)[1])
    ours, bare = (
        load_model(each).forward(prompt, torch.arange(len(prompt)), DenseAttention())
        for each in (tmp_path / "headed", directory)
    )
    assert torch.equal(ours, bare)


@pytest.mark.parametrize("family", list(ENCODERS))
def test_a_classifiers_weights_are_not_passed_over(tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    directory = write_encoder(tmp_path / "bare", family, next(iter(ENCODERS[family])))
    AutoModelForSequenceClassification.from_pretrained(directory).save_pretrained(tmp_path / "headed")
    with pytest.raises(ModelFileError, match="classifier"):
        load_model(tmp_path / "headed")


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_text_may_be_as_long_as_the_positions_behind_the_padding_tokens(tmp_path, family):
    directory = write_encoder(tmp_path, family, next(iter(ENCODERS[family])))
    assert json.loads((directory / "config.json").read_text())["max_position_embeddings"] in (512, 514)
    with LLM(str(directory), dtype="float32") as llm:
        assert llm.card.max_model_len == 512
        [whole] = embedded(llm, [[3, 4] * 256], normalize=False)
        with pytest.raises(PromptTooLong, match="maximum context length is 512"):
            embedded(llm, [[3] * 513])
    torch.testing.assert_close(whole, states_of(directory, [3, 4] * 256).mean(0), atol=TOLERANCE, rtol=0)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(directory), max_model_len=513)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_directory_of_integers_points_where_the_checkpoint_points(tmp_path, family):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    directory = write_encoder(tmp_path / "whole", family, next(iter(ENCODERS[family])), **sizes)
    write_directory(plan_directory(open_model(directory, gguf_dialect), "INT8"), tmp_path / "int8", lambda _: None)
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert sum(each.dtype == torch.int8 for each in stored.values()) == 6 * 3  # every projection of each layer
    prompts, found = prompts_of(directory), []
    for each in (directory, tmp_path / "int8"):
        with LLM(str(each), dtype="float32", max_model_len=320) as llm:
            found.append(embedded(llm, prompts))
    for whole, rounded in zip(*found, strict=True):
        assert 0.999 < torch.dot(whole, rounded) < 1 - 1e-7


def test_names_of_the_first_release_mean_the_same(tmp_path):
    """As in bert-base-uncased: TensorFlow's names of norms, heads, and what the config determines."""
    directory = write_encoder(tmp_path / "new", "bert", "three_heads_two_types")
    old = tmp_path / "old"
    old.mkdir()
    for each in directory.iterdir():
        (old / each.name).write_bytes(each.read_bytes())
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {"cls.predictions.bias": torch.zeros(101), "cls.seq_relationship.weight": torch.zeros(2, 60)}
    tensors["bert.embeddings.position_ids"] = torch.arange(512)[None]
    for name, tensor in load_file(directory / "model.safetensors").items():
        for now, before in renamed.items():
            name = name.replace(now, before)
        tensors[f"bert.{name}"] = tensor
    save_file(tensors, old / "model.safetensors")
    prompt = torch.tensor(prompts_of(directory)[1])
    ours, before = (
        load_model(each).forward(prompt, torch.arange(len(prompt)), DenseAttention()) for each in (directory, old)
    )
    assert torch.equal(ours, before)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("bert", {"hidden_act": "silu"}, "hidden_act: 'silu' is not implemented"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' is not"),
        ("bert", {"is_decoder": True}, "is_decoder: True is not implemented"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention: True is not implemented"),
        ("bert", {"num_key_value_heads": 1}, "num_attention_heads: this family has heads that add up"),
        ("bert", {"type_vocab_size": 3}, "token_type_embeddings.weight: has shape"),
        ("xlm-roberta", {"pad_token_id": 513}, "max_position_embeddings: must be above 514, got 514"),
        ("xlm-roberta", {"pad_token_id": -1}, "pad_token_id: must lie in 0.."),
    ],
)
def test_settings_of_berts_that_are_not_implemented_are_refused(tmp_path, family, changes, said):
    directory = write_encoder(tmp_path, family, next(iter(ENCODERS[family])))
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=said):
        load_model(directory)


@pytest.mark.parametrize(
    ("family", "variant", "said"),
    [
        ("qwen3_next", None, "is_causal: false is not implemented for this model: it carries recurrent state"),
        ("deepseek_v2", None, "is_causal: false is not implemented for this model: attention over a latent cache"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "is_causal: False is not implemented"),
    ],
)
def test_what_cannot_look_ahead_is_refused(tmp_path, family, variant, said):
    from tiny_checkpoints import VARIANTS

    directory = write_checkpoint(tmp_path, family, next(iter(VARIANTS[family])))
    config = json.loads((directory / "config.json").read_text()) | {"is_causal": False} | (variant or {})
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=said):
        load_model(directory)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation: 'relu' is not implemented"),
        ({"local_attention": 0}, "local_attention: must lie in"),
        ({"num_key_value_heads": 1}, "num_attention_heads: this family has heads that add up"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: 'chunked_attention' is not implemented"),
        ({"rope_parameters": {"other": {}}}, "rope_parameters.other: is no layer type"),
    ],
)
def test_settings_of_modernbert_that_are_not_implemented_are_refused(tmp_path, modernbert, changes, said):
    for each in modernbert.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    config = json.loads((modernbert / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=said):
        load_model(tmp_path)


def test_older_spellings_of_modernberts_settings_mean_the_same(tmp_path, modernbert):
    for each in modernbert.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    config = json.loads((modernbert / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "hidden_activation"):
        del config[key]
    older = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    assert str(load_model(tmp_path).program) == str(load_model(modernbert).program)


def test_it_cannot_be_written_as_gguf_nor_verified(tmp_path):
    from penstock.verify import SMALL, profile

    directory = write_encoder(tmp_path, "qwen2", "all_to_one_window")
    with pytest.raises(ModelFileError, match="a model that looks ahead cannot be written as GGUF"):
        plan_file(open_model(directory, gguf_dialect), "F32")
    with pytest.raises(ConfigError, match="model: only embeds"):
        profile(EngineConfig(model=str(directory), max_model_len=64), SMALL)
