"""Law 1 on real checkpoints: no batch, order, chunk, block size, cache state, preemption or thread count matters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from tiny_checkpoints import write_checkpoint, write_letters

from needs import COMPILED
from penstock.contract.config import EngineConfig
from penstock.kernels import native
from penstock.verify import Budget, Report, profile

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{COMPILED}; torch's kernels make no such promise")

BUDGET = Budget(requests=6, schedules=4, prompt_tokens=80, new_tokens=12)
LONG = Budget(requests=24, schedules=8, prompt_tokens=200, new_tokens=32)

BY_ISA = """
import os
import sys
from penstock.contract.config import EngineConfig
from penstock.verify import Budget, profile
forms = [("bfloat16", "none", "auto"), ("bfloat16", "int8", "int8"), ("bfloat16", "int4", "auto")]
for dtype, quantization, kv in (*forms, ("float32", "none", "auto")):
    served = EngineConfig(model=sys.argv[1], dtype=dtype, quantization=quantization, kv_cache_dtype=kv)
    report = profile(served, Budget(requests=5, schedules=2, prompt_tokens=32, new_tokens=8))
    preempted = sum(verdict.preemptions for verdict in report.verdicts)
    print(os.environ["PENSTOCK_ISA"], report.exact, report.tally.tokens, preempted)
"""


def check(report: Report) -> None:
    """Nothing differed, although what must not matter did happen: sequences were preempted and prefixes were found."""
    assert report.exact, report.verdict_line()
    assert report.tally.tokens > 150
    tight = [verdict for verdict in report.verdicts if verdict.schedule.tight]
    warm = [verdict for verdict in report.verdicts if verdict.schedule.cache == "warm"]
    off = [verdict for verdict in report.verdicts if verdict.schedule.cache == "off"]
    assert tight, report.table()
    assert warm, report.table()
    assert all(verdict.preemptions for verdict in tight), report.table()
    assert all(verdict.hit_tokens for verdict in warm), report.table()
    assert not any(verdict.hit_tokens for verdict in off), report.table()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("exact") / "tiny-llama", "llama", "wide_heads_untied")
    write_letters(directory, 101)
    return directory


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("exact") / "tiny-gpt2", "gpt2", "tied")
    write_letters(directory, 101)
    return directory


@pytest.mark.model
@pytest.mark.parametrize(
    ("quantization", "kv"),
    [
        ("file", "auto"),
        *(
            pytest.param(*each, marks=pytest.mark.deep)
            for each in (("none", "auto"), ("int8", "auto"), ("auto", "int8"), ("int4", "auto"), ("int8", "int8"))
        ),
    ],
)
def test_every_form_of_weights_and_caches_is_exact(default_model, quantization, kv):
    check(profile(EngineConfig(model=str(default_model), quantization=quantization, kv_cache_dtype=kv), BUDGET))


@pytest.mark.deep
@pytest.mark.model
def test_float32_is_exact(default_model):
    check(profile(EngineConfig(model=str(default_model), dtype="float32"), BUDGET))


@pytest.mark.parametrize(
    ("quantization", "kv", "dtype"),
    [
        *(
            (*form, dtype)
            for form in (("none", "auto"), ("int8", "auto"), ("int8", "int8"))
            for dtype in ("bfloat16", "float32")
        ),
        ("int4", "auto", "bfloat16"),
    ],
)
def test_a_family_with_layer_norms_and_learned_positions_is_exact(tiny_gpt2, quantization, kv, dtype):
    served = EngineConfig(model=str(tiny_gpt2), dtype=dtype, quantization=quantization, kv_cache_dtype=kv)
    check(profile(served, BUDGET))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("isa", native.isas()[1:])
def test_every_other_instruction_set_of_this_machine_is_exact(tiny_llama, isa, monkeypatch):
    """The tests above run the best one."""
    monkeypatch.setenv("PENSTOCK_ISA", isa)
    done = subprocess.run([sys.executable, "-c", BY_ISA, str(tiny_llama)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(used, exact) for used, exact, _, _ in lines] == [(isa, "True")] * 4
    assert all(int(tokens) > 40 and int(preempted) for _, _, tokens, preempted in lines), done.stdout


@pytest.mark.deep
@pytest.mark.model
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("quantization", ["none", "file", "int8", "int4"])
def test_every_parameter_in_every_company_is_exact(default_model, quantization, seed):
    served = EngineConfig(model=str(default_model), quantization=quantization)
    check(profile(served, replace(LONG, seed=seed)))
