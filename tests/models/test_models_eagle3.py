"""EAGLE-3 heads: what transformers' modules compute, put together as the paper says; and heads that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import compiled_kernels as here
import pytest
import torch
from eagle3_heads import LAYERS, Eagle3, write_eagle3
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_checkpoint

from needs import COMPILED
from penstock.contract.errors import ModelFileError
from penstock.exec.kv_store import KVStore
from penstock.kernels import native
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.models.config_reader import ConfigReader
from penstock.models.eagle3 import is_eagle3, load_eagle3, tapped_layers
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.paged import PagedAttend
from penstock.nn.program import Predictor, Program, tapping
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

TOKENS = [(11 * place + 5) % 97 for place in range(40)]
USUAL = [2, 2, 1]
"""Of `hidden_states`, for 4 layers: what layers 2, 4 / 2 and 4 - 3 read."""

HEADS = {
    "all-tokens": ({}, USUAL),
    "some-tokens": ({"known": 40}, USUAL),
    "outputs-named": ({"known": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, [1, 2, 3]),
    "speculators": ({"known": 30, "speculators": True, "norm_before_residual": True}, USUAL),
    "inputs-named": ({"speculators": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, [0, 1, 3]),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_checkpoint(folder, "llama", "wide_heads_untied", num_hidden_layers=LAYERS)


def paged(program: Program, count: int) -> PagedAttend:
    """A step of one new sequence."""
    kv = KVStore(program.caches, 4, 16, torch.bfloat16, torch.device("cpu"), packed=True)
    ends, length = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    table = torch.arange(4, dtype=torch.int32)[None]
    return PagedAttend(kv.keys, kv.values, torch.arange(count), ends, length, table, here.backend())


def binder_of(folder: Path, dtype=torch.float32, fmt=WeightFormat.DENSE) -> Binder:
    return Binder(open_model(folder, gguf_dialect).source, dtype, "cpu", str(folder), weight_format=fmt)


def program_of(folder: Path, **how) -> Program:
    return load(open_model(folder, gguf_dialect).config, binder_of(folder, **how), str(folder))


def reader_of(folder: Path) -> ConfigReader:
    return ConfigReader(json.loads((folder / "config.json").read_text()), str(folder))


def head_of(folder: Path, target: Program, **how) -> Predictor:
    binder = binder_of(folder, **how)
    head = load_eagle3(reader_of(folder), binder, target)
    binder.finish()
    return head


@pytest.mark.parametrize("kind", HEADS)
def test_its_logits_are_those_of_transformers_modules(target, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    settings, taps = HEADS[kind]
    folder = write_eagle3(tmp_path / "head", target, **settings)
    assert is_eagle3(open_model(folder, gguf_dialect).config)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    want = Eagle3(folder, model, taps)
    program = program_of(target)
    layers = tapped_layers(reader_of(folder), LAYERS)
    watched = ReferenceExecutor(tapping(program, layers), torch.float32, TorchBackend())
    plain = ReferenceExecutor(program, torch.float32, TorchBackend())
    head = head_of(folder, program)
    own = ReferenceExecutor(head.program, torch.float32, TorchBackend())
    ids, places = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    states = torch.empty(len(TOKENS), len(layers) * program.shape.hidden_size)
    with torch.inference_mode():
        out = watched.forward(ids, places, DenseAttention(), taps=states)
        assert torch.equal(out, plain.forward(ids, places, DenseAttention()))
        torch.testing.assert_close(states, want.states(TOKENS), atol=1e-4, rtol=0)
        hidden = watched.backend.linear(states, head.joined, head.joined_bias)[:-1]
        embedded = own.backend.embedding(ids[1:], head.table, torch.float32)
        onward = torch.empty_like(hidden)
        out = own.forward_given(torch.cat([embedded, hidden], 1), places[:-1], DenseAttention(), onward)
        logits = own.logits(out)
    expected, left = want.predict(want.joined(want.states(TOKENS))[:-1], TOKENS[1:])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(onward, left, atol=1e-4, rtol=0)
    known = settings.get("known", 0)
    assert (head.vocabulary is None) == (not known)
    assert not known or head.vocabulary.tolist() == list(range(0, 2 * known, 2))


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.INT8])
def test_what_layers_read_is_handed_out_of_one_compiled_call(target, tmp_path, fmt):
    """And the model's own result has the same bits as without."""
    how = {"dtype": torch.bfloat16, "fmt": fmt}
    program = program_of(target, **how)
    watched = tapping(program, (1, 2, LAYERS))
    head = head_of(write_eagle3(tmp_path / "head", target, known=40), program, **how)
    for each in (watched, head.program):
        assert why_not_compiled(each, torch.bfloat16, here.backend()) is None
    compiled = CompiledExecutor(watched, torch.bfloat16, here.backend())
    plain = CompiledExecutor(program, torch.bfloat16, here.backend())
    reference = ReferenceExecutor(watched, torch.float32, TorchBackend())
    count = len(TOKENS)
    ids, places, width = torch.tensor(TOKENS), torch.arange(count), program.shape.hidden_size
    taps = torch.full((count, 3 * width), torch.nan)
    got = compiled.forward(ids, places, paged(program, count), taps=taps)
    assert torch.equal(got, plain.forward(ids, places, paged(program, count)))
    assert torch.equal(got, compiled.forward(ids, places, paged(program, count))), "nobody has to read them"
    wanted = torch.empty_like(taps)
    with torch.inference_mode():
        reference.forward(ids, places, DenseAttention(), taps=wanted)
    scale = float(wanted.abs().max())
    assert float((taps - wanted).abs().max()) < 0.08 * scale
    with pytest.raises(ValueError, match="taps must be"):
        compiled.forward(ids, places, paged(program, count), taps=taps[:, :-2])


def written(target: Path, folder: Path, *, drop: str = "", **changes) -> Path:
    """A head without a tensor, or with other settings than those that it was written with."""
    write_eagle3(folder, target, known=40)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if name != drop}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"drop": "fc.weight"}, "architectures.*EAGLE-2"),
        ({"drop": "d2t"}, "draft_vocab_size.*d2t"),
        ({"drop": "midlayer.hidden_norm.weight"}, "midlayer.hidden_norm.weight"),
        ({"drop": "lm_head.weight"}, "lm_head.weight|d2t"),
        ({"vocab_size": 50, "draft_vocab_size": 40}, "vocab_size"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "fc.weight"),
    ],
)
def test_what_does_not_fit_is_named(target, tmp_path, broken, named):
    folder = written(target, tmp_path / "head", **broken)
    with pytest.raises(ModelFileError, match=named):
        head_of(folder, program_of(target))


def test_tokens_outside_of_the_vocabulary_are_refused(target, tmp_path):
    folder = written(target, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][7] = 1000
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match="d2t"):
        head_of(folder, program_of(target))
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"d2t.*I32.*I64"):
        head_of(folder, program_of(target))


def test_a_model_of_three_layers_has_to_be_told_which(target, tmp_path):
    folder = write_eagle3(tmp_path / "head", target)
    with pytest.raises(ModelFileError, match="eagle_aux_hidden_state_layer_ids"):
        tapped_layers(reader_of(folder), 3)
    assert tapped_layers(reader_of(folder), 32) == (2, 16, 29)
