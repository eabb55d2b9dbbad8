"""Sums of rows on a CUDA device are those of the CPU, and do not depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import pretend_cuda

from penstock.sampling.row_sums import row_sums, running_sums


def drawn(rows, width):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).double()


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1001])
def test_sums_on_a_device_are_those_of_the_cpu(width):
    x = drawn(3, width)
    probabilities = x.softmax(-1)
    with pretend_cuda() as device:
        there = x.to(device)
        sums, running = row_sums(there).cpu(), running_sums(probabilities.to(device)).cpu()
        assert torch.equal(there.cpu(), x), "what is added up stays as it is"
    torch.testing.assert_close(sums, row_sums(x))
    torch.testing.assert_close(running, running_sums(probabilities))
    assert sums.shape == (3, 1)
    assert running.shape == (3, width)


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_row_alone_has_the_sums_that_it_has_among_others(device):
    x = drawn(40, 5003).to(device)
    probabilities = x.softmax(-1)
    sums, running = row_sums(x), running_sums(probabilities)
    for row in (0, 7, 39):
        assert torch.equal(row_sums(x[row : row + 1])[0], sums[row])
        assert torch.equal(running_sums(probabilities[row : row + 1])[0], running[row])
