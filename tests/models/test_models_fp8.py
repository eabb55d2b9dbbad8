"""A checkpoint in FP8 is multiplied as it is: transformers' model of the same numbers, in the memory of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import compiled_kernels as here
import pytest
import torch
from fp8_checkpoint import write_in_fp8
from test_models_compiled import assert_bits_depend_on_the_sequence_alone, error, exact_hidden, whole
from tiny_checkpoints import forget_references, reference_logits, write_checkpoint

from needs import COMPILED
from penstock.kernels import native
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.packing import WeightFormat

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

DEEP = pytest.mark.deep
CASES = [
    ("qwen3_moe", "wide_heads_tied_unused_experts", False),
    pytest.param(("llama", "one_to_one_tied_linear", True), marks=DEEP),
    pytest.param(("llama", "wide_heads_untied", False), marks=DEEP),
    pytest.param(("deepseek_v3", "query_latent_groups_yarn", False), marks=DEEP),
]
"""Family, variant, and whether each row has a scale of its own."""


@pytest.fixture(params=CASES, ids=str)
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """Family, and of the same numbers a checkpoint that is plain and one in FP8."""
    family, variant, channels = request.param
    plain, quantised = write_checkpoint(tmp_path / "plain", family, variant), tmp_path / "fp8"
    write_in_fp8(plain, quantised, channels=channels)
    forget_references()
    return family, plain, quantised


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    here.reset()
    yield
    here.reset()


def bound(path: Path, dtype: torch.dtype, *, planned: bool = False):
    """The program and the binder that made it."""
    files = open_model(path, gguf_dialect)
    source, device = (HeadersOnly(files.source), META) if planned else (files.source, "cpu")
    binder = Binder(source, dtype, device, str(path), weight_format=WeightFormat.STORED)
    return load(files.config, binder, str(path)), binder, files


def test_fp8_is_multiplied_as_it_is(checkpoints):
    family, plain, quantised = checkpoints
    program, binder, files = bound(quantised, torch.bfloat16)
    assert "FP8" in binder.formats
    turned = family == "deepseek_v3"  # what makes keys of a latent is multiplied transposed
    assert ("FP8 to bfloat16" in files.source.rounded()) == turned
    planned = bound(quantised, torch.bfloat16, planned=True)[1]
    assert (planned.bytes, planned.formats) == (binder.bytes, binder.formats)
    assert why_not_compiled(program, torch.bfloat16, here.backend()) is None
    model = CompiledExecutor(program, torch.bfloat16, here.backend())
    assert error(whole(model, 70), exact_hidden(model, 70)) < 0.05**2
    assert_bits_depend_on_the_sequence_alone(model, torch.bfloat16)
    ids = [(7 * i) % model.shape.vocab_size for i in range(40)]
    wanted = reference_logits(plain, ids)
    for dtype, most in ((torch.float32, 1e-5**2), (torch.bfloat16, 0.05**2)):
        program, binder, _ = bound(quantised, dtype)
        assert ("FP8" in binder.formats) == (dtype == torch.bfloat16)
        executor = ReferenceExecutor(program, dtype, here.backend())
        with torch.inference_mode():
            ours = executor.logits(executor.forward(torch.tensor(ids), torch.arange(40), DenseAttention()))
        assert error(ours, wanted) < most
