"""Qwen3-MoE: which layers have experts, how many there are, and that no more of them are computed than are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import VARIANTS, write_checkpoint

from needs import COMPILED
from penstock.contract.errors import ModelFileError
from penstock.kernels import native
from penstock.kernels.packed_stack import PackedStack
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.operations import Experts
from penstock.nn.program import Program
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

UNUSED = "wide_heads_tied_unused_experts"
UNUSED_COUNT = 3
LAYERS = {
    UNUSED: [0, 1, 2],
    "one_to_one_biases_every_expert_in_every_other_layer": [1],
    "all_to_one_narrow_heads_window_dense_last": [0, 1],
}


def program_of(directory, fmt: WeightFormat = WeightFormat.DENSE, **changes: Any) -> Program:
    files = open_model(directory, gguf_dialect)
    config = {key: value for key, value in {**files.config, **changes}.items() if value is not None}
    return load(config, Binder(files.source, torch.float32, "cpu", "m", weight_format=fmt), "m")


def experts_of(program: Program) -> list[list[Experts]]:
    return [[each for each in layer if isinstance(each, Experts)] for layer in program.layers]


@pytest.mark.parametrize("variant", VARIANTS["qwen3_moe"])
def test_layers_have_experts_where_the_checkpoint_has_them(tmp_path, variant):
    directory = write_checkpoint(tmp_path, "qwen3_moe", variant)
    stored = {int(name.split(".")[2]) for name in load_file(directory / "model.safetensors") if ".experts." in name}
    assert sorted(stored) == LAYERS[variant]
    found = experts_of(program_of(directory))
    assert [index for index, experts in enumerate(found) if experts] == LAYERS[variant]


def test_the_number_of_experts_has_two_names_that_must_agree(tmp_path):
    directory = write_checkpoint(tmp_path, "qwen3_moe", UNUSED)
    names = ("num_experts", "num_local_experts")
    for changes in ({names[0]: 11, names[1]: None}, {names[0]: None, names[1]: 11}, dict.fromkeys(names, 11)):
        (first,), *_ = experts_of(program_of(directory, **changes))
        assert (first.spec.experts, first.spec.top_k, first.spec.normalise) == (11, 2, True)
    with pytest.raises(ModelFileError, match=r"num_local_experts: 12 contradicts num_experts \(11\)"):
        program_of(directory, num_experts=11, num_local_experts=12)
    with pytest.raises(ModelFileError, match=r"mlp\.gate\.weight: has shape \(11, 48\), but .* \(12, 48\)"):
        program_of(directory, num_experts=12, num_local_experts=None)


@pytest.mark.parametrize("fmt", [WeightFormat.DENSE, WeightFormat.F32])
def test_experts_that_no_token_chooses_are_not_computed(tmp_path, fmt):
    if fmt is WeightFormat.F32 and not native.available():
        pytest.skip(COMPILED)
    program = program_of(write_checkpoint(tmp_path, "qwen3_moe", UNUSED), fmt)
    before = hidden_of(program)
    for (layer,) in experts_of(program):
        for stack in (layer.stack.gate_up, layer.stack.down):
            spoil(stack, stack.shape[0] - UNUSED_COUNT)
    assert torch.equal(hidden_of(program), before)
    spoil(experts_of(program)[0][0].stack.down, 0)
    assert hidden_of(program).isnan().any(), "what was spoilt would not have shown"


def spoil(stack: torch.Tensor | PackedStack, first: int) -> None:
    """Make every number of the experts from `first` on NaN."""
    if isinstance(stack, PackedStack):
        stack.data[first * stack.stride :] = 0xFF
    else:
        stack[first:] = torch.nan


def hidden_of(program: Program) -> torch.Tensor:
    model = ReferenceExecutor(program, torch.float32, TorchBackend())
    with torch.inference_mode():
        return model.forward(torch.arange(60), torch.arange(60), DenseAttention())
