"""Gateways in front of a server: they find out what it is, pass requests on, and change no answer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from served import killed_at_the_end
from server_harness import free_port
from test_clients import environment, needs_clients, settings

MODEL = "smollm2-135m-instruct"
PATIENCE = 120  # seconds
NAMES = ("Ada", "Boris", "Chloe", "Dmitri")  # each has a conversation
TURNS = 3
QUESTION = [{"role": "user", "content": "What is the capital of France? " + "Think of rivers and bridges. " * 20}]


@contextmanager
def smg(home: Path, *workers: str) -> Iterator[str]:
    """The gateway's URL, once it knows its workers."""
    port = free_port()
    command = [environment("smg") / "bin" / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "cache_aware", "--worker-urls", *workers]
    with (home / "smg.log").open("w") as log:
        gateway = subprocess.Popen(command, env=settings(home), stdout=log, stderr=subprocess.STDOUT)
    try:
        url, last = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
        while not known(url, len(workers)):
            assert gateway.poll() is None, (home / "smg.log").read_text()[-2000:]
            assert time.monotonic() < last, (home / "smg.log").read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        gateway.kill()
        gateway.wait()


def known(url: str, count: int) -> bool:
    try:
        workers = httpx.get(f"{url}/workers").json()["workers"]
    except httpx.TransportError:
        return False
    return len(workers) == count and all(each["status"] == "ready" for each in workers)


@needs_clients
@pytest.mark.model
def test_smg_finds_out_what_a_server_is_and_passes_on_what_it_says(default_server, tmp_path):
    with smg(tmp_path, default_server.url) as url:
        (worker,) = httpx.get(f"{url}/workers").json()["workers"]
        assert worker["model_id"] == MODEL
        assert worker["models"][0]["context_length"] == 8192
        direct = OpenAI(base_url=f"{default_server.url}/v1", api_key="none")
        through = OpenAI(base_url=f"{url}/v1", api_key="none")
        asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
        said = direct.chat.completions.create(**asked).choices[0].message.content
        answer = through.chat.completions.create(**asked)
        assert answer.choices[0].message.content == said
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
        chunks = through.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
        with pytest.raises(NotFoundError, match="another"):
            through.chat.completions.create(**asked | {"model": "another"})


@needs_clients
@pytest.mark.model
def test_smg_sends_a_conversation_where_it_was_and_elsewhere_when_that_server_is_killed(default_server, tmp_path):
    with ExitStack() as one, ExitStack() as other:
        servers = {each.enter_context(killed_at_the_end(tmp_path / f"{id(each)}")): each for each in (one, other)}
        with smg(tmp_path, *servers) as url:
            through = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
            talks = [[{"role": "user", "content": f"{name} asks. {QUESTION[0]['content']}"}] for name in NAMES]
            found = [_turn(through, talk) for _ in range(TURNS) for talk in talks][len(NAMES) :]
            assert sum(cached for cached, _ in found) > 0.85 * sum(prompt for _, prompt in found)
            servers[max(servers, key=_requests_of)].close()
            for talk in talks:
                _turn(through, talk)
    direct = OpenAI(base_url=f"{default_server.url}/v1", api_key="none")
    for talk in talks:
        assert talk == _talk_with(direct, [message for message in talk if message["role"] == "user"])


def _turn(client: OpenAI, talk: list[dict[str, str]]) -> tuple[int, int]:
    """Add the next question and its answer to `talk`; returns the prompt's cached tokens, and all its tokens."""
    if talk[-1]["role"] == "assistant":
        talk.append({"role": "user", "content": "And what else?"})
    answer = client.chat.completions.create(model=MODEL, messages=talk, temperature=0, max_tokens=12)
    talk.append({"role": "assistant", "content": answer.choices[0].message.content})
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens if details else 0, answer.usage.prompt_tokens


def _talk_with(client: OpenAI, questions: list[dict[str, str]]) -> list[dict[str, str]]:
    """Ask a server these questions directly; returns the conversation."""
    talk: list[dict[str, str]] = []
    for question in questions:
        talk.append(question)
        _turn(client, talk)
    return talk


def _requests_of(url: str) -> float:
    """How many requests a server has answered."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    )
