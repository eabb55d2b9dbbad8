"""A GGUF file that mixes kinds of blocks, end to end: its own numbers, exact bits, one compiled call a step."""

from __future__ import annotations

from pathlib import Path

import compiled_kernels as here
import pytest
import torch
from mixed_gguf import Q4_K_M, VOCAB, part_path, write_mixed

from needs import COMPILED
from penstock import loading
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ModelFileError
from penstock.kernels import native
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import CompiledExecutor, why_not_compiled
from penstock.nn.cost import cost
from penstock.nn.dense import DenseAttention
from penstock.nn.operations import Linear
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

PROMPT = [(7 * i + 3) % VOCAB for i in range(60)]
needs_compiled = pytest.mark.skipif(not native.available(), reason=COMPILED)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "tiny.Q4_K_M.gguf", Q4_K_M)


@pytest.fixture(autouse=True)
def one_thread():
    here.reset()
    yield
    here.reset()


def program_of(file: Path, fmt: WeightFormat, dtype: torch.dtype):
    files = open_model(file, gguf_dialect)
    binder = Binder(files.source, dtype, "cpu", str(file), weight_format=fmt)
    program = load(files.config, binder, str(file))
    binder.finish()
    return program, binder


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention())
        return model.logits(hidden)


def exact_logits(file: Path) -> torch.Tensor:
    program, _ = program_of(file, WeightFormat.DENSE, torch.float32)
    return logits(ReferenceExecutor(program, torch.float32, TorchBackend()))


@pytest.mark.parametrize("isa", [*native.isas(), "torch"])
def test_a_mixed_file_computes_what_its_numbers_say(file, isa):
    here.set_isa(isa)
    program, binder = program_of(file, WeightFormat.STORED, torch.float32)
    assert not binder.mixed
    assert list(binder.formats) == ["Q6_K", "Q4_K", "Q5_K", "IQ4_XS", "Q5_0", "float32", "Q8_0", "Q3_K"]
    wanted = exact_logits(file)
    ours = logits(ReferenceExecutor(program, torch.float32, here.backend()))
    assert wanted.abs().max() > 0.5
    assert (ours - wanted).square().mean() < 1e-3 * wanted.square().mean()


@needs_compiled
def test_a_program_of_mixed_kinds_is_one_compiled_call(file):
    program, _ = program_of(file, WeightFormat.STORED, torch.bfloat16)
    assert why_not_compiled(program, torch.bfloat16, here.backend()) is None
    CompiledExecutor(program, torch.bfloat16, here.backend())


def test_the_cost_of_a_mixed_projection_is_that_of_its_parts(file):
    from penstock.contract.model import StepRow

    program, _ = program_of(file, WeightFormat.STORED, torch.bfloat16)
    linears = [each.weight for each in program.operations() if isinstance(each, Linear)]
    found = cost(program, [StepRow(0, 3, True)], torch.bfloat16)
    parts = [part for weight in (*linears, program.head.weight) for part in weight.parts]
    rows = [3] * (len(parts) - 1) + [1]
    for kind in ("int8", "bf16"):
        products = [2 * n * p.outputs * p.inputs for p, n in zip(parts, rows, strict=True) if p.arithmetic == kind]
        assert getattr(found, f"{kind}_ops") >= sum(products) > 0
    assert found.weight_bytes >= sum(part.nbytes for part in parts)


@needs_compiled
def test_the_engine_says_the_same_alone_and_in_company(file):
    from penstock import LLM, SamplingParams

    prompts = [{"prompt_token_ids": PROMPT[: 3 + 5 * i]} for i in range(7)]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    with LLM(str(file), threads=2, max_model_len=256) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


@needs_compiled
def test_the_start_report_names_every_kind(file):
    said: list[str] = []
    loaded = loading.load_model(EngineConfig(model=str(file), threads=1), open_model(file, gguf_dialect), said.append)
    assert not [line for line in said if line.startswith("rounded")]
    assert loaded.weight_formats == "IQ4_XS, Q3_K, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0 as in the file; bfloat16"


def test_a_split_file_is_the_same_model_given_by_any_part(tmp_path, file):
    first = write_mixed(tmp_path / "tiny.gguf", Q4_K_M, parts=3)
    whole = open_model(file, gguf_dialect)
    for number in (1, 2, 3):
        path = part_path(tmp_path / "tiny.gguf", number, 3)
        split = open_model(path, gguf_dialect)
        assert split.name == "tiny"
        assert (split.num_weights, split.num_bytes) == (whole.num_weights, whole.num_bytes)
        for name in whole.source.names():
            a, b = (each.source.read(name, torch.float32, "cpu") for each in (whole, split))
            assert torch.equal(a, b)
    assert len({open_model(part_path(tmp_path / "tiny.gguf", n, 3), gguf_dialect).digest for n in (1, 2, 3)}) == 1
    assert torch.equal(exact_logits(first), exact_logits(file))


def test_a_missing_part_is_named(tmp_path):
    first = write_mixed(tmp_path / "tiny.gguf", Q4_K_M, parts=3)
    part_path(tmp_path / "tiny.gguf", 2, 3).unlink()
    with pytest.raises(ModelFileError, match=r"tiny-00002-of-00003.gguf: is missing; .* one of 3 parts"):
        open_model(first, gguf_dialect)


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    first = write_mixed(tmp_path / "tiny.gguf", Q4_K_M, parts=3)
    second, third = (part_path(tmp_path / "tiny.gguf", number, 3) for number in (2, 3))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(
        ModelFileError, match=r"00002-of-00003.gguf: split.no: its name says part 2 of 3, but it is part 3"
    ):
        open_model(first, gguf_dialect)
    second.write_bytes(kept)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(
        ModelFileError, match=r"split.count: is one of 3 parts, so it must be named NAME-00001-of-0000N"
    ):
        open_model(alone, gguf_dialect)
