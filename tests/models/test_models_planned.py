"""A planned model, built from headers alone, has the sizes of the loaded one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from mixed_gguf import Q4_K_M, write_mixed
from tiny_checkpoints import VARIANTS, write_checkpoint

from needs import COMPILED
from penstock import loading, models
from penstock.contract.config import EngineConfig
from penstock.contract.model import StepRow
from penstock.kernels import native
from penstock.nn.cost import cost
from penstock.nn.operations import Rotate
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.packing import WeightFormat

FORMS = [(WeightFormat.DENSE, torch.float32)]
if native.available():
    packed = (
        (WeightFormat.F32, torch.float32),
        *((WeightFormat(word), torch.bfloat16) for word in ("bf16", "int8", "int4")),
    )
    FORMS += packed


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A checkpoint of each family."""
    return {
        family: write_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, variants[0])
        for family, variants in VARIANTS.items()
    }


@pytest.fixture(scope="module", params=list(VARIANTS))
def files(request, directories):
    return open_model(directories[request.param], models.gguf_dialect)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=[form.value for form, _ in FORMS])
def test_sizes_forms_and_costs_are_the_loaded_models(files, form, dtype):
    loaded = Binder(files.source, dtype, "cpu", "loaded", weight_format=form)
    planned = Binder(HeadersOnly(files.source), dtype, META, "planned", weight_format=form)
    real, plan = (models.load(files.config, binder, "config.json") for binder in (loaded, planned))
    assert planned.bytes == loaded.bytes
    assert planned.formats == loaded.formats
    assert plan.caches == real.caches
    rows = [StepRow(7, 5), StepRow(0, 1)]
    assert cost(plan, rows, dtype) == cost(real, rows, dtype)
    assert str(plan) == str(real)
    assert all(weight.is_meta for weight in _tensors(plan))


def test_tables_of_angles_are_planned_as_far_as_the_longest_sequence_reaches(directories):
    config = EngineConfig(model=str(directories["llama"]), threads=1, dtype="float32", max_model_len=100)
    files = open_model(directories["llama"], models.gguf_dialect)
    planned = loading.plan_model(config, files, loading.resolve_choices(config, files))
    program = planned.program
    page = 2 * 128 * program.shape.head_dim // 2 * 4  # cosines and sines of 128 positions, all layers
    assert planned.needs(config).angles == page
    whole = planned.needs(replace(config, max_model_len=program.shape.max_positions)).angles
    assert whole == page * program.shape.max_positions // 128 > page
    loaded = loading.load_model(config, files, lambda line: None).program
    (table,) = {each.table for each in loaded.operations() if isinstance(each, Rotate)}
    assert table.known == 0
    table.rows(torch.tensor([99]))
    assert table.nbytes(table.known) == page


def _tensors(program):
    for operation in program.operations():
        for name in getattr(operation, "__dataclass_fields__", ()):
            value = getattr(operation, name)
            data = getattr(value, "data", getattr(value, "numbers", value))
            if isinstance(data, torch.Tensor):
                yield data


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_file_of_mixed_kinds_of_blocks_is_planned_as_it_is_loaded(tmp_path):
    files = open_model(write_mixed(tmp_path / "tiny.gguf", Q4_K_M), models.gguf_dialect)
    form, dtype = WeightFormat.STORED, torch.bfloat16
    loaded = Binder(files.source, dtype, "cpu", "loaded", weight_format=form)
    planned = Binder(HeadersOnly(files.source), dtype, META, "planned", weight_format=form)
    real, plan = (models.load(files.config, binder, "config.json") for binder in (loaded, planned))
    assert (planned.bytes, planned.formats) == (loaded.bytes, loaded.formats)
    assert str(plan) == str(real)


PLAN = """
import sys
from pathlib import Path
import torch
from penstock import models
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.packing import WeightFormat

for path in sys.argv[2:]:
    for form in sys.argv[1].split(","):
        files = open_model(Path(path), models.gguf_dialect)
        binder = Binder(HeadersOnly(files.source), torch.float32, META, "planned", weight_format=WeightFormat(form))
        models.load(files.config, binder, "config.json")
        assert "torch._dynamo" not in sys.modules, f"{path} in {form}"
"""


def test_planning_does_not_load_torchs_compiler(directories, tmp_path):
    """It takes 1.5 s and 70 MiB, and innocent operations on tensors without numbers load it."""
    mixed = write_mixed(tmp_path / "tiny.gguf", Q4_K_M)
    forms = ",".join([*(form.value for form, _ in FORMS), *([WeightFormat.STORED.value] if native.available() else [])])
    command = [sys.executable, "-c", PLAN, forms, *map(str, directories.values()), str(mixed)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_tensor_that_is_missing_is_missed_in_the_plan_too(files):
    class Holes(HeadersOnly):
        def names(self):
            return super().names() - {first}

    first = min(files.source.names())
    binder = Binder(Holes(files.source), torch.float32, META, "planned")
    with pytest.raises(Exception, match=first.replace(".", r"\.")):
        models.load(files.config, binder, "config.json")
