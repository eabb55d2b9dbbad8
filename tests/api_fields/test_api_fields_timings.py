"""The `timings` object: what the engine measured, under llama.cpp's names."""

from __future__ import annotations

from penstock.api_fields.timings import timings_object
from penstock.contract.events import Usage
from penstock.contract.measurements import Timings


def test_rates_of_nothing_are_null():
    timings = timings_object(Timings(1.0, 1.0, 1.0, 1.0, 1.0), Usage(4, 1, 4), 1)
    assert timings["predicted_per_second"] is None
    assert timings["predicted_per_token_ms"] is None
    assert timings["prompt_per_second"] is None
