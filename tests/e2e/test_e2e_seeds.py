"""RoseInfer's and AstrAI's commands as their users call them, on a GPT-2 in a `.pt` file: each with its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from served import serve
from tiny_checkpoints import write_lettered
from transformers import GPT2LMHeadModel

from penstock import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PROMPTS = ["hi, ", "hello,", "how"]
FLAGS = ["--max-new-tokens", "12", "--device", "cpu", "--no-amp"]
LATE = "Hello, world!"
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A tokenizer's directory, and transformers' model beside it."""
    return write_lettered(tmp_path_factory.mktemp("seeds") / "gpt2", "gpt2", "tied")


@pytest.fixture(scope="module")
def checkpoint(gpt2):
    path = gpt2.parent / "gpt2.pt"
    config = json.loads((gpt2 / "config.json").read_text())
    torch.save({"config": config, "model": GPT2LMHeadModel.from_pretrained(gpt2).state_dict()}, path)
    return path


@pytest.fixture(scope="module")
def greedy(gpt2):
    """Prompt and completion of a text, as the library has it."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(gpt2), dtype="float32", device="cpu", kv_cache_memory=2_000_000) as llm:
        outputs = llm.generate([*PROMPTS, LATE], params, use_tqdm=False)
    return [f"{output.prompt}{output.outputs[0].text}" for output in outputs]


def example(name, checkpoint, gpt2, *more):
    command = [sys.executable, f"examples/{name}.py", "--checkpoint-path", str(checkpoint)]
    command += ["--tokenizer-name", str(gpt2), "--prompts", *PROMPTS, *FLAGS, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_shown(texts):
    return "".join(f"### request {number}\n{text}\n\n" for number, text in enumerate(texts))


def test_the_offline_example_is_greedy_unless_it_is_told_to_sample(checkpoint, gpt2, greedy):
    assert example("offline", checkpoint, gpt2) == as_shown(greedy[:3])
    assert example("offline", checkpoint, gpt2, "--stream") == as_shown(greedy[:3])
    drawn = example(
        "offline", checkpoint, gpt2, "--temperature", "0.8", "--top-p", "0.95", "--do-sample", "--no-stop-on-eos"
    )
    assert [drawn.count(f"### request {number}\n") for number in range(4)] == [1, 1, 1, 0]
    assert drawn != as_shown(greedy[:3])


def test_the_online_example_takes_a_late_request(checkpoint, gpt2, greedy):
    assert example("online", checkpoint, gpt2) == as_shown(greedy)
    assert "step 2, request 3: " in example("online", checkpoint, gpt2, "--stream", "--do-sample", "--top-k", "5")


@pytest.fixture(scope="module")
def server(checkpoint, gpt2, tmp_path_factory):
    arguments = ["--checkpoint-path", str(checkpoint), "--tokenizer-name", str(gpt2), "--device", "cpu"]
    arguments += ["--dtype", "float32", "--kv-cache-memory", "2MB", "--served-model-name", "roseinfer-gpt2"]
    with serve(tmp_path_factory.mktemp("trace") / "trace.jsonl", *arguments) as served:
        yield served.url


def generate_body(**more):
    body = {"prompt": PROMPTS[0], "max_new_tokens": 12, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return body | {"stop_on_eos": True, "do_sample": False, "stream": False} | more


def test_generate_whole_and_streamed(server, greedy):
    whole = httpx.post(f"{server}/generate", json=generate_body(), timeout=60)
    assert whole.status_code == 200
    assert PROMPTS[0] + whole.json()["text"] == greedy[0]
    echoed = httpx.post(f"{server}/generate", json=generate_body(echo=True), timeout=60)
    assert echoed.json()["text"] == greedy[0]
    streamed = httpx.post(f"{server}/generate", json=generate_body(stream=True), timeout=60)
    assert streamed.headers["content-type"].startswith("text/plain")
    assert streamed.text == whole.json()["text"]
    echoed = httpx.post(f"{server}/generate", json=generate_body(echo=True, stream=True), timeout=60)
    assert echoed.text == greedy[0]


def test_chat_completions_of_a_model_without_a_template(server):
    body = {"model": "roseinfer-gpt2", "messages": MESSAGES, "max_tokens": 32, "temperature": 0.7, "top_p": 0.95}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body | {"stream": True}, timeout=60)
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["model"] for chunk in chunks} == {"roseinfer-gpt2"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    shown = httpx.post(f"{server}/tokenize", json={"messages": MESSAGES}, timeout=60).json()
    plain = "[system]\nYou are a helpful assistant.\n\nUser: Hello!\n\nAssistant:"
    assert shown["tokens"] == httpx.post(f"{server}/tokenize", json={"prompt": plain}, timeout=60).json()["tokens"]


def test_health_and_stats(server):
    httpx.post(f"{server}/generate", json=generate_body(), timeout=60)
    health = httpx.get(f"{server}/health").json()
    assert (health["status"], health["model_loaded"], health["engine_ready"]) == ("ok", True, True)
    stats = httpx.get(f"{server}/stats").json()
    assert stats["total_tasks"] >= 1
    assert stats["total_tokens"] >= 1
    assert (stats["active_tasks"], stats["waiting_queue"]) == (0, 0)


def test_astrais_verbs(gpt2):
    """generate(str or list), add_task with a callback, remove_task, a context manager."""
    heard: list[str] = []
    with LLM(str(gpt2), dtype="float32", kv_cache_memory=2_000_000) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert len(llm.generate("hi", params, use_tqdm=False)) == 1
        assert len(llm.generate(["hi", "how"], params, use_tqdm=False)) == 2
        task = llm.add_request("hi", params, on_text=heard.append)
        removed = llm.add_request("how", params)
        llm.step()
        llm.abort_request(removed)
        while llm.has_unfinished_requests():
            llm.step()
        assert "".join(heard) == llm.get_output(task).outputs[0].text
        assert llm.get_output(removed).outputs[0].finish_reason == "abort"
