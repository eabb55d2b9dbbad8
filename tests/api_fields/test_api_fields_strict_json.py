"""Strict JSON: what `decode` takes, `encode` writes back, and everything else is refused."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.api_fields.strict_json import decode, encode, weight
from penstock.contract.errors import RequestError

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(max_size=8)
JSON = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b'{"a":"\\ud83e\\udd99"}')
@example(b'{"a":1e400}')
def test_any_bytes_are_an_object_that_can_be_written_again_or_a_request_error(body):
    try:
        value = decode(body)
    except RequestError:
        return
    assert decode(encode(value)) == value == json.loads(body)


SHAPES = {
    "text": {"prompt": "lorem ipsum dolor sit amet " * 4000},
    "ids": {"prompt": list(range(1000, 21_000))},
    "lists": {"stop": [[]] * 20_000},
    "scores": [{"token": f"t{i}", "logprob": -0.5 - i, "bytes": [97]} for i in range(5000)],
    "objects": [{} for _ in range(20_000)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_values_weigh_about_what_they_take(shape):
    body = encode({"value": SHAPES[shape]})
    tracemalloc.start()
    try:
        value = decode(body)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert value
    assert 0.7 * taken < weight(body) < 5 * taken
    assert sum(weight(body[at : at + 1000]) for at in range(0, len(body), 1000)) == weight(body)
