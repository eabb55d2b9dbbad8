"""Strict JSON: what `decode` takes, `encode` writes back, and everything else is refused."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.api_fields.strict_json import decode, encode
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
