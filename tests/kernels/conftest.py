"""Chooses the kernels that a test runs, and restores the process's own afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import compiled_kernels as here
import pytest

from penstock.kernels import native

BORROWED = "avx512_amx"
"""An instruction set whose kernels are those of `avx512_bf16`, function by function, but for products of bfloat16."""
PRODUCTS = ("test_kernels_packed_linear", "test_kernels_experts")
"""Files whose tests multiply bfloat16 even where a case names no form of weights."""


@pytest.hookimpl(tryfirst=True)  # before pytest drops what `-m "not deep"` leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` leaves borrowed kernels to the instruction set that has them, `make test-deep` tests them again."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if BORROWED not in (given.get("isa"), given.get("compiled")):
            continue
        forms = [given[name] for name in ("maker", "form", "down_form") if name in given]
        own = "bf16" in forms if forms else item.path.stem in PRODUCTS
        if not own:
            item.add_marker(pytest.mark.deep)


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
