"""Adapters over HTTP: named in place of the model, listed, loaded and unloaded by admins."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_harness import CARD, Served, running
from test_server_guard import ADMIN, ENVIRON, KEY

from penstock.contract.server_config import ServerConfig
from penstock.server import open_access

HI = [{"role": "user", "content": "Hi"}]
NAMED = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/score", {"text_1": "Hi", "text_2": "Ho"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/responses/compact", {"input": "Hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ("/generate", {"prompt": "Hi"}),
]


@pytest.fixture
def served() -> Iterator[Served]:
    engine = ScriptedEngine()
    with running(engine, card=replace(CARD, takes_adapters=True)) as url, httpx.Client(base_url=url) as http:
        yield Served(url, engine, http)


def load(served: Served, name: str = "poet", path: str = "poet") -> httpx.Response:
    return served.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def unload(served: Served, name: str = "poet") -> httpx.Response:
    return served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


@pytest.mark.parametrize(("path", "body"), NAMED)
def test_an_adapter_is_chosen_by_its_name_in_place_of_the_models(served, path, body):
    unknown = served.http.post(path, json=body | {"model": "poet"})
    assert unknown.status_code == 404
    assert load(served).json() == {"loaded": "poet", "rank": 8, "bytes": 640}
    answer = served.http.post(path, json=body | {"model": "poet"})
    assert answer.status_code == 200, answer.text
    assert served.request.adapter == "poet"
    if "model" in answer.json():
        assert answer.json()["model"] == "poet"
    for own in ({"model": "acme/tiny-1"}, {}):
        assert served.http.post(path, json=body | own).status_code == 200
        assert served.request.adapter == ""
    assert unload(served).json() == {"unloaded": "poet"}
    assert served.http.post(path, json=body | {"model": "poet"}).status_code == 404


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/apply-template"])
def test_endpoints_that_only_read_a_prompt_take_the_name_too(served, path):
    body = {"model": "poet", "messages": HI}
    assert served.http.post(path, json=body).status_code == 404
    load(served)
    assert served.http.post(path, json=body).status_code == 200


def test_adapters_are_listed_with_their_parent(served):
    load(served)
    data = served.http.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"], each["root"]) for each in data] == [
        ("acme/tiny-1", None, "acme/tiny-1"),
        ("poet", "acme/tiny-1", "poet"),
    ]
    assert served.http.get("/v1/models/poet").json() == data[1]
    assert data[1]["created"] == 1_700_000_001
    listed = served.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert [each["id"] for each in listed] == ["acme/tiny-1", "poet"]
    unload(served)
    assert len(served.http.get("/v1/models").json()["data"]) == 1
    assert served.http.get("/v1/models/poet").status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "x"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ["x"]}, "lora_path"),
        ({"lora_name": "x" * 300, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "acme/tiny-1", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "x", "lora_path": "x", "rank": 4}, "rank"),
    ],
)
def test_a_wrong_order_is_refused_by_the_name_of_its_field(served, body, field):
    answer = served.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not served.engine.loaded


def test_a_name_that_is_taken_and_one_that_is_not_there(served):
    load(served)
    again = load(served)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_loaded")
    assert unload(served, "stranger").status_code == 404


def test_only_admins_load_adapters_where_there_are_keys():
    engine, access = ScriptedEngine(), open_access(ServerConfig(), ENVIRON)
    with running(engine, card=replace(CARD, takes_adapters=True), access=access) as url:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            body = {"lora_name": "poet", "lora_path": "poet"} if "unload" not in path else {"lora_name": "poet"}
            refused = httpx.post(url + path, json=body, headers={"authorization": f"Bearer {KEY}"})
            assert refused.status_code == 403
            assert httpx.post(url + path, json=body).status_code == 401
            allowed = httpx.post(url + path, json=body, headers={"authorization": f"Bearer {ADMIN}"})
            assert allowed.status_code == 200
    assert not engine.loaded


def test_a_server_that_takes_no_adapters_never_asks_for_them(served):
    engine = ScriptedEngine()
    engine.adapters = None
    with running(engine) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code == 200


def test_the_metric_says_which_adapters_are_in_use(served):
    text = served.http.get("/metrics").text
    found = re.search(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    assert labels == {"max_lora": "4", "running_lora_adapters": "poet", "waiting_lora_adapters": "clerk,poet"}
    assert abs(float(found[2]) - time.time()) < 60
