"""A server that publishes what its prefix cache holds, and a router that believes it."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import zmq
from command_line import started
from kv_events_reader import Sockets, View, events_of, receive, replay, subscribe
from served import PATIENCE, listening_url, start
from tiny_checkpoints import BYTE_VOCABULARY, VARIANTS, write_byte_tokenizer, write_checkpoint

FREE = "tcp://127.0.0.1:0"
BLOCK = 16
PROMPT = [random.Random(1).randrange(3, BYTE_VOCABULARY) for _ in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("models") / "tiny"
    found.mkdir()
    write_checkpoint(found, "llama", VARIANTS["llama"][0], vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(found)
    return found


def command(folder: Path, *arguments: str) -> list[str]:
    engine = ["--threads", "1", "--max-num-seqs", "4", "--kv-store", "off", "--no-standby"]
    return ["serve", str(folder), "--port", "0", *engine, *arguments]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[str, str, str]]:
    """A server: its URL, and where it publishes and replays."""
    said: list[str] = []
    flags = ("--kv-events", FREE, "--kv-events-replay", FREE, "--kv-cache-memory", "256KiB", *arguments)
    with start(*command(folder, *flags)) as process:
        try:
            url = listening_url(process, time.monotonic(), said)
            found = re.search(r"KV events +on (tcp://\S+), again on (tcp://[\d.:]+)", "".join(said))
            assert found is not None, said
            yield url, found[1], found[2]
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0


@pytest.fixture
def context() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


def complete(url: str, prompt: list[int], key: str = "none", **fields) -> dict:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/completions", json=body | fields, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def caught_up(context, address: str) -> View:
    """What a router knows when it has heard everything: an answer comes after the events of its steps."""
    view = View()
    for number, payload in replay(context, address, 0):
        view.take(number, payload)
    assert view.lost == []
    return view


def hearing(context, address: str, url: str, topic: str = "") -> tuple[zmq.Socket, int]:
    """A subscription that has begun, since it heard the cache being emptied; and the number that comes next."""
    reader = subscribe(context, address, topic)
    until = time.monotonic() + PATIENCE
    while not reader.poll(100):
        assert time.monotonic() < until
        httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE)
    httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE)
    _, last, _ = receive(reader)
    while reader.poll(500):
        _, last, _ = receive(reader)
    return reader, last + 1


def expected_hit(view: View, prompt: list[int]) -> int:
    """Tokens of a prompt that the router believes to be cached; at least one is computed."""
    known = {view.tokens_of(block) for block in view.blocks}
    counts = range(BLOCK, len(prompt), BLOCK)
    return next((count for count in reversed(counts) if tuple(prompt[:count]) in known), 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_a_router_knows_what_a_prompt_will_find(folder, context, form):
    rng = random.Random(3)
    with serving(folder, "--kv-events-format", form, "--kv-events-topic", "kv@me@tiny") as (url, address, again):
        assert caught_up(context, again).heard == [{"type": "AllBlocksCleared"}]
        (reader, first), hits = hearing(context, address, url, "kv@"), 0
        for turn in range(30):
            prompt = PROMPT[: rng.randrange(1, 100)] + [
                rng.randrange(3, BYTE_VOCABULARY) for _ in range(rng.choice([1, 40]))
            ]
            view = caught_up(context, again)
            usage = complete(url, prompt)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == expected_hit(view, prompt), turn
            hits += cached > 0
        assert hits > 5
        view = caught_up(context, again)
        assert any(event["type"] == "BlockRemoved" for event in view.heard)
        heard = View()
        topic, number, payload = receive(reader)
        assert (topic, number) == (b"kv@me@tiny", first)
        heard.next = first
        heard.take(number, payload)
        while heard.next < view.next:
            heard.take(*receive(reader)[1:])
        assert (heard.blocks, heard.lost) == (view.blocks, [])
        published = rf'^penstock:kv_event_batches_total{{.*outcome="published"}} {view.next}\.0$'
        assert re.search(published, httpx.get(f"{url}/metrics").text, re.MULTILINE)
        httpx.post(f"{url}/reset_prefix_cache")
        assert caught_up(context, again).blocks == {}


def test_answers_are_told_too_and_salts_are_apart(folder, context):
    with serving(folder) as (url, _, again):
        complete(url, PROMPT[:30], max_tokens=40)
        view = caught_up(context, again)
        longest = max(map(view.tokens_of, view.blocks), key=len)
        assert longest[:30] == tuple(PROMPT[:30])
        assert len(longest) == (30 + 40 - 1) // BLOCK * BLOCK, "of the answer too, but for its last token"
        assert not view.salts
        complete(url, PROMPT[:30], max_tokens=1, cache_salt="tenant")
        salted = caught_up(context, again)
        (first,) = salted.salts
        assert salted.salts[first] == ["tenant"]
        assert salted.tokens_of(first) == tuple(PROMPT[:BLOCK])
        assert salted.blocks.keys() - view.blocks.keys() == {first}


def test_behind_keys_a_router_finds_what_a_gateway_asked_for_and_no_more(folder, context, monkeypatch):
    gateway, other = "the-key-of-a-gateway", "the-key-of-another"
    monkeypatch.setenv("PENSTOCK_GATEWAY_KEY", gateway)
    monkeypatch.setenv("PENSTOCK_API_KEY", other)
    with serving(folder) as (url, _, again):
        complete(url, PROMPT[:20], gateway)
        complete(url, PROMPT[:20], gateway, cache_salt="tenant")
        view = caught_up(context, again)
        assert [view.salts.get(block) for block in view.blocks] == [None, ["tenant"]]
        complete(url, PROMPT[:20], other)
        ((salt,),) = [each for each in caught_up(context, again).salts.values() if each != ["tenant"]]
        assert re.fullmatch("[0-9a-f]{64}", salt)


def test_an_address_in_use_is_told_before_the_model_is_loaded(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        said = started(*command(folder, "--kv-events", address))
    assert said.returncode == 2
    assert f"cannot listen on {address}" in said.stderr
    assert "weights" not in said.stdout


def test_of_several_models_one_that_leaves_says_so_and_begins_anew(folder, context, tmp_path):
    address, again = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    models = tmp_path / "models.yaml"
    models.write_text(f"models:\n  - model: {folder}\n    kv-events: {address}\n    kv-events-replay: {again}\n")
    arguments = ("--models-file", str(models), "--kv-cache-memory", "256KiB", "--unload-after", "999")
    with start(*[part for part in command(folder, *arguments) if part != str(folder)]) as process:
        try:
            url = listening_url(process, time.monotonic())
            complete(url, PROMPT[:40])
            assert len(caught_up(context, again).blocks) == 2
            reader, first = hearing(context, address, url)
            assert httpx.post(f"{url}/models/unload", json={"model": "tiny"}, timeout=PATIENCE).status_code == 200
            _, number, payload = receive(reader)
            assert (number, events_of(payload)) == (first, [{"type": "AllBlocksCleared"}])
            complete(url, PROMPT[:40])
            view = caught_up(context, again)
            assert (view.next, len(view.blocks)) == (2, 2)
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0
