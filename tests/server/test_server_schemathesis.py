"""Requests made from our own OpenAPI document, right and wrong ones: no 5xx, no hang, every error an error object."""

from __future__ import annotations

import pytest
import requests
from scripted_engine import HELLO, ScriptedEngine, delta, finished, stop

from conftest import CARD, running
from penstock.server.fates import ENDPOINTS

pytestmark = pytest.mark.deep

EXAMPLES = 200
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
SECONDS = 5.0
WITH_BODY = frozenset(ENDPOINTS)


def every_choice(ask):
    """An answer with as many choices as were asked for, or a vector."""
    if ask.embedding is not None:
        yield from HELLO(ask)
        return
    for choice in range(ask.n):
        yield from (delta("Hi", choice), stop(choice))
    yield finished()


@pytest.fixture(scope="module")
def url():
    with running(ScriptedEngine(script=every_choice), card=CARD) as url:
        yield url


@pytest.mark.filterwarnings("ignore")  # the tool's own: of schemas it thinks unusual, and of its dependencies
def test_every_operation_answers_whatever_is_sent(url):
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(requests.get(f"{url}/openapi.json", timeout=SECONDS).json())
    schema.config.update(base_url=url)
    tried: dict[str, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @_given(operation.as_strategy(generation_mode=mode))
            def check(case) -> None:
                tried[f"{case.method} {case.path}"] = tried.get(f"{case.method} {case.path}", 0) + 1
                _check(case.call(timeout=SECONDS), case.path)

            try:
                check()
            except Exception as error:  # an operation without parameters has nothing that could be wrong
                if "negative" not in str(error).lower() and "Unsatisfiable" not in type(error).__name__:
                    raise
    assert len(tried) == len(list(schema.get_all_operations()))
    few = {name: count for name, count in tried.items() if name.removeprefix("POST ") in WITH_BODY and count < EXAMPLES}
    assert few == {}


def _given(strategy):
    from hypothesis import given

    return given(case=strategy)


def _check(response, path: str) -> None:
    assert response.status_code < 500, (path, response.request.body)
    if response.status_code < 400:
        return
    body = response.json()
    if path in ANTHROPIC:
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
