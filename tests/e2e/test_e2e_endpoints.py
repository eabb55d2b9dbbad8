"""The other endpoints on the default command and the default model, with the official clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from served import ALONE, Process, Served, start

from penstock import LLM

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
CANARY = "Xylophonists of Quebec"


@pytest.fixture(scope="module")
def served(default_server) -> Served:
    return default_server


@pytest.fixture(scope="module")
def oai(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def test_three_dialects_give_one_answer(oai, claude):
    turns = [{"role": "user", "content": QUESTION}]
    chat = oai.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_completion_tokens=12)
    response = oai.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=12)
    with claude.messages.stream(model=MODEL, max_tokens=12, messages=turns, extra_body={"temperature": 0}) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert chat.choices[0].message.content == response.output_text == streamed == final.content[0].text
    assert "Paris" in streamed
    used = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert used == chat.usage.prompt_tokens == response.usage.input_tokens
    assert claude.messages.count_tokens(model=MODEL, messages=turns).input_tokens == used


def test_embeddings_are_the_librarys_in_both_encodings_and_in_any_company(oai, default_model):
    texts = ["A cat sat on the mat.", "Interest rates rose.", "A cat sat on the mat."] * 4
    plain = oai.embeddings.create(model=MODEL, input=texts)  # the client asks for base64 by itself
    floats = oai.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    alone = oai.embeddings.create(model=MODEL, input=texts[1], dimensions=64)
    with LLM(str(default_model), kv_cache_memory=50_000_000) as llm:
        expected = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
        cut = llm.embed(texts[1], dimensions=64, use_tqdm=False)[0].outputs.embedding
    assert [list(item.embedding) for item in plain.data] == expected
    assert [list(item.embedding) for item in floats.data] == expected
    assert list(alone.data[0].embedding) == cut
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == floats.usage.prompt_tokens > len(texts)
    with pytest.raises(openai.BadRequestError) as caught:
        oai.embeddings.create(model=MODEL, input=[[5], [5] * 20_000])
    assert (caught.value.param, caught.value.code) == ("input.1", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        oai.embeddings.create(model=MODEL, input=["fine", "word " * 20_000])
    assert (caught.value.param, caught.value.code) == ("input.1", "context_length_exceeded")


def test_a_conversation_goes_on_by_id(oai):
    first = oai.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=12)
    second = oai.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=12
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.output_text


def test_tokens_are_those_that_the_model_computes(served, oai):
    messages = [{"role": "user", "content": QUESTION}]
    tokens = httpx.post(served.url + "/tokenize", json={"messages": messages}).json()
    chat = oai.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=1)
    assert tokens["count"] == chat.usage.prompt_tokens
    text = httpx.post(served.url + "/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == httpx.post(served.url + "/apply-template", json={"messages": messages}).json()["prompt"]
    assert QUESTION in text


def test_a_reset_forgets_what_was_cached(served, oai):
    def cached() -> int:
        answer = oai.completions.create(model=MODEL, prompt="One two three four " * 20, max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    cached()
    assert cached() > 0
    assert httpx.post(served.url + "/reset_prefix_cache").json() == {"reset": True}
    assert cached() == 0


def test_a_profile_shows_the_steps_and_what_was_computed_in_them_and_no_text(served, oai):
    assert httpx.post(served.url + "/start_profile").json() == {"profiling": True, "files": []}
    again = httpx.post(served.url + "/start_profile")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "profile_running")
    oai.completions.create(model=MODEL, prompt=CANARY, max_tokens=5, extra_body={"ignore_eos": True})
    names = httpx.post(served.url + "/stop_profile", timeout=60).json()["files"]
    again = httpx.post(served.url + "/stop_profile")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "profile_not_running")
    steps, computed = (json.loads((served.trace.parent / "profiles" / name).read_text()) for name in names)
    assert CANARY not in json.dumps([steps, computed])
    decided, done = (
        [event["name"] for event in each["traceEvents"] if event["ph"] == "X"] for each in (steps, computed)
    )
    assert decided.count("plan") == decided.count("run") == decided.count("commit") == 5
    assert done.count("run") == 5, "in a process that knows of nothing else"
    operations = [event for event in computed["traceEvents"] if event.get("cat") == "cpu_op"]
    assert any(event["name"].startswith("aten::") for event in operations)


def test_an_answer_is_aborted_by_its_id_and_its_blocks_come_back(served, oai):
    stream = oai.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    first = next(chunks)
    assert httpx.post(served.url + "/abort_requests", json={"request_ids": [first.id]}).json() == {
        "aborted": [first.id]
    }
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
    served.wait_idle(2)


def test_ready_means_that_the_engine_answers(served):
    assert httpx.get(served.url + "/health/ready").status_code == 200


KEY = "sk-0123456789abcdef"


@pytest.fixture
def process() -> Iterator[Process]:
    with start("serve", "--port", "0", ALONE, PENSTOCK_API_KEY=KEY) as process:
        yield process
        process.kill()


def test_sigterm_lets_answers_finish_and_no_log_holds_a_prompt_or_a_key(process):
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if "listening" in line:
            break
    url = next(word for word in said[-1].split() if word.startswith("http"))
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.post(url + "/v1/completions", json={"prompt": CANARY}).status_code == 401
    for body in ({"prompt": CANARY, "surprise": CANARY}, {"prompt": CANARY, "stop": [CANARY] * 65}):
        assert httpx.post(url + "/v1/completions", json=body, headers=headers).status_code == 400
    body = {"prompt": CANARY, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "user": CANARY}
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=60))
    )
    asking.start()
    while not httpx.get(url + "/health", headers=headers).json()["running"]:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    asking.join(60)
    said += process.stdout.readlines()
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) == 0
    assert not [line for line in said if CANARY in line or KEY in line]


def test_an_open_address_without_a_key_is_refused_before_anything_is_loaded():
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PENSTOCK_API_KEY"},
    )
    assert done.returncode == 2
    assert "needs an API key" in done.stderr
    assert done.stdout == ""  # not even the first line of the report, which names the model
