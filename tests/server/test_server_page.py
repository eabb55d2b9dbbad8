"""The page's files and endpoints, without a browser: what is served, how, and what the files may not hold."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from scripted_engine import HEALTHY, ScriptedEngine
from server_harness import start

from penstock.sampling import PARAMETERS
from penstock.server.openai.chat import CHAT_FIELDS
from penstock.server.page import engine_events, files

FOLDER = Path(files.__file__).with_name("static")
SCRIPTS = sorted(FOLDER.glob("*.js"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}


# ---- files


def test_the_page_is_served_at_the_root_with_a_policy_that_allows_this_server_only(served):
    answer = served.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", TEXTS)
def test_every_file_is_served_as_it_lies_in_the_package_and_safely(served, name):
    answer = served.http.get(f"/page/{name}")
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"].startswith(("text/html", "text/javascript", "text/css", "image/svg+xml"))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" in answer.headers


def test_a_file_that_the_browser_has_is_not_sent_again(served):
    first = served.http.get("/page/app.js")
    etag = first.headers["etag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        again = served.http.get("/page/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert served.http.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert first.headers["cache-control"] == "no-cache"


def test_a_head_request_gets_the_headers_alone(served):
    whole, head = served.http.get("/"), served.http.head("/")
    assert head.content == b""
    assert head.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/..%2Fchat.py", "/page/../chat.py", "/page/a/b.js"])
def test_nothing_but_the_files_of_the_page_can_be_had(served, path):
    answer = served.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def test_the_page_can_be_told_from_the_api_by_its_path():
    assert all(map(files.is_page_path, ("/", "/page/app.js")))
    assert not any(map(files.is_page_path, ("/engine/events", "/v1/models", "/pages", "//", "")))


def test_the_document_holds_no_inline_script_style_or_handler():
    html = TEXTS["index.html"]
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    assert re.findall(r"<script[^>]*></script>", html) == re.findall(r"<script[^>]*>.*?</script>", html, re.DOTALL)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html)


def test_everything_that_the_document_and_the_scripts_name_is_there_and_nothing_is_fetched_from_elsewhere(served):
    html = TEXTS["index.html"]
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', html))
    assert {"page/app.js", "page/style.css", "page/theme.js", "page/icon.svg"} <= named
    for name in named:
        assert served.http.get(f"/{name}").status_code == 200, name
    for script in SCRIPTS:
        for module in re.findall(r'^import .*? from "(.*?)";', TEXTS[script.name], re.MULTILINE):
            assert module.removeprefix("./") in TEXTS, f"{script.name} imports {module}"
    foreign = re.compile(r"(?<!http://www\.w3\.org)(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)
    for name, text in TEXTS.items():
        assert not foreign.findall(text.replace("http://www.w3.org/2000/svg", "")), name
    assert "@import" not in TEXTS["style.css"]
    assert "url(" not in TEXTS["style.css"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_turns_text_into_markup_or_code(script):
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|setHTML"
    assert not re.search(sinks, TEXTS[script.name])


def test_every_element_that_a_script_asks_for_by_id_is_in_the_document():
    ids = set(re.findall(r'\bid="([^"]+)"', TEXTS["index.html"]))
    for script in SCRIPTS:
        asked = set(re.findall(r'(?:\$|getElementById)\("([^"]+)"\)', TEXTS[script.name]))
        assert asked <= ids, script.name
    drawn = re.findall(r'href="#(icon-[a-z]+)"', TEXTS["index.html"])
    assert set(drawn) <= ids


def test_every_control_of_the_document_has_a_name():
    html = TEXTS["index.html"]
    labelled = set(re.findall(r'<label[^>]*for="([^"]+)"', html))
    for tag in re.findall(r"<(?:input|textarea|select)[^>]*>", html):
        assert re.search(r'id="([^"]+)"', tag)[1] in labelled, tag
    for opening, inner in re.findall(r"(<button[^>]*>)(.*?)</button>", html, re.DOTALL):
        assert "aria-label=" in opening or re.sub(r"<svg.*?</svg>", "", inner).strip(), opening


# ---- the sampling parameters


def test_the_controls_are_the_parameters_each_with_type_range_default_and_meaning(served):
    data = {each["name"]: each for each in served.http.get("/engine/sampling").json()["data"]}
    assert list(data) == [parameter.name for parameter in PARAMETERS]
    assert data["temperature"] == {
        "name": "temperature",
        "schema": {"type": "number", "minimum": 0.0, "maximum": 2.0},
        "nullable": False,
        "default": 1.0,
        "random_only": False,
        "chat": True,
        "doc": next(each.doc for each in PARAMETERS if each.name == "temperature"),
    }
    assert data["max_tokens"]["default"] is None
    assert data["top_p"]["random_only"]
    assert not data["logprobs"]["chat"], "the chat endpoint spells it as a boolean"
    names = {field.name for field in CHAT_FIELDS}
    assert {name for name, each in data.items() if each["chat"]} <= names


def test_to_send_every_default_that_the_controls_show_is_to_send_nothing(served):
    data = served.http.get("/engine/sampling").json()["data"]
    assert served.chat().status_code == 200
    plain = served.request
    defaults = {each["name"]: each["default"] for each in data if each["chat"]}
    assert served.chat(**defaults).status_code == 200
    assert (served.request.sampling, served.request.stop, served.request.n) == (plain.sampling, plain.stop, plain.n)


# ---- the engine's events


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(engine_events, "PERIOD_SECONDS", 0.02)


def events_of(response: httpx.Response, count: int) -> list[dict]:
    taken: list[dict] = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            taken.append(json.loads(line.removeprefix("data: ")))
        if len(taken) == count:
            return taken
    return taken


def test_an_event_is_the_health_of_that_moment(served, quick):
    with served.http.stream("GET", "/engine/events") as response:
        assert response.headers["content-type"] == "text/event-stream"
        first, second = events_of(response, 2)
    for name in engine_events.FIELDS:
        assert first[name] == getattr(HEALTHY, name)
    assert second["at"] > first["at"]


def test_a_dead_engine_is_told_too(served, quick):
    served.engine.state = replace(HEALTHY, alive=False, reason="out of memory", running=0, waiting=0, free_blocks=0)
    with served.http.stream("GET", "/engine/events") as response:
        (event,) = events_of(response, 1)
    assert (event["alive"], event["reason"]) == (False, "out of memory")


def test_events_come_at_their_rate_and_not_faster(served, monkeypatch):
    monkeypatch.setattr(engine_events, "PERIOD_SECONDS", 0.1)
    with served.http.stream("GET", "/engine/events") as response:
        events = events_of(response, 4)
    assert events[-1]["at"] - events[0]["at"] >= 0.28


def test_a_stream_ends_after_its_time(served, quick, monkeypatch):
    monkeypatch.setattr(engine_events, "LONGEST_SECONDS", 0.1)
    with served.http.stream("GET", "/engine/events") as response:
        assert 1 <= len(events_of(response, 1000)) < 20


def seat(url: str) -> contextlib.AbstractContextManager[httpx.Response]:
    """A stream with a seat; clients that left before may hold theirs for a moment longer."""
    deadline = time.monotonic() + 3
    with contextlib.ExitStack() as stack:
        while True:
            response = stack.enter_context(httpx.stream("GET", f"{url}/engine/events"))
            if response.status_code == 200:
                return stack.pop_all()
            assert time.monotonic() < deadline, "the seat of a viewer who left was not given back"
            stack.pop_all().close()
            time.sleep(0.01)


def test_viewers_are_bounded_and_a_seat_is_free_again_when_one_leaves(served, quick, monkeypatch):
    monkeypatch.setattr(engine_events, "MAX_VIEWERS", 1)
    for _ in range(2):
        with seat(served.url), httpx.stream("GET", f"{served.url}/engine/events") as refused:
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "10"
            assert json.loads(refused.read())["error"]["code"] == "overloaded"


def test_an_open_stream_does_not_hold_up_the_servers_end():
    url, server, thread = start(ScriptedEngine(), drain_seconds=20)
    ended = threading.Event()

    def watch() -> None:
        with httpx.stream("GET", f"{url}/engine/events", timeout=30) as response:
            pieces = response.iter_raw()
            next(pieces)
            server.stop()
            for _ in pieces:  # raises if the answer is cut short
                continue
        ended.set()

    viewer = threading.Thread(target=watch)
    began = time.monotonic()
    viewer.start()
    thread.join(15)
    viewer.join(5)
    assert ended.is_set(), "the stream was cut, not ended"
    assert not thread.is_alive()
    assert time.monotonic() - began < 10
