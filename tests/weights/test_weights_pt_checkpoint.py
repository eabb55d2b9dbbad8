"""A GPT-2 in a `.pt` file, under RoseLLM's names and transformers': the same model, and no code is run."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from click.testing import CliRunner
from tiny_checkpoints import write_lettered
from transformers import GPT2LMHeadModel

from penstock import LLM, SamplingParams
from penstock.cli import penstock
from penstock.contract.errors import ModelFileError
from penstock.weights.pt_checkpoint import read_pt

OPTIONS = {"dtype": "float32", "threads": 1, "kv_cache_memory": 2_000_000}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["abc", "hello, ", "the end."]
BLOCK = {
    "ln_1": "ln1",
    "ln_2": "ln2",
    "attn.c_attn": "attn.qkv_proj",
    "attn.c_proj": "attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return write_lettered(tmp_path_factory.mktemp("gpt2") / "gpt2", "gpt2", "tied")


@pytest.fixture(scope="module")
def answers(gpt2):
    return answers_of(str(gpt2))


def answers_of(model, **options):
    with LLM(model, **OPTIONS, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def state_of(gpt2):
    return GPT2LMHeadModel.from_pretrained(gpt2).state_dict()


def rose_state(gpt2):
    """The tensors as RoseLLM's trainer names and transposes them."""
    names = {
        "transformer.wte.weight": "token_embedding.weight",
        "transformer.wpe.weight": "position_embedding.weight",
        "transformer.ln_f.weight": "ln_f.weight",
        "transformer.ln_f.bias": "ln_f.bias",
        "lm_head.weight": "lm_head.weight",
    }
    state = {}
    for name, tensor in state_of(gpt2).items():
        if name in names:
            state[names[name]] = tensor
            continue
        _, _, index, part = name.split(".", 3)
        layer, _, kind = part.rpartition(".")
        turned = tensor.t().contiguous() if tensor.ndim == 2 else tensor
        state[f"blocks.{index}.{BLOCK[layer]}.{kind}"] = turned
    return state


def rose_config(gpt2, **more):
    config = json.loads((gpt2 / "config.json").read_text())
    return {
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["n_positions"],
        "n_layers": config["n_layer"],
        "n_heads": config["n_head"],
        "d_model": config["n_embd"],
        "d_ff": config.get("n_inner") or 4 * config["n_embd"],
        "dropout": 0.1,
        "activation": config["activation_function"],
        "use_tensor_parallel": False,
    } | more


def save(path, **content):
    torch.save(content, path)
    return path


@pytest.fixture
def rose(gpt2, tmp_path):
    return save(tmp_path / "rose.pt", config=rose_config(gpt2), model=rose_state(gpt2), optimizer={"lr": 0.1}, step=7)


def test_rosellms_names_are_understood(rose, gpt2, answers):
    assert answers_of(str(rose), tokenizer=str(gpt2)) == answers


def test_transformers_names_are_too(gpt2, tmp_path, answers):
    config = json.loads((gpt2 / "config.json").read_text())
    path = save(tmp_path / "hf.pt", config=config, model=state_of(gpt2))
    assert answers_of(str(path), tokenizer=str(gpt2)) == answers


def test_convert_writes_a_directory_that_is_the_same_model(rose, gpt2, answers, tmp_path):
    out = tmp_path / "out"
    done = CliRunner().invoke(penstock, ["convert", str(rose), str(out), "--tokenizer", str(gpt2)])
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert "left out: optimizer, step" in done.stderr
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert answers_of(str(out)) == answers
    theirs = GPT2LMHeadModel.from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in state_of(gpt2).items())
    again = CliRunner().invoke(penstock, ["convert", str(rose), str(out)])
    assert "exists already" in str(again.exception)


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize("where", ["model", "config", "extra"])
def test_a_pickle_that_holds_code_is_refused_and_not_run(gpt2, tmp_path, capsys, where):
    content = {"config": rose_config(gpt2), "model": rose_state(gpt2)}
    content[where] = {"x": Evil()}
    torch.save(content, tmp_path / "evil.pt")
    with pytest.raises(ModelFileError, match="a pickle that holds more is never run"):
        read_pt(tmp_path / "evil.pt")
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": 1}, "weights: is not understood"),
        ({"config": None}, "config: is missing"),
        ({"model": [1]}, "model: is missing, or not a dictionary"),
        ({"config": {"n_layers": 2}}, r"config\.vocab_size: must be an integer"),
        ({"model": {"blocks.0.moe.gate.weight": torch.zeros(1)}}, r"model\.blocks\.0\.moe\.gate\.weight: is no tensor"),
        ({"model": {"blocks.0.ln1.weight": 3}}, "must be a tensor"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(gpt2, tmp_path, change, message):
    content = {"config": rose_config(gpt2), "model": rose_state(gpt2)} | change
    with pytest.raises(ModelFileError, match=message):
        read_pt(save(tmp_path / "x.pt", **content))


def test_other_settings_are_refused_by_name(gpt2, tmp_path):
    path = save(tmp_path / "x.pt", config=rose_config(gpt2, num_experts=8), model=rose_state(gpt2))
    with pytest.raises(ModelFileError, match=r"config\.num_experts: is not understood, got 8"):
        read_pt(path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"config": 1}, protocol=2))
    for name in ("text.pt", "plain.pt"):
        with pytest.raises(ModelFileError):
            read_pt(tmp_path / name)


def test_a_file_without_a_tokenizer_says_how_to_name_one(rose):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json.*--tokenizer"):
        LLM(str(rose), **OPTIONS)
