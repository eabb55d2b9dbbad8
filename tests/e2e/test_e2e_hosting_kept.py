"""What a server of several models keeps in files for each: streams and stored answers, and profiles."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest
from hosted import FAMILIES, serving, states, write_models
from openai import OpenAI
from resuming import COMPLETIONS, blocks, id_of, resume, told
from served import PATIENCE

from needs import COMPILED
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

BODY = {"prompt": "ab", "max_tokens": 40, "ignore_eos": True, "temperature": 1.5, "stream": True, "logprobs": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.deep  # test_e2e_kept_answers does the same with one model
def test_streams_and_stored_answers_of_every_model_survive_the_server(folders, tmp_path):
    models = [str(folders[name]) for name in FAMILIES]
    journal = ("--journal", str(tmp_path / "journal"))
    streams: dict[str, bytes] = {}
    with serving(*models, *journal, end=signal.SIGKILL) as (url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
        for name in ("second", "third"):
            with httpx.stream("POST", url + COMPLETIONS, json={"model": name, **BODY}, timeout=PATIENCE) as answer:
                streams[name] = answer.read()
        stored = {
            name: client.responses.create(model=name, input="ab", max_output_tokens=16) for name in ("first", "third")
        }
    with serving(*models, *journal) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        assert set(states(url).values()) == {"unloaded"}
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
        found = client.responses.retrieve(stored["third"].id)
        assert (found.model, found.output_text) == ("third", stored["third"].output_text)
        assert states(url) == {"first": "unloaded", "second": "unloaded", "third": "loaded"}, "whose answer it is"
        then = client.responses.create(
            model="first", previous_response_id=stored["first"].id, input="and", max_output_tokens=16
        )
        assert client.responses.retrieve(then.id).previous_response_id == stored["first"].id
        for name, wire in streams.items():
            first, *_ = blocks(wire)
            rest = resume(http, COMPLETIONS, {"model": name, **BODY}, id_of(first))
            assert rest.status_code == 200
            assert told(COMPLETIONS, first + rest.content) == told(COMPLETIONS, wire)
        assert http.get("/v1/responses/resp_none").status_code == 404
        client.responses.delete(stored["third"].id)
    with serving(*models, *journal) as (url, _):
        gone = httpx.get(f"{url}/v1/responses/{stored['third'].id}", timeout=PATIENCE)
        assert gone.status_code == 404
        assert states(url)["third"] == "unloaded", "nothing is loaded for what nobody has"


def test_two_servers_do_not_share_a_journal(folders, tmp_path):
    models = [str(folders[name]) for name in ("first", "second")]
    journal = ("--journal", str(tmp_path))
    refused = pytest.raises(AssertionError, match="in use by another server")
    with serving(*models, *journal), refused, serving(*models, *journal):
        pass


@pytest.mark.deep
def test_each_model_is_profiled_for_itself(folders, tmp_path):
    models = [str(folders[name]) for name in ("first", "second")]
    with serving(*models, "--profile-dir", str(tmp_path)) as (url, _):
        for name in ("first", "second"):
            httpx.post(f"{url}/start_profile?model={name}", timeout=PATIENCE).raise_for_status()
        for name in ("first", "second"):
            body = {"model": name, "prompt": [5, 9], "max_tokens": 3, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        for name in ("first", "second"):
            stopped = httpx.post(f"{url}/stop_profile?model={name}", timeout=PATIENCE)
            assert stopped.status_code == 200, stopped.text
            files = stopped.json()["files"]
            assert all(each.startswith(f"{name}-profile-") for each in files)
            for each in files:
                assert json.loads((tmp_path / each).read_text())
