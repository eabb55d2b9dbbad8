"""Gateways in front of a server: they find out what it is, pass requests on, and change no answer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI
from server_harness import free_port
from test_clients import environment, needs_clients, settings

MODEL = "smollm2-135m-instruct"
PATIENCE = 120  # seconds
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
