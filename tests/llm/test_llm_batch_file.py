"""Batch files: one answer a line, the same as over HTTP; resumed, bounded, and never written over another file."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, always, delta, failed, finished, length, stop
from starlette.datastructures import Headers

from penstock.contract.errors import ConfigError, EngineDead, Overloaded
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.llm.batch_file import BatchCounts, BatchFiles, count_lines, run_lines
from penstock.server import create_app
from penstock.server.http.in_process import Answer, post

CARD = ModelCard(name="acme/tiny-1", created=1_700_000_000, max_model_len=64, vocab_size=100, has_chat_template=True)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def line(custom_id: str, body: dict[str, Any] | None = None, url: str = "/v1/chat/completions", **more: Any) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": url, "body": CHAT if body is None else body} | more
    )


class Desk:
    """A folder with a batch file, and a scripted engine behind the real application."""

    def __init__(self, folder: Path) -> None:
        self.engine = ScriptedEngine()
        self.app = create_app(self.engine, CARD, RequestLimits())
        self.files = BatchFiles(folder / "in.jsonl", folder / "out.jsonl", folder / "errors.jsonl")
        self.ticks = 0

    def run(self, *lines: str, ask=None, most_in_flight: int = 4) -> BatchCounts:
        self.files.source.write_text("".join(each + "\n" for each in lines), encoding="utf-8")
        return asyncio.run(run_lines(self.files, ask or partial(post, self.app), most_in_flight, self._tick))

    def _tick(self) -> None:
        self.ticks += 1

    def results(self) -> dict[str, dict[str, Any]]:
        return {record["custom_id"]: record for record in read(self.files.results)}

    def errors(self) -> list[dict[str, Any]]:
        return read(self.files.errors)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_both_endpoints_answer_as_over_http(desk):
    completion = line("b", {"prompt": ["x", "y"], "n": 2, "max_tokens": 3, "timings": True}, "/v1/completions")
    desk.engine.script = lambda ask: (
        *(delta("Hel", choice) for choice in range(ask.n)),
        *(length(choice) for choice in range(ask.n)),
        finished(prompt=5, completion=2 * ask.n, cached=1),
    )
    assert desk.run(line("a"), completion) == BatchCounts(answered=2)
    chat, text = desk.results()["a"], desk.results()["b"]
    assert chat["id"].startswith("batch_req_")
    assert chat["error"] is None
    assert chat["response"]["status_code"] == 200
    assert chat["response"]["request_id"].startswith("req-")
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "Hel"
    assert [choice["index"] for choice in text["response"]["body"]["choices"]] == [0, 1, 2, 3]
    assert text["response"]["body"]["usage"]["completion_tokens"] == 8
    assert text["response"]["body"]["timings"]["cache_n"] == 2
    assert desk.errors() == []


def test_embeddings_and_responses_answer_as_over_http(desk):
    response = line("r", {"input": "Hi"}, "/v1/responses")
    embeddings = line("e", {"input": ["x", "y"], "encoding_format": "base64"}, "/v1/embeddings")
    assert desk.run(response, embeddings) == BatchCounts(answered=2)
    bodies = {name: record["response"]["body"] for name, record in desk.results().items()}
    assert bodies["r"]["output"][0]["content"][0]["text"] == "Hello"
    vectors = [base64.b64decode(item["embedding"]) for item in bodies["e"]["data"]]
    assert vectors == [struct.pack("<2f", 0.6, -0.8)] * 2
    assert bodies["e"]["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


def test_a_field_is_refused_exactly_as_over_http(desk):
    counts = desk.run(line("a", CHAT | {"temperature": 9}), line("b", CHAT | {"nonsense": 1}), line("c", {}))
    assert counts == BatchCounts(failed=3)
    told = {record["custom_id"]: record["response"] for record in desk.errors()}
    assert {response["status_code"] for response in told.values()} == {400}
    params = {key: response["body"]["error"]["param"] for key, response in told.items()}
    assert params == {"a": "temperature", "b": "nonsense", "c": "messages"}


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        ("{not json", "invalid_json", None),
        ("[1]", "invalid_json", None),
        ('{"custom_id": "x", "custom_id": "y"}', "duplicate_key", "custom_id"),
        (line("x", extra=1), "unknown_parameter", "extra"),
        (json.dumps({"method": "POST", "url": "/v1/completions", "body": {}}), "missing_value", "custom_id"),
        (line(""), "invalid_value", "custom_id"),
        (line("x" * 513), "invalid_value", "custom_id"),
        (line("x", method="GET"), "invalid_value", "method"),
        (line("x", url="/v1/models"), "invalid_url", "url"),
        (line("x", url="/health"), "invalid_url", "url"),
        (json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions"}), "missing_value", "body"),
        (line("x", body=[]), "invalid_type", "body"),
        (line("x", CHAT | {"stream": True}), "unsupported_parameter", "body.stream"),
        (line("x", {"background": True}, url="/v1/responses"), "unsupported_parameter", "body.background"),
        (line("first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_line_that_is_no_request_has_its_error_and_harms_no_other(desk, bad, code, param):
    assert desk.run(line("first"), bad, line("last")) == BatchCounts(answered=2, failed=1)
    assert set(desk.results()) == {"first", "last"}
    (record,) = desk.errors()
    assert record["response"] is None
    assert (record["error"]["code"], record["error"]["param"], record["error"]["line"]) == (code, param, 2)
    assert desk.ticks == 3


def test_a_failure_of_ours_is_a_500_of_that_line_alone(desk):
    desk.engine.script = lambda ask: (failed(),) if "bad" in str(ask.prompt) else (delta("x"), stop(), finished())
    bad = {"messages": [{"role": "user", "content": "bad"}]}
    assert desk.run(line("a"), line("b", bad), line("c")) == BatchCounts(answered=2, failed=1)
    (record,) = desk.errors()
    assert (record["custom_id"], record["response"]["status_code"]) == ("b", 500)


def test_what_is_answered_is_not_asked_again(desk):
    lines = [line("a"), "{broken", line("b", CHAT | {"temperature": 9}), line("c")]
    assert desk.run(*lines) == BatchCounts(answered=2, failed=2)
    asked = len(desk.engine.requests)
    before = desk.files.results.read_bytes(), desk.files.errors.read_bytes()
    assert desk.run(*lines) == BatchCounts(skipped=4)
    assert len(desk.engine.requests) == asked
    assert (desk.files.results.read_bytes(), desk.files.errors.read_bytes()) == before
    assert desk.run(*lines, line("d")) == BatchCounts(answered=1, skipped=4)
    assert desk.ticks == 4 + 4 + 5


def test_failed_lines_are_asked_again_once_the_errors_are_gone(desk):
    desk.engine.script = always(failed())
    desk.run(line("a"))
    desk.engine.reset()
    desk.files.errors.unlink()
    assert desk.run(line("a")) == BatchCounts(answered=1)


def test_an_answer_that_was_cut_off_is_asked_for_again(desk):
    desk.run(line("a"), line("b"))
    content = desk.files.results.read_bytes()
    desk.files.results.write_bytes(content[:-20])
    assert desk.run(line("a"), line("b")) == BatchCounts(answered=1, skipped=1)
    assert set(desk.results()) == {"a", "b"}
    assert len(read(desk.files.results)) == 2


@pytest.mark.parametrize(
    "foreign", ["a letter to a friend", "a letter\n", '{"id": 1}\n', "[]\n", '{"custom_id": null}']
)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(desk, foreign):
    desk.files.results.write_text(foreign, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"out\.jsonl:1"):
        desk.run(line("a"))
    assert desk.files.results.read_text(encoding="utf-8") == foreign


def test_the_input_is_never_the_output(tmp_path):
    with pytest.raises(ConfigError, match="--output"):
        BatchFiles(tmp_path / "a", tmp_path / "." / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="--errors"):
        BatchFiles(tmp_path / "a", tmp_path / "b", tmp_path / "a")


def test_errors_may_share_the_file_of_the_results(desk):
    desk.files = BatchFiles(desk.files.source, desk.files.results, desk.files.results)
    assert desk.run(line("a"), line("b", {})) == BatchCounts(answered=1, failed=1)
    assert set(desk.results()) == {"a", "b"}
    assert desk.run(line("a"), line("b", {})) == BatchCounts(skipped=2)


class Counting:
    """Answers everything, and counts how many requests were in flight at once."""

    def __init__(self, **trouble: Any) -> None:
        self.now = self.most = self.calls = 0
        self.trouble = trouble

    async def __call__(self, path: str, body: bytes) -> Answer:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return Answer(200, Headers({"x-request-id": "req-1"}), b"{}")


@pytest.mark.parametrize("most", [1, 3, 50])
def test_never_more_than_so_many_are_under_way(desk, most):
    ask = Counting()
    assert desk.run(*(line(str(n)) for n in range(20)), ask=ask, most_in_flight=most) == BatchCounts(answered=20)
    assert ask.most == min(most, 20)


def test_lines_are_read_only_as_they_are_needed(desk, monkeypatch):
    from penstock.llm import batch_file

    ahead = Counter()
    numbered = batch_file._numbered

    def counted(path):
        for each in numbered(path):
            ahead["read"] += path == desk.files.source
            yield each

    monkeypatch.setattr(batch_file, "_numbered", counted)
    most = 0

    async def ask(path: str, body: bytes) -> Answer:
        nonlocal most
        most = max(most, ahead["read"] - desk.ticks)
        await asyncio.sleep(0)
        return Answer(200, Headers({}), b"{}")

    desk.run(*(line(str(n)) for n in range(40)), ask=ask, most_in_flight=4)
    assert most <= 5  # those in flight, and one in hand


def test_a_full_queue_is_waited_for(desk):
    times = Counter()

    async def ask(path: str, body: bytes) -> Answer:
        times[body] += 1
        await asyncio.sleep(0.01 if b'"n":0' in body else 0)
        if times[body] < 3 and b'"n":1' in body:
            return Answer(429, Headers({"retry-after": "0"}), b"{}")
        return Answer(200, Headers({}), b"{}")

    counts = desk.run(line("a", {"n": 0}), line("b", {"n": 1}), ask=ask)
    assert counts == BatchCounts(answered=2)


def test_who_never_fits_the_queue_is_not_asked_for_ever(desk):
    desk.engine.script = always(Overloaded("The queue takes 1.", retry_after=1))
    assert desk.run(line("a"), line("b")) == BatchCounts(failed=2)
    assert {record["response"]["status_code"] for record in desk.errors()} == {429}


def test_a_dead_engine_ends_the_run_and_leaves_the_rest_to_be_run_again(desk):
    desk.engine.script = lambda ask: (
        (EngineDead("out of memory"),) if "bad" in str(ask.prompt) else (delta("x"), stop(), finished())
    )
    bad = {"messages": [{"role": "user", "content": "bad"}]}
    lines = [line("a"), line("b", bad), line("c")]
    with pytest.raises(EngineDead, match="out of memory"):
        desk.run(*lines, most_in_flight=1)
    desk.engine.script = always(delta("x"), stop(), finished())
    assert desk.run(*lines) == BatchCounts(answered=2, skipped=1)


def test_blank_lines_are_no_lines_and_numbers_stay_those_of_the_file(desk):
    counts = desk.run(line("a"), "", "   ", "{broken", line("b"))
    assert counts == BatchCounts(answered=2, failed=1)
    assert desk.errors()[0]["error"]["line"] == 4
    assert count_lines(desk.files.source) == 3


def test_a_line_beyond_all_bounds_is_refused_without_being_kept(desk, monkeypatch):
    from penstock.llm import batch_file

    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 300)
    huge = line("huge", {"messages": [{"role": "user", "content": "x" * 5000}]})
    assert desk.run(line("a"), huge, line("b")) == BatchCounts(answered=2, failed=1)
    assert desk.errors()[0]["error"]["line"] == 2


def test_a_body_too_large_for_the_server_is_a_413_here_too(desk):
    desk.app = create_app(desk.engine, CARD, RequestLimits(max_body_bytes=500))
    desk.run(line("a", {"messages": [{"role": "user", "content": "x" * 1000}]}))
    assert desk.errors()[0]["response"]["status_code"] == 413


def test_a_missing_input_is_named(desk):
    with pytest.raises(ConfigError, match=r"in\.jsonl cannot be read"):
        count_lines(desk.files.source)
