"""Several models behind one port: each is loaded when it is asked for, answers as alone, and makes room for others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import only_line, penstock
from hosted import FAMILIES, OPTIONS, QUICK, serving, states, write_models
from openai import OpenAI
from served import PATIENCE, below, runners_of, wait_until

from needs import COMPILED
from penstock import LLM, SamplingParams
from penstock.kernels import native
from penstock.remote import can_fork

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

PROMPT = [5, 9, 4, 9, 5, 7, 11, 5, 9, 4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(folders) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    names = [str(folders[name]) for name in FAMILIES]
    with serving(*names, QUICK, "--max-loaded-models", "2", "--pin", names[0]) as (url, process):
        yield url, process


def complete(url: str, model: str, **changes) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, str]:
    """What each model answers as a library."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = {}
    for name, folder in folders.items():
        with LLM(str(folder), **OPTIONS) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            found[name] = output.outputs[0].text
    return found


def test_each_answers_as_alone_and_the_pinned_one_stays(server, alone):
    url, _ = server
    assert states(url)["first"] == "loaded"
    for name in ("third", "second", "first", "third"):
        assert text_of(complete(url, name)) == alone[name]
        assert states(url)["first"] == "loaded"
        assert list(states(url).values()).count("loaded") <= 2
    assert states(url)["second"] == "unloaded"


def test_200_mixed_requests_from_eight_clients_fail_never(server, alone):
    url, _ = server
    wrong: list[str] = []

    def ask(which: int) -> None:
        for at in range(25):
            name = list(FAMILIES)[(which + at // 5) % 3]
            try:
                if text_of(complete(url, name)) != alone[name]:
                    wrong.append(name)
            except Exception as error:
                wrong.append(repr(error))

    clients = [threading.Thread(target=ask, args=(which,)) for which in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert not wrong
    assert states(url)["first"] == "loaded"


def test_a_request_without_a_model_is_the_first_ones(server, alone):
    url, _ = server
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    assert text_of(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)) == alone["first"]


def test_an_unknown_model_is_refused_with_the_names_that_there_are(server):
    url, _ = server
    refused = complete(url, "fourth")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "'third'" in refused.json()["error"]["message"]


def test_a_body_that_cannot_be_read_is_refused_as_ever(server):
    url, _ = server
    headers = {"content-type": "application/json"}
    refused = httpx.post(f"{url}/v1/completions", content=b'{"model": ', headers=headers, timeout=PATIENCE)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_models_are_loaded_unloaded_and_pinned_by_their_routes(server):
    url, _ = server

    def move(action: str, model: str) -> httpx.Response:
        return httpx.post(f"{url}/models/{action}", json={"model": model}, timeout=PATIENCE)

    assert move("load", "second").json()["status"]["value"] == "loaded"
    assert move("pin", "second").json()["status"]["pinned"] is True
    full = complete(url, "third")
    assert full.status_code == 503
    assert "pinned" in full.json()["error"]["message"]
    assert int(full.headers["retry-after"]) > 0
    assert move("unpin", "second").json()["status"]["pinned"] is False
    assert complete(url, "third").status_code == 200
    assert move("unload", "third").json()["status"]["value"] == "unloaded"
    assert move("load", "fourth").status_code == 404
    assert httpx.post(f"{url}/models/load", json={}, timeout=PATIENCE).status_code == 400


def test_and_by_the_command_line(server):
    url, _ = server

    def served(*arguments: str) -> subprocess.CompletedProcess[str]:
        return penstock("served", *arguments, "--base-url", url)

    def listed() -> dict[str, list[str]]:
        head, *rows = served("list").stdout.splitlines()
        assert head.split() == ["MODEL", "STATE", "PINNED", "REQUESTS", "MEMORY", "CONTEXT"]
        return {row.split()[0]: row.split()[1:] for row in rows}

    assert listed()["first"][:2] == ["loaded", "pinned"]
    assert served("load", "second").stdout.split()[:2] == ["second", "loaded"]
    assert served("pin", "second").stdout.split()[:3] == ["second", "loaded", "pinned"]
    full = served("load", "third")
    assert full.returncode == 2
    assert "pinned" in only_line(full.stderr)
    assert served("unpin", "second").returncode == 0
    assert served("unload", "second").stdout.split()[:2] == ["second", "unloaded"]
    assert listed()["second"][0] == "unloaded"
    unknown = served("load", "fourth")
    assert unknown.returncode == 2
    assert "'fourth' is not served there; there: first, second, third" in only_line(unknown.stderr)
    nowhere = penstock("served", "list", "--base-url", "http://127.0.0.1:9")
    assert "no server answers" in only_line(nowhere.stderr)


def test_stored_answers_are_found_whatever_model_gave_them(server):
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
    stored = {name: client.responses.create(model=name, input="ab", max_output_tokens=16) for name in FAMILIES}
    for name, response in stored.items():
        found = client.responses.retrieve(response.id)
        assert (found.model, found.output_text) == (name, response.output_text)
    missing = httpx.get(f"{url}/v1/responses/resp_none")
    assert missing.status_code == 404


def test_streams_health_and_metrics(server):
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
    stream = client.completions.create(model="second", prompt=PROMPT, max_tokens=8, stream=True, temperature=0)
    assert sum(1 for _ in stream) > 1
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok"
    assert health["total_blocks"] > 0
    assert httpx.get(f"{url}/health/ready").status_code == 200
    assert httpx.get(f"{url}/").status_code == 200
    text = httpx.get(f"{url}/metrics").text
    for name in FAMILIES:
        assert re.search(rf'vllm:generation_tokens_total{{engine="0",model_name="{name}"}} \d', text), name
    assert 'penstock:model_loaded{model_name="first"} 1.0' in text
    helps = [line for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)), "each metric is described once"


def test_who_watches_a_model_loads_none(folders):
    def event(url: str, query: str = "") -> dict:
        with httpx.stream("GET", f"{url}/engine/events{query}", timeout=PATIENCE) as response:
            assert response.status_code == 200, response.read()
            line = next(line for line in response.iter_lines() if line.startswith("data: "))
            return json.loads(line.removeprefix("data: "))

    def inside(url: str, name: str) -> tuple[list[dict], list[dict]]:
        steps, prefixes = (httpx.get(f"{url}/engine/{view}?model={name}").json() for view in ("steps", "prefixes"))
        assert httpx.get(f"{url}/engine/tenants?model={name}").json()["data"] == []  # without keys
        return steps["data"], prefixes["nodes"]

    with serving(*(str(folders[name]) for name in ("first", "second"))) as (url, _):
        assert event(url)["state"] == event(url, "?model=second")["state"] == "unloaded"
        assert inside(url, "second") == ([], [])
        answer = complete(url, "second")
        steps, _ = inside(url, "second")
        assert sum(step["chunk"] + step["decoding"] for step in steps) >= len(PROMPT) + 11
        assert inside(url, "first") == ([], [])
        told = httpx.get(f"{url}/v1/requests/{answer.json()['id']}/steps").json()["steps"]
        assert sum(step["own_positions"] for step in told) >= len(PROMPT) + 11
        seen = event(url, "?model=second")
        assert (seen["state"], seen["generated_tokens"], seen["alive"]) == ("loaded", 12, True)
        httpx.post(f"{url}/models/unload", json={"model": "second"}, timeout=PATIENCE)
        seen = event(url, "?model=second")
        assert (seen["state"], seen["generated_tokens"]) == ("unloaded", 12)
        assert inside(url, "second")[0] == []
        assert set(states(url).values()) == {"unloaded"}
        for view in ("events", "steps", "prefixes", "tenants"):
            assert httpx.get(f"{url}/engine/{view}?model=fourth").status_code == 404


def resident(pid: int) -> int:
    """Bytes of memory that a process and its descendants hold."""
    total = 0
    for each in (pid, *below(pid)):
        found = re.search(r"Rss:\s+(\d+)", Path(f"/proc/{each}/smaps_rollup").read_text())
        total += int(found[1]) * 1024 if found else 0
    return total


def test_an_idle_model_leaves_and_its_memory_with_it(folders, alone):
    names = [str(folders[name]) for name in ("first", "second")]
    with serving(*names, "--unload-after", "1", forked=False) as (url, process):
        assert text_of(complete(url, "second")) == alone["second"]
        loaded = resident(process.pid)
        wait_until(lambda: states(url)["second"] == "unloaded")
        time.sleep(0.2)
        assert resident(process.pid) < loaded - 50e6, "its process is gone"
        assert text_of(complete(url, "second")) == alone["second"]


def test_a_model_whose_process_dies_goes_on_and_the_others_too(folders, alone):
    names = [str(folders[name]) for name in ("first", "second")]
    with serving(*names, forked=False) as (url, process):
        assert text_of(complete(url, "first")) == alone["first"]
        (runner,) = runners_of(process.pid)
        assert text_of(complete(url, "second")) == alone["second"]
        os.kill(runner, signal.SIGKILL)
        assert text_of(complete(url, "second")) == alone["second"]
        assert text_of(complete(url, "first")) == alone["first"]


@pytest.mark.skipif(not can_fork(), reason="each model's process is started, and not forked")
def test_the_processes_of_all_models_come_from_one_that_has_imported(folders, alone):
    names = [str(folders[name]) for name in ("first", "second")]
    with serving(*names, "--standby", forked=False) as (url, process):
        for name in ("first", "second"):
            assert text_of(complete(url, name)) == alone[name]
        assert len(runners_of(process.pid)) == 3
        (zygote,) = [each for each in runners_of(process.pid) if len({*below(each)} & {*runners_of(process.pid)}) == 2]
        os.kill(zygote, signal.SIGKILL)
        assert text_of(complete(url, "first")) == alone["first"]
        httpx.post(f"{url}/models/unload", json={"model": "second"}, timeout=PATIENCE)
        assert text_of(complete(url, "second")) == alone["second"], "another one has imported"


def test_the_second_load_finds_its_kv(folders, tmp_path):
    prompt = [(7 * at) % 200 + 3 for at in range(160)]
    with serving(str(folders["first"]), "--model-wait", "60", "--kv-store", str(tmp_path / "kv")) as (url, _):
        first = complete(url, "first", prompt=prompt).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        httpx.post(f"{url}/models/unload", json={"model": "first"}, timeout=PATIENCE)
        again = complete(url, "first", prompt=prompt).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        assert again["choices"] == first["choices"]


def test_a_file_says_what_each_model_has(folders, tmp_path, alone):
    file = tmp_path / "models.yaml"
    file.write_text(
        f"models:\n  - model: {folders['first']}\n    served-model-name: [small, little]\n    pin: true\n"
        f"  - model: {folders['second']}\n    max-model-len: 64\n    unload-after: 100\n"
    )
    with serving("--models-file", str(file)) as (url, _):
        assert states(url) == {"small": "loaded", "little": "loaded", "second": "unloaded"}
        assert text_of(complete(url, "little")) == alone["first"]
        assert text_of(complete(url, "second")) == alone["second"]
        listed = {each["id"]: each["max_model_len"] for each in httpx.get(f"{url}/v1/models").json()["data"]}
        assert listed["second"] == 64
