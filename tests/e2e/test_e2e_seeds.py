"""RoseInfer's and AstrAI's commands as their users call them, on a GPT-2 in a `.pt` file: each with its output."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from example_scripts import run_here, started
from served import serve
from tiny_checkpoints import write_lettered
from transformers import GPT2LMHeadModel

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.contract.errors import InvalidParameter

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


def arguments(checkpoint, gpt2, *more):
    return ["--checkpoint-path", str(checkpoint), "--tokenizer-name", str(gpt2), "--prompts", *PROMPTS, *FLAGS, *more]


def as_shown(texts):
    return "".join(f"### request {number}\n{text}\n\n" for number, text in enumerate(texts))


SCRIPT = ["--max-new-tokens", "100", "--temperature", "0.8", "--top-p", "0.95", "--do-sample"]
"""As RoseInfer's shell scripts call both of its examples."""


def requests_in(shown):
    return [int(line.split()[2]) for line in shown.splitlines() if line.startswith("### request ")]


@pytest.mark.deep
def test_the_offline_example_is_greedy_unless_it_is_told_to_sample(checkpoint, gpt2, greedy):
    assert started("offline", *arguments(checkpoint, gpt2, "--stop-on-eos")) == as_shown(greedy[:3])
    assert run_here("offline", *arguments(checkpoint, gpt2, "--stream")) == as_shown(greedy[:3])
    drawn = run_here("offline", *arguments(checkpoint, gpt2, *SCRIPT, "--no-stop-on-eos", "--bf16", "--seed", "1"))
    assert requests_in(drawn) == [0, 1, 2]
    assert len(drawn) > 2 * len(as_shown(greedy[:3]))  # 100 tokens each, whatever ends a text


def test_the_online_example_takes_a_late_request(checkpoint, gpt2, greedy):
    assert started("online", *arguments(checkpoint, gpt2)) == as_shown(greedy)
    drawn = run_here("online", *arguments(checkpoint, gpt2, *SCRIPT, "--stream", "--top-k", "5", "--no-stop-on-eos"))
    assert requests_in(drawn) == [0, 1, 2, 3]
    assert "step 0, request 3: " not in drawn
    assert "step 1, request 3: " not in drawn
    assert "step 2, request 3: " in drawn
    assert LATE in drawn


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(checkpoint, gpt2, profiles, tmp_path_factory):
    """RoseInfer's server, with some options in a YAML file, over which flags win."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "options.yaml").write_text("dtype: bfloat16\nkv-cache-memory: 2MB\nport: 1\n")
    arguments = ["--checkpoint-path", str(checkpoint), "--tokenizer-name", str(gpt2), "--device", "cpu"]
    arguments += ["--dtype", "float32", "--config", str(folder / "options.yaml"), "--profile-dir", str(profiles)]
    arguments += ["--served-model-name", "roseinfer-gpt2", "--served-model-name", "*"]
    with serve(folder / "trace.jsonl", *arguments) as served:
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
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["model"] for chunk in chunks} == {"roseinfer-gpt2"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    shown = httpx.post(f"{server}/tokenize", json={"messages": MESSAGES}, timeout=60).json()
    plain = "[system]\nYou are a helpful assistant.\n\nUser: Hello!\n\nAssistant:"
    assert shown["tokens"] == httpx.post(f"{server}/tokenize", json={"prompt": plain}, timeout=60).json()["tokens"]


def test_chat_completions_whole_and_under_any_name(server):
    body = {"model": "any/name", "messages": MESSAGES, "max_tokens": 8, "do_sample": False, "stream": False}
    answers = [httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).json() for _ in range(2)]
    assert {answer["model"] for answer in answers} == {"any/name"}
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["message"]["role"] == "assistant"
    assert answers[0]["usage"]["completion_tokens"] <= 8


def test_many_clients_stream_at_once_and_each_hears_what_it_would_alone(server, greedy):
    def ask(prompt):
        return httpx.post(f"{server}/generate", json=generate_body(prompt=prompt, echo=True, stream=True), timeout=60)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, [*PROMPTS, LATE] * 3))
    assert [answer.text for answer in answers] == greedy * 3


def test_profiles_are_started_and_stopped(server, profiles):
    assert httpx.post(f"{server}/start_profile").json()["profiling"] is True
    httpx.post(f"{server}/generate", json=generate_body(), timeout=60)
    files = httpx.post(f"{server}/stop_profile", timeout=60).json()["files"]
    assert sorted(files) == sorted(path.name for path in profiles.iterdir())
    assert all(json.loads((profiles / name).read_text())["traceEvents"] for name in files)


def test_health_and_stats(server):
    httpx.post(f"{server}/generate", json=generate_body(), timeout=60)
    health = httpx.get(f"{server}/health").json()
    assert (health["status"], health["model_loaded"], health["engine_ready"]) == ("ok", True, True)
    stats = httpx.get(f"{server}/stats").json()
    assert stats["total_tasks"] >= 1
    assert stats["total_tokens"] >= 1
    assert (stats["active_tasks"], stats["waiting_queue"]) == (0, 0)


def test_roseinfers_verbs(gpt2, greedy):
    """add_request, has_unfinished, step, is_finished, get_response, pop_response, run, stream_text, discard_request."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(gpt2), dtype="float32", device="cpu", kv_cache_memory=2_000_000, max_num_seqs=2) as llm:
        ids = [llm.add_request(prompt, params) for prompt in PROMPTS]
        llm.step()
        late = llm.add_request(LATE, params)
        assert (llm.scheduler.stats.running, llm.scheduler.stats.waiting) == (2, 2)  # two decode at once
        assert not llm.is_finished(ids[0])
        assert llm.get_output(ids[0]).outputs[0].token_ids
        while llm.has_unfinished_requests():
            llm.step()
        assert all(map(llm.is_finished, [*ids, late]))
        said = [f"{output.prompt}{output.outputs[0].text}" for output in map(llm.pop_output, [*ids, late])]
        assert said == greedy
        with pytest.raises(InvalidParameter):
            llm.get_output(ids[0])
        streamed = llm.add_request(PROMPTS[0], params)
        discarded = llm.add_request(PROMPTS[1], params)
        llm.abort_request(discarded)
        assert PROMPTS[0] + "".join(llm.stream_text(streamed)) == greedy[0]
        assert not llm.has_unfinished_requests()


async def test_astrais_asynchronous_verbs(gpt2, greedy):
    """generate_async for several at once, get_stats, stop."""
    params = SamplingParams(temperature=0, max_tokens=12)

    async def text(llm, prompt):
        return prompt + "".join([piece async for piece in llm.stream_text(prompt, params)])

    async with AsyncLLM(str(gpt2), dtype="float32", device="cpu", kv_cache_memory=2_000_000) as llm:
        assert await asyncio.gather(*(text(llm, prompt) for prompt in PROMPTS)) == greedy[:3]
        while (health := llm.health()).running:  # the last step may not be reported yet
            await asyncio.sleep(0.01)
        assert (health.alive, health.waiting) == (True, 0)
        assert health.generated_tokens > 0
    assert not llm.health().alive


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
