"""Open WebUI's own server, installed by the person who runs this, in front of ours; asked over HTTP as its page asks.

`OPEN_WEBUI` names its program; it takes several gigabytes, so `make test-clients` does not install it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from needs import OPEN_WEBUI as OPEN_WEBUI_MISSING

PROGRAM = os.environ.get("OPEN_WEBUI", "")
LIMIT = 300.0  # seconds; it makes its database and imports torch first
MODEL = "smollm2-135m-instruct"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

pytestmark = [pytest.mark.model, pytest.mark.skipif(not PROGRAM, reason=OPEN_WEBUI_MISSING)]


@pytest.fixture(scope="module")
def webui(default_server, tmp_path_factory) -> Iterator[httpx.Client]:
    """Its API, signed in, with our server as its only connection."""
    home = tmp_path_factory.mktemp("open-webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "HOME": str(home),
        "DATA_DIR": str(home / "data"),
        "OPENAI_API_BASE_URL": f"{default_server.url}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "False",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of this test",
        "OFFLINE_MODE": "True",  # it would fetch an embedding model of its own
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "ANONYMIZED_TELEMETRY": "False",
    }
    command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = home / "log.txt"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, env=os.environ | settings, cwd=home, stdout=written, stderr=subprocess.STDOUT
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as client:
                wait_until_it_answers(client, process, log)
                signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
                client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
                yield client
        finally:
            process.terminate()
            process.wait(LIMIT)


def wait_until_it_answers(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < end:
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace")[-3000:])


def asked(webui: httpx.Client, path: str, **body) -> httpx.Response:
    answer = webui.post(path, json={"model": MODEL, **body})
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def test_the_model_is_listed(webui):
    assert [each["id"] for each in webui.get("/api/models").json()["data"]] == [MODEL]


def test_a_chat_is_streamed(webui):
    answer = asked(webui, "/api/chat/completions", messages=[QUESTION], stream=True, temperature=0)
    assert " Paris" in answer.text
    assert "\ndata: [DONE]\n" in answer.text


def test_a_conversation_goes_on(webui):
    first = asked(webui, "/api/chat/completions", messages=[QUESTION], stream=False, temperature=0).json()
    said = first["choices"][0]["message"]
    assert "Paris" in said["content"]
    following = [QUESTION, said, {"role": "user", "content": "Thank you!"}]
    second = asked(webui, "/api/chat/completions", messages=following, stream=False, max_tokens=20).json()
    assert second["choices"][0]["message"]["content"]


def test_a_tool_is_called(webui):
    tools = [{"type": "function", "function": WEATHER}]
    question = {"role": "user", "content": "What is the weather in Paris?"}
    asking = {"messages": [question], "tools": tools, "tool_choice": "required", "temperature": 0}
    answer = asked(webui, "/api/chat/completions", stream=False, **asking).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


def test_it_makes_a_title(webui):
    said = [QUESTION, {"role": "assistant", "content": "Paris."}]
    assert asked(webui, "/api/v1/tasks/title/completions", messages=said).json()["choices"][0]["message"]["content"]


def test_a_text_is_embedded(webui):
    (row,) = asked(webui, "/api/embeddings", input=["The sea is wide."]).json()["data"]
    assert len(row["embedding"]) == 576
