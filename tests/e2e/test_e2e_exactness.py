"""Law 1 on the default model: no batch, order, chunk, block size, cache state, preemption or thread count matters."""

from __future__ import annotations

import pytest

from penstock.contract.config import EngineConfig
from penstock.kernels import native, onednn_linear
from penstock.verify import Extent, profile

EXTENT = Extent(requests=8, schedules=4, prompt_tokens=160, new_tokens=16)


@pytest.mark.model
@pytest.mark.skipif(
    not native.available(), reason="installed without a C++ compiler: torch's kernels make no such promise"
)
@pytest.mark.parametrize("quantization", ["none", "file", "int8", "int4"])
def test_every_form_of_weights_is_exact(default_model, quantization):
    served = EngineConfig(model=str(default_model), quantization=quantization)
    report = profile(served, EXTENT)
    assert report.exact, report.verdict_line()
    assert report.tally.tokens > 150


@pytest.mark.model
@pytest.mark.skipif(
    not native.available(), reason="installed without a C++ compiler: the KV cache is not kept in int8 then"
)
def test_an_int8_kv_cache_is_exact(default_model):
    report = profile(EngineConfig(model=str(default_model), kv_cache_dtype="int8"), EXTENT)
    assert report.exact, report.verdict_line()
    assert report.tally.tokens > 150


@pytest.mark.deep
@pytest.mark.model
@pytest.mark.skipif(
    not (native.available() and onednn_linear.available()), reason="oneDNN serves beside the compiled kernels"
)
def test_products_by_onednn_are_exact(default_model):
    served = EngineConfig(model=str(default_model), quantization="none", linear_kernels="onednn")
    report = profile(served, EXTENT)
    assert report.exact, report.verdict_line()
    assert report.tally.tokens > 150


@pytest.mark.deep
@pytest.mark.model
@pytest.mark.skipif(
    not native.available(), reason="installed without a C++ compiler: torch's kernels make no such promise"
)
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("quantization", ["none", "file", "int8", "int4"])
def test_every_parameter_in_every_company_is_exact(default_model, quantization, seed):
    served = EngineConfig(model=str(default_model), quantization=quantization)
    report = profile(served, Extent(requests=48, schedules=8, seed=seed, prompt_tokens=200, new_tokens=32))
    assert report.exact, report.verdict_line()
