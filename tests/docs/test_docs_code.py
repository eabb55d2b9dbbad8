"""What the documents show runs: Python blocks, curl requests with their answers, and generated pages.

A block marked `python` is run as it stands, against a server of the default command; what a comment behind `print` says
must be printed. A block marked `py` needs a package that the tests do not install: it must be Python at least, and
`make test-clients` runs it. A `curl`
in a block marked `sh` is sent; a JSON block behind it must have the shape of what comes back.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import yaml

from penstock.cli import penstock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from served import Served  # noqa: E402 (lent by another room's tests)

pytestmark = pytest.mark.model

PAGES = sorted((ROOT / "docs").glob("**/*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"

RUN_BLOCKS = """
import contextlib, io, json, sys, traceback
results = []
for name, code in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        results.append([said.getvalue(), ""])
    except BaseException:
        results.append([said.getvalue(), traceback.format_exc()])
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Block:
    page: Path
    code: str
    following: str
    """The page's text behind it."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT / 'docs')}: {self.code.strip().splitlines()[0][:60]}"


def blocks(language: str) -> list[Block]:
    texts = [(page, page.read_text(encoding="utf-8")) for page in PAGES]
    return [
        Block(page, match[2], text[match.end() :].lstrip())
        for page, text in texts
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


def curls() -> list[Block]:
    return [block for block in blocks("sh") if block.code.startswith("curl")]


def names(found: list[Block]) -> list[str]:
    return [f"{number} {block.name}" for number, block in enumerate(found)]


@pytest.fixture(scope="module")
def served(default_server) -> Served:
    return default_server


@pytest.fixture(scope="module")
def results(served) -> list[tuple[str, str]]:
    """What each Python block printed, and its error."""
    given = [(block.name, block.code.replace(ADDRESS, served.url)) for block in blocks("python")]
    done = subprocess.run(
        [sys.executable, "-c", RUN_BLOCKS],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OPENAI_API_KEY": "", "ANTHROPIC_API_KEY": ""},
    )
    assert done.returncode == 0, done.stderr
    return [(said, failure) for said, failure in json.loads(done.stdout)]


@pytest.mark.parametrize("number", range(len(blocks("python"))), ids=names(blocks("python")))
def test_a_python_block_runs_and_prints_what_it_says(results, number):
    said, failure = results[number]
    assert not failure
    assert said.strip()
    for expected in EXPECTED.findall(blocks("python")[number].code):
        if not expected.startswith("the "):  # a remark
            assert expected in said


def test_there_are_blocks_of_both_official_clients_and_of_the_library():
    code = "\n".join(block.code for block in blocks("python"))
    for line in ("from openai import", "from anthropic import", "from penstock import LLM", "import AsyncLLM"):
        assert line in code


@pytest.mark.parametrize("page", sorted({block.page for block in blocks("py") if block.page.parent.name == "recipes"}))
def test_a_recipe_of_another_client_is_python_that_names_the_served_model(page):
    code = "\n".join(block.code for block in blocks("py") if block.page == page)
    compile(code, page.name, "exec")
    assert "smollm2-135m-instruct" in code
    assert f"{ADDRESS}/v1" in code


@pytest.mark.parametrize("number", range(len(blocks("yaml"))), ids=names(blocks("yaml")))
def test_a_yaml_block_is_yaml(number):
    assert isinstance(yaml.safe_load(blocks("yaml")[number].code), dict)


def send(command: str, url: str) -> httpx.Response:
    """Send what curl would, for the options that the documents use."""
    words = iter(shlex.split(command.replace(ADDRESS, url))[1:])
    method, address, headers, body = "", "", {}, None
    for word in words:
        match word:
            case "-H":
                name, _, value = next(words).partition(":")
                headers[name] = value.strip()
            case "-d":
                body = next(words)
            case "-X":
                method = next(words)
            case "-N":
                pass
            case _:
                assert word.startswith(url), f"{word} is not understood here"
                address = word
    return httpx.request(method or ("POST" if body else "GET"), address, headers=headers, content=body, timeout=60)


EXACT = ("object", "type", "role", "code", "param", "status")
"""Keys whose text is part of the shape; all else depends on machine, time and release."""


def check_shape(shown: Any, given: Any, where: str = "") -> None:
    if isinstance(shown, dict) and not where.endswith("top_logprobs"):
        assert list(shown) == list(given), where
        for key, value in shown.items():
            check_shape(value, given[key], key)
    elif isinstance(shown, list):
        assert bool(shown) == bool(given), where
        for one, other in zip(shown, given, strict=False):
            check_shape(one, other, where)
    elif where in EXACT:
        assert shown == given, where
    else:
        assert type(shown) is type(given), where


@pytest.mark.parametrize("number", range(len(curls())), ids=names(curls()))
def test_a_curl_request_gets_an_answer_of_the_shape_shown(served, number):
    block = curls()[number]
    answer = send(block.code, served.url)
    shown = FENCE.match(block.following)
    if shown is None or shown[1] != "json":
        assert answer.status_code == 200
        if shown is not None and shown[1] == "text":
            check_events(shown[2], answer.text)
        return
    expected = json.loads(shown[2])
    assert answer.status_code == (400 if expected.get("error") else 200)
    check_shape(expected, answer.json())


def check_events(shown: str, given: str) -> None:
    """Compare the opening, a piece and the closing; how many pieces there are depends on how quickly they are read."""
    one, other = ([line for line in text.split("\n") if line.startswith("data: ")] for text in (shown, given))
    assert one[-1] == other[-1] == "data: [DONE]"
    positions = [re.findall(r"^id: chatcmpl-[0-9a-f]{32}:(.*)$", text, re.MULTILINE) for text in (shown, given)]
    assert [positions[0][at] for at in (0, -3, -2, -1)] == [positions[1][at] for at in (0, -3, -2, -1)]
    for place in (0, 1, -3, -2):
        check_shape(json.loads(one[place].removeprefix("data: ")), json.loads(other[place].removeprefix("data: ")))


def test_a_shape_that_differs_is_found():
    check_shape({"a": [1], "id": "x"}, {"a": [2, 3], "id": "y"})
    for wrong in ({"a": 1}, {"a": "1", "b": 0}, {"b": 0, "a": 1}, {"a": 1, "b": []}):
        with pytest.raises(AssertionError):
            check_shape({"a": 1, "b": 0}, wrong)


def test_the_http_page_has_every_route(served):
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    for path, operations in httpx.get(f"{served.url}/openapi.json").json()["paths"].items():
        for method in operations:
            assert re.search(rf"{method.upper()} {re.escape(path).replace(':path', '')}[\s`]", page), (method, path)


@cache
def options_of_commands(command: click.Command) -> set[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        inner = [command.get_command(context, name) for name in command.list_commands(context)]
        return set().union(*(options_of_commands(each) for each in inner if each is not None))
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_options_that_a_page_names_exist(page):
    known = options_of_commands(penstock)
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if span.startswith(("--", "penstock "))]
    lines = re.findall(r"^ *(?:\S+=\S+ )*(penstock .*)$", text, re.MULTILINE)
    for said in [*spans, *lines]:
        assert named_options(said) <= known, said
    for script, said in re.findall(r"^ *python bench/(\w+)\.py (.*)$", text, re.MULTILINE):
        assert named_options(said) <= options_of_script(script), said


def options_of_script(name: str) -> set[str]:
    """The options of a script in `bench/`: its command's, or those that it adds to a parser of its own."""
    script = import_module(name)
    if hasattr(script, "command"):
        return options_of_commands(script.command)
    return set(re.findall(r'add_argument\(\s*"(--[a-z][\w-]*)"', inspect.getsource(script)))


def named_options(said: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said.partition("#")[0]))
