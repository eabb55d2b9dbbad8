"""Certificates of several models behind one port, from every endpoint, judged by `penstock verify --certificate`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import penstock
from hosted import OPTIONS, QUICK, serving
from served import PATIENCE
from sse_reader import read_events
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock.certificates import read
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

SAID = {"messages": [{"role": "user", "content": "the sea and"}]}
ENDPOINTS = {
    "/v1/chat/completions": SAID | {"max_tokens": 9, "n": 2},
    "/v1/completions": {"prompt": "the sea and", "max_tokens": 9},
    "/v1/responses": {"input": "the sea and", "max_output_tokens": 9},
    "/v1/messages": SAID | {"max_tokens": 9},
    "/generate": {"prompt": "the sea and", "max_tokens": 9},
}
WIDTHS = {"one": 96, "two": 128}
SIZES = ("--kv-cache-memory", OPTIONS["kv_cache_memory"], "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models, the second with an adapter called poet."""
    folder = tmp_path_factory.mktemp("certified")
    for name, width in WIDTHS.items():
        (folder / name).mkdir()
        write_lettered(folder / name, "llama", "wide_heads_untied", intermediate_size=width)
    write_adapter(folder / "poet", linear_modules(load_with_adapters(folder / "two").program), 4, seed=2)
    return folder


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    models = folder / "models.yaml"
    poet = f", lora: ['poet={folder}/poet']"
    entries = [f"  - {{model: {folder / name}{poet if name == 'two' else ''}}}\n" for name in WIDTHS]
    models.write_text("models:\n" + "".join(entries))
    with serving("--models-file", str(models), QUICK, "--answer-cache", "1MB") as (url, _):
        yield url


def posted(url: str, path: str, model: str, **fields: object) -> httpx.Response:
    body = ENDPOINTS[path] | {"model": model, "certificate": True} | fields
    answer = httpx.post(url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(url: str, path: str, model: str) -> str:
    events = [each.data for each in read_events(posted(url, path, model, stream=True).content)]
    *_, last = [json.loads(data) for data in events if data != "[DONE]"]
    return last.get("response", last)["certificate"]


def in_background(url: str, model: str) -> str:
    begun = posted(url, "/v1/responses", model, background=True).json()
    deadline = time.monotonic() + PATIENCE
    while (got := httpx.get(f"{url}/v1/responses/{begun['id']}", timeout=PATIENCE).json())["status"] == "in_progress":
        assert time.monotonic() < deadline, got
        time.sleep(0.02)
    return got["certificate"]


def certificates(url: str, model: str) -> list[str]:
    """One from each endpoint, whole, streamed, and in the background."""
    whole = [posted(url, path, model) for path in ENDPOINTS]
    texts = [each.json()["certificate"] for each in whole]
    for answer, text in zip(whole, texts, strict=True):
        assert answer.headers["x-penstock-certificate"] == f"sha256:{read(text.encode()).digest}"
    texts += [streamed(url, path, model) for path in ENDPOINTS if path != "/generate"]
    return [*texts, in_background(url, model)]


@pytest.mark.parametrize(("model", "of", "lora"), [("one", "one", ""), ("two", "two", ""), ("poet", "two", "poet")])
def test_each_models_certificates_are_confirmed_with_it_alone(url, folder, tmp_path, model, of, lora):
    texts = certificates(url, model)
    assert all(bool(read(text.encode()).request.adapter) == bool(lora) for text in texts)
    (tmp_path / "made.jsonl").write_text("\n".join(texts))
    adapters = [f"--lora=renamed={folder}/{lora}"] if lora else []
    made = ("--certificate", str(tmp_path / "made.jsonl"))
    done = penstock("verify", str(folder / of), *SIZES, *adapters, *made)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == f"{len(texts)} of {len(texts)} certified answers confirmed, 0 refuted, 0 undecided"
    )
    other = "two" if of == "one" else "one"
    done = penstock("verify", str(folder / other), *SIZES, *made)
    assert done.returncode == 2
    assert "is of another model" in done.stderr
    if lora:
        done = penstock("verify", str(folder / of), *SIZES, *made)
        assert done.returncode == 1
        assert "which is not loaded here (--lora)" in done.stdout


def test_two_models_of_one_port_do_not_share_answers(url):
    body = {"prompt": "the same", "temperature": 0, "max_tokens": 5}
    answers = [
        httpx.post(f"{url}/v1/completions", json=body | {"model": model}, timeout=PATIENCE)
        for model in ("one", "two", "poet", "one", "two", "poet")
    ]
    assert [each.headers["x-penstock-answer-cache"] for each in answers] == ["miss"] * 3 + ["hit"] * 3
