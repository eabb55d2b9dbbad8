"""Text models whose checkpoints also hold a vision model: how text positions are rotated, and how files lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import forget_references, load_model, reference_logits, write_checkpoint

from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.rope import Rope, RotaryTable
from penstock.weights.bind import Binder
from penstock.weights.files import open_model

EXPERTS = ("qwen3_vl_moe", "wide_heads_untied_unused_experts")
PLAIN = [("qwen2_vl", "shared_keys_tied"), ("qwen2_5_vl", "one_to_one_tied"), ("qwen3_vl", "wide_heads_tied")]


def logits(directory: Path) -> torch.Tensor:
    model = load_model(directory)
    with torch.no_grad():
        return model.logits(model.forward(torch.arange(60), torch.arange(60), DenseAttention()))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: each.contiguous().clone() for name, each in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    forget_references()


def test_pairs_that_follow_the_axes_of_an_image_turn_by_one_position_in_text():
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(rope_parameters=rope))
    positions = torch.arange(300)
    cos, sin = theirs(torch.zeros(1), positions.expand(3, 1, -1))
    ours = RotaryTable.build(Rope(5e6), 128, 300, torch.device("cpu")).rows(positions)
    for table, expected in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(table, expected[0, :, :64], atol=1e-6, rtol=0)


def test_experts_may_lie_inputs_first_as_published_files_have_them(tmp_path):
    directory = write_checkpoint(tmp_path, *EXPERTS)
    outputs_first = logits(directory)
    rewrite(directory, lambda found: {name: each.mT if ".experts." in name else each for name, each in found.items()})
    assert torch.equal(logits(directory), outputs_first)
    torch.testing.assert_close(outputs_first, reference_logits(directory, list(range(60))), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("hidden", "inner"), [(48, 24), (48, 48)])
def test_of_experts_as_wide_as_the_stream_it_is_known_how_they_lie(tmp_path, hidden, inner):
    directory = write_checkpoint(tmp_path, *EXPERTS, hidden_size=hidden, moe_intermediate_size=inner)
    outputs_first = logits(directory)
    rewrite(directory, lambda found: {name: each.mT if ".experts." in name else each for name, each in found.items()})
    assert torch.equal(logits(directory), outputs_first)


@pytest.mark.parametrize(("family", "variant"), PLAIN)
def test_a_config_and_tensors_may_lie_flat_beside_what_sees(tmp_path, family, variant):
    directory = write_checkpoint(tmp_path, family, variant)
    nested = logits(directory)
    config = json.loads((directory / "config.json").read_text())
    flat = config.pop("text_config") | config
    (directory / "config.json").write_text(json.dumps(flat))
    rewrite(directory, lambda found: {flat_name(name): each for name, each in found.items()})
    assert torch.equal(logits(directory), nested)


def flat_name(name: str) -> str:
    return name.removeprefix("model.") if "visual." in name else name.replace("language_model.", "")


@pytest.mark.parametrize(("family", "variant"), [*PLAIN, ("mistral3", "one_to_one_tied_linear")])
def test_what_sees_is_left_out_by_name(tmp_path, family, variant):
    directory = write_checkpoint(tmp_path, family, variant)
    files = open_model(directory, gguf_dialect)
    binder = Binder(files.source, torch.float32, "cpu", str(directory))
    load(files.config, binder, str(directory))
    sees = {name for name in files.source.names() if not name.startswith(("model.", "language_model.", "lm_head."))}
    sees |= {name for name in files.source.names() if name.startswith("model.visual.")}
    assert sees
    assert sum(binder.left_out.values()) == len(sees)
    assert all(name.startswith(tuple(binder.left_out)) for name in sees)
