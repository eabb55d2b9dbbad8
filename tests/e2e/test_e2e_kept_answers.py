"""`penstock serve --journal` is killed while it makes a response in the background: the next server makes the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from served import PATIENCE, killed_at_the_end, wait_until

pytestmark = pytest.mark.model

KEY = "k" * 20
TEXT = "A story of a lighthouse, and of a keeper who"
LONG = {"input": TEXT, "temperature": 1.3, "max_output_tokens": 100, "background": True}


@contextmanager
def killed(journal: Path) -> Iterator[openai.OpenAI]:
    """A client of a server that is killed at the end of the block."""
    with (
        killed_at_the_end(journal, PENSTOCK_API_KEY=KEY) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def generated(client: openai.OpenAI) -> int:
    """Tokens generated since the server began."""
    root = str(client.base_url).removesuffix("v1/")
    metrics = client.with_options(base_url=root).get("metrics", cast_to=str)
    return int(float(re.search(r"^vllm:generation_tokens_total\S* (\S+)$", metrics, re.MULTILINE)[1]))


def caught_at_work(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A response in progress that has some tokens already, and the key with which it was asked for."""
    for attempt in range(10):
        keyed = {"extra_headers": {"Idempotency-Key": f"story-{attempt}"}}
        before = generated(client)
        begun = client.responses.create(**asked, **keyed)
        wait_until(lambda before=before: generated(client) > before)
        if client.responses.retrieve(begun.id).status == "in_progress":  # on a busy machine this may be too late
            return begun, keyed
        client.responses.delete(begun.id)
    raise AssertionError("every answer was complete before it was looked at")


def ended(client: openai.OpenAI, response_id: str) -> Any:
    wait_until(lambda: client.responses.retrieve(response_id).status != "in_progress")
    return client.responses.retrieve(response_id)


def said(response: Any) -> dict[str, Any]:
    """All of a response except how much of its prompt was cached."""
    usage = response.usage.model_copy(update={"input_tokens_details": None})
    return response.model_copy(update={"usage": usage}).model_dump()


def test_a_response_in_the_background_is_finished_by_the_next_server_to_the_byte(default_model, tmp_path):
    with killed(tmp_path) as client:
        model = client.models.list().data[0].id
        first = client.responses.create(model=model, input="The capital of France is", max_output_tokens=8)
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, store=True
        )
        stopped = client.responses.create(model=model, **LONG)
        assert client.responses.cancel(stopped.id).status == "cancelled"
        begun, keyed = caught_at_work(client, {"model": model, "previous_response_id": first.id, **LONG})
    assert KEY.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    with killed(tmp_path) as client:
        done = ended(client, begun.id)
        assert done.status in ("completed", "incomplete")
        assert client.responses.retrieve(first.id) == first
        assert client.chat.completions.retrieve(chat.id).choices == chat.choices
        assert client.responses.retrieve(stopped.id).status == "cancelled"
        events = list(client.responses.retrieve(begun.id, stream=True, starting_after=1))
        assert events[-1].response == done
        # The same request with the same key is the same answer: this time nothing disturbs it.
        client.responses.delete(begun.id)
        again = client.responses.create(model=model, previous_response_id=first.id, **LONG, **keyed)
        assert again.id == begun.id
        undisturbed = ended(client, again.id)
        assert said(undisturbed) == said(done)
        assert len(done.output_text) > len(TEXT)
        client.responses.delete(again.id)
        assert TEXT.encode() in b"".join(path.read_bytes() for path in tmp_path.iterdir())  # in the cancelled one
        client.responses.delete(stopped.id)
        assert TEXT.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
