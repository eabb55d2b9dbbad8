"""A model read from a GGUF file computes what transformers computes from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weights_samples import ARCHITECTURES, CONTEXT, EXPERT_INNER, INNER, VOCAB, Tiny, weights, write_gguf

from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.gguf_file import open_gguf

TOLERANCE = 1e-4
UNREAD = {"gpt2": {"n_inner": INNER, "n_positions": CONTEXT}, "qwen3_moe": {"moe_intermediate_size": EXPERT_INNER}}
"""What transformers takes from its own defaults instead of the file, by family."""
TOKEN_IDS = [(7 * i + 3) % VOCAB for i in range(40)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights, small enough that logits stay of the size of 1."""
    # transformers takes Qwen 3's head width from its own default (128), not from the file
    tiny = Tiny(request.param, head_dim=128) if request.param == "qwen3" else Tiny(request.param)
    tensors = {name: tensor / 8 if tensor.ndim > 1 else tensor for name, tensor in weights(tiny).items()}
    return write_gguf(tmp_path_factory.mktemp(request.param) / "tiny.gguf", tiny, tensors)


def theirs(file: Path) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    settings.update(UNREAD.get(settings.model_type, {}))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, config=settings, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKEN_IDS])).logits[0]


def ours(file: Path) -> torch.Tensor:
    source = open_gguf(file, gguf_dialect)
    program = load(source.config, Binder(source, torch.float32, "cpu", str(file)), str(file))
    model = ReferenceExecutor(program, torch.float32, TorchBackend())
    with torch.no_grad():
        hidden = model.forward(torch.tensor(TOKEN_IDS), torch.arange(len(TOKEN_IDS)), DenseAttention())
        return model.logits(hidden)


def test_logits_are_those_of_transformers(file: Path) -> None:
    wanted = theirs(file)
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(ours(file), wanted, atol=TOLERANCE, rtol=0)
