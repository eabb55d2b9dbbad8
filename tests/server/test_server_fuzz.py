"""Whatever a body holds, parsing gives a parsed request or a `RequestError` that names a field, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import CARD, LIMITS

from penstock.contract.errors import RequestError
from penstock.server.http.failures import error_response
from penstock.server.openai.chat import CHAT_FIELDS, NEUTRAL_CHAT, parse_chat
from penstock.server.openai.completions import COMPLETION_FIELDS, NEUTRAL_COMPLETION, parse_completion
from penstock.server.openai.embeddings import EMBEDDING_FIELDS, NEUTRAL_EMBEDDINGS, parse_embeddings
from penstock.server.openai.generate import GENERATE_FIELDS, NEUTRAL_GENERATE, parse_generate

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(max_size=8) | st.sampled_from(["user", "text", "system", "acme/tiny-1"])
KEYS = st.sampled_from(["role", "content", "type", "text", "name", "include_usage", "x"])
JSON = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
PART = st.fixed_dictionaries({"type": st.just("text") | JSON, "text": TEXT | JSON})
MESSAGE = st.fixed_dictionaries({"role": TEXT, "content": TEXT | st.lists(PART | JSON, max_size=2) | JSON})
PROMPT = TEXT | st.lists(st.integers(-1, 101) | TEXT | st.lists(st.integers(-1, 101), max_size=3), max_size=3) | JSON


def parse_embedding_request(*given):
    return parse_embeddings(*given).parsed


ENDPOINTS = {
    "chat": (parse_chat, CHAT_FIELDS, NEUTRAL_CHAT, {"messages": st.lists(MESSAGE, max_size=2)}),
    "completions": (parse_completion, COMPLETION_FIELDS, NEUTRAL_COMPLETION, {"prompt": PROMPT}),
    "embeddings": (parse_embedding_request, EMBEDDING_FIELDS, NEUTRAL_EMBEDDINGS, {"input": PROMPT}),
    "generate": (parse_generate, GENERATE_FIELDS, NEUTRAL_GENERATE, {"prompt": PROMPT}),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_any_body_is_a_parsed_request_or_a_request_error(endpoint):
    parse, fields, neutrals, required = ENDPOINTS[endpoint]
    names = st.sampled_from([field.name for field in fields] + list(neutrals)) | st.text(max_size=4)

    @settings(max_examples=80, deadline=None)
    @given(extra=st.dictionaries(names, JSON, max_size=3), body=st.fixed_dictionaries(required))
    def check(extra, body):
        try:
            parsed = parse(extra | body, "id", CARD, LIMITS)
        except RequestError as error:
            response = error_response(error)
            assert response.status_code in (400, 404)
            assert json.loads(response.body)["error"]["message"]
        else:
            assert 1 <= parsed.num_choices <= LIMITS.max_sequences

    check()
