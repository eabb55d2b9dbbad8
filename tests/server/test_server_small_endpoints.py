"""The endpoints that generate nothing: what they answer, and what they refuse."""

from __future__ import annotations

import threading
from dataclasses import replace

import httpx
import pytest
from scripted_engine import ScriptedEngine, Wait, always, delta
from server_harness import CARD, running
from sse_reader import read_events

from penstock.server.http.access import Access
from penstock.version import __version__

HI = [{"role": "user", "content": "Hi"}]


def test_a_text_is_tokenised_and_its_ids_give_the_text_back(served):
    answer = served.http.post("/tokenize", json={"prompt": "Hi!", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [40, 73, 1], "token_strs": ["H", "i", "!"]}
    assert served.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Hi!"}


def test_a_conversation_is_tokenised_as_its_template_writes_it(served):
    rendered = served.http.post("/apply-template", json={"messages": HI}).json()
    assert rendered == {"prompt": "user>Hi;"}
    tokens = served.http.post("/tokenize", json={"messages": HI}).json()
    assert tokens["count"] == len("user>Hi;")
    assert tokens["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": HI, "tools": [1]}, "tools.0"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [1, 100]}, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/abort_requests", {"request_ids": []}, "request_ids"),
        ("/abort_requests", {"request_ids": [1]}, "request_ids"),
        ("/abort_requests", {"request_ids": ["x"] * 257}, "request_ids"),
    ],
)
def test_what_is_wrong_is_named(served, path, body, param):
    answer = served.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_version_is_the_packages(served):
    assert served.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_a_gateway_learns_what_is_served(served, path):
    assert served.http.get(path).json() == {
        "model_path": "acme/tiny-1",
        "tokenizer_path": "acme/tiny-1",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": None,
        "architectures": None,
    }


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_a_gateway_learns_how_much_fits(served, path):
    measured = served.engine.measurements()
    assert served.http.get(path).json() == {
        "model_path": "acme/tiny-1",
        "served_model_name": "acme/tiny-1",
        "version": __version__,
        "is_embedding": False,
        "context_length": 64,
        "max_total_tokens": measured.total_blocks * measured.block_size,
        "max_running_requests": served.engine.health().slots,
        "page_size": measured.block_size,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "weight_version": "default",
    }


def test_a_gateway_learns_of_a_model_that_only_embeds_and_of_its_defaults():
    card = replace(CARD, generates=False, sampling_defaults=(("temperature", 0.6),))
    with running(ScriptedEngine(), card=card) as url:
        told = httpx.get(f"{url}/model_info").json()
        assert (told["is_generation"], told["preferred_sampling_params"]) == (False, {"temperature": 0.6})
        assert httpx.get(f"{url}/server_info").json()["is_embedding"] is True


def test_an_answer_is_aborted_by_the_id_it_carries(served):
    served.engine.script = always(delta("x"), Wait())
    aborted = {}

    def abort() -> None:
        served.engine.wait_until(lambda: len(served.engine.live) == 2)
        stem = served.request.id.rpartition("-")[0]
        ids = [stem, "cmpl-unknown"]
        aborted.update(httpx.post(served.url + "/abort_requests", json={"request_ids": ids}).json())

    aborting = threading.Thread(target=abort)
    aborting.start()
    with served.http.stream("POST", "/v1/completions", json={"prompt": ["a", "b"], "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        aborting.join(5)
    assert len(aborted["aborted"]) == 1
    assert {f"{aborted['aborted'][0]}-{index}" for index in (0, 1)} <= set(served.engine.left)


def test_the_prefix_cache_is_reset(served):
    assert served.http.post("/reset_prefix_cache").json() == {"reset": True}
    assert served.engine.resets == 1


def test_a_profile_is_started_and_stopped_and_names_its_files(served):
    whatever = {"model": "m", "prompt": "as vLLM's load generator sends it", "num_steps": 3}
    assert served.http.post("/start_profile", json=whatever).json() == {"profiling": True, "files": []}
    again = served.http.post("/start_profile")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "profile_running")
    stopped = served.http.post("/stop_profile")
    assert stopped.json() == {"profiling": False, "files": ["p-steps.json", "p-torch.json"]}
    again = served.http.post("/stop_profile")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "profile_not_running")
    assert served.http.get("/start_profile").status_code == 405


def test_a_request_whose_time_is_up_ends_with_an_error(served):
    with running(served.engine, access=Access(request_seconds=0.1)) as url:
        served.engine.script = always(Wait())
        whole = httpx.post(url + "/v1/completions", json={"prompt": "a"})
        served.engine.script = always(delta("x"), Wait())
        stream = httpx.post(url + "/v1/completions", json={"prompt": "a", "stream": True})
        served.engine.wait_until(lambda: not served.engine.live)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
    assert whole.headers["x-should-retry"] == "false"
    assert "request_timeout" in stream.text
    assert read_events(stream.content)[-1].data == "[DONE]"
    assert len(served.engine.left) == 2
