"""The part that predicts a second token: what transformers' own layer computes, put together as its papers say."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import compiled_kernels as here
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import VARIANTS, add_predictor, predictor_names, write_checkpoint

from needs import COMPILED
from penstock.kernels import native
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.program import Program
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

TOKENS = [(11 * place + 5) % 97 for place in range(40)]
FAMILIES = [
    *(("qwen3_5_text", variant) for variant in VARIANTS["qwen3_5_text"]),
    *((family, VARIANTS[family][0]) for family in ("qwen3_5_moe_text", "qwen3_next")),
    *(("deepseek_v3", variant) for variant in VARIANTS["deepseek_v3"]),
]


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def checkpoint(request, tmp_path_factory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), *request.param)
    add_predictor(directory)
    return directory


def program_of(directory: Path, *, predicts: bool = True, dtype=torch.float32, fmt=WeightFormat.DENSE) -> Program:
    files = open_model(directory, gguf_dialect)
    binder = Binder(files.source, dtype, "cpu", str(directory), weight_format=fmt, predicts=predicts)
    return load(files.config, binder, str(directory))


def reference(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model hands to its predictor, `[T, H]`, and the logits `[T - 1, V]` of the second tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    config = AutoConfig.from_pretrained(directory)
    names, own = predictor_names(config), load_file(directory / "model.safetensors")
    if config.model_type == "deepseek_v3":
        longer = AutoModelForCausalLM.from_pretrained(
            directory, num_hidden_layers=config.num_hidden_layers + 1, **options
        )
        layer = longer.eval().model.layers[-1]
    else:
        layer = copy.deepcopy(model.model.layers[config.layer_types.index("full_attention")])
        prefix = f"{names['layer']}."
        layer.load_state_dict({name[len(prefix) :]: own[name] for name in own if name.startswith(prefix)})

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        of = type(layer.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps)
        of.load_state_dict({"weight": own[f"{names[name]}.weight"]})
        return of(x)

    with torch.no_grad():
        hidden = model.model(torch.tensor([TOKENS])).last_hidden_state
        embedded = model.model.embed_tokens(torch.tensor([TOKENS[1:]]))
        pair = torch.cat([norm("embedding_norm", embedded), norm("hidden_norm", hidden[:, :-1])], -1)
        x = pair @ own[f"{names['joined']}.weight"].T
        count = x.shape[1]
        places = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = model.model.rotary_emb(x, places)
        out = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
        return hidden[0], model.lm_head(norm("norm", out))[0]


def predicted(model, table, hidden: torch.Tensor, attend=None) -> torch.Tensor:
    """Logits of the second tokens, from what the model handed over."""
    following = torch.tensor(TOKENS[1:])
    embedded = model.backend.embedding(following, table, torch.float32)
    pair = torch.cat([embedded, hidden[:-1].float()], 1)
    with torch.inference_mode():
        return model.logits(model.forward_given(pair, torch.arange(len(following)), attend or DenseAttention()))


def test_its_logits_are_those_of_transformers_layer(checkpoint):
    own = program_of(checkpoint).predictor
    hidden, want = reference(checkpoint)
    model = ReferenceExecutor(own.program, torch.float32, TorchBackend())
    torch.testing.assert_close(predicted(model, own.table, hidden), want, atol=1e-4, rtol=0)


def test_it_is_left_out_where_nobody_wants_it(checkpoint):
    assert program_of(checkpoint, predicts=False).predictor is None


def test_the_model_itself_is_the_same_with_and_without_it(checkpoint):
    with_it, without = program_of(checkpoint), program_of(checkpoint, predicts=False)
    assert str(with_it) == str(without)
    assert with_it.predictor.program.head is with_it.head


@pytest.mark.parametrize("other", [{"mtp_num_hidden_layers": 2}, {"mtp_use_dedicated_embeddings": True}])
def test_one_of_another_make_is_left_out(checkpoint, tmp_path, other):
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] == "deepseek_v3":
        other = {"num_nextn_predict_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | other))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    assert program_of(tmp_path).predictor is None


@pytest.mark.skipif(not native.available(), reason=COMPILED)
@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.INT8])
def test_it_is_one_compiled_call(checkpoint, fmt):
    own = program_of(checkpoint, dtype=torch.bfloat16, fmt=fmt).predictor
    assert why_not_compiled(own.program, torch.bfloat16, here.backend()) is None
    CompiledExecutor(own.program, torch.bfloat16, here.backend())


def test_a_missing_part_of_it_is_named(checkpoint, tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(checkpoint / "model.safetensors")
    missing = next(name for name in tensors if name.endswith(("mtp.norm.weight", "shared_head.norm.weight")))
    del tensors[missing]
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=re.escape(missing)):
        program_of(tmp_path)
