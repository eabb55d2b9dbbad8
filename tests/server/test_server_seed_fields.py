"""Requests as RoseInfer's and AstrAI's users write them."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from scripted_engine import ScriptedEngine, nothing_measured
from server_harness import CARD, running
from test_server_model_defaults import BODIES

from penstock.server.http.access import Access

ROSEINFER = {
    "prompt": "Hello",
    "max_new_tokens": 64,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "stop_on_eos": True,
    "do_sample": False,
    "stream": False,
}


def test_roseinfers_body_is_greedy_and_stops_at_the_end(served):
    answer = served.http.post("/generate", json=ROSEINFER)
    assert answer.status_code == 200
    assert answer.json()["text"]
    request = served.request
    assert request.sampling.entries == (("temperature", 0.0),)
    assert (request.stop.max_tokens, request.stop.ignore_eos) == (64, False)


def test_with_echo_the_text_is_prompt_and_completion_as_roseinfers(served):
    alone = served.http.post("/generate", json=ROSEINFER).json()["text"]
    assert not served.request.echo
    served.http.post("/generate", json=ROSEINFER | {"echo": True})
    assert served.request.echo
    assert alone


def test_its_stream_is_plain_text(served):
    answer = served.http.post("/generate", json=ROSEINFER | {"stream": True})
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == served.http.post("/generate", json=ROSEINFER).json()["text"]


def test_not_to_stop_on_eos_is_to_ignore_it(served):
    served.generate(stop_on_eos=False)
    assert served.request.stop.ignore_eos
    served.generate(stop_on_eos=False, ignore_eos=True)
    assert served.request.stop.ignore_eos
    refused = served.generate(stop_on_eos=True, ignore_eos=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_on_eos")


@pytest.mark.parametrize("compat", [False, True])
def test_do_sample_false_is_greedy_everywhere_whatever_the_temperature(compat):
    engine = ScriptedEngine()
    with running(engine, access=Access(compat=compat)) as url, httpx.Client(base_url=url, timeout=10) as http:
        for path, body in BODIES.items():
            for more in ({}, {"temperature": 0.8, "top_p": 0.9}):
                answer = http.post(path, json=body | more | {"do_sample": False})
                assert answer.status_code == 200, answer.text
                assert engine.requests[-1].sampling.entries == (("temperature", 0.0),), path
                assert "x-ignored-params" not in answer.headers


@pytest.mark.parametrize("path", BODIES)
def test_do_sample_true_draws_at_the_temperature_that_is_given(served, path):
    assert served.http.post(path, json=BODIES[path] | {"do_sample": True, "temperature": 0.5}).status_code == 200
    assert served.request.sampling.entries == (("temperature", 0.5),)
    refused = served.http.post(path, json=BODIES[path] | {"do_sample": "yes"})
    assert refused.status_code == 400


def test_do_sample_true_draws_where_the_model_would_not():
    engine = ScriptedEngine()
    card = replace(CARD, sampling_defaults=(("temperature", 0.0), ("top_k", 5)))
    with running(engine, card=card) as url, httpx.Client(base_url=url, timeout=10) as http:
        http.post("/generate", json={"prompt": "Hi", "do_sample": True})
        assert engine.requests[-1].sampling.entries == (("top_k", 5),)
        http.post("/generate", json={"prompt": "Hi", "do_sample": True, "temperature": 0})
        assert engine.requests[-1].sampling.entries == (("temperature", 0.0),)
        http.post("/generate", json={"prompt": "Hi"})
        assert engine.requests[-1].sampling.entries == (("temperature", 0.0),)


def test_stats_in_astrais_names(served, monkeypatch):
    measured = replace(nothing_measured(), finished=(("stop", 4), ("length", 1)))
    monkeypatch.setattr(served.engine, "measurements", lambda: measured)
    monkeypatch.setattr(served.engine, "state", replace(served.engine.state, running=2, waiting=3, generated_tokens=70))
    stats = {"total_tasks": 10, "total_tokens": 70, "active_tasks": 2, "waiting_queue": 3}
    assert served.http.get("/stats").json() == stats


def test_health_says_what_astrais_does(served):
    health = served.http.get("/health").json()
    assert (health["status"], health["model_loaded"], health["engine_ready"]) == ("ok", True, True)
