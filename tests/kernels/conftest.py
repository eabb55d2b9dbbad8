"""Which kernels a test runs; afterwards those that the process had are back."""

from __future__ import annotations

from collections.abc import Iterator

import compiled_kernels as here
import pytest

from penstock.kernels import native


@pytest.fixture(autouse=True)
def _leave_the_kernels_as_they_were() -> Iterator[None]:
    yield
    here.reset()


@pytest.fixture(params=[*native.isas(), "torch"])
def isa(request, monkeypatch) -> str:
    """Every implementation that this machine can run, torch's included."""
    if request.param == "torch":
        monkeypatch.setattr(native, "module", None)
    here.set_isa(request.param)
    return request.param


@pytest.fixture(params=native.isas())
def compiled(request) -> str:
    """Every compiled implementation that this machine can run."""
    here.set_isa(request.param)
    return request.param
