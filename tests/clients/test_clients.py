"""The recipes of other projects' clients, run as they stand in the pages, each in an environment of its own.

`make test-clients` installs the clients and runs this; elsewhere what needs them is skipped. The `py` blocks of a page
are one program. What a comment behind `print` says must be printed, once for each such print and in their order.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from environments import CLIENTS, packages_of

from needs import CLIENTS as CLIENTS_MISSING

needs_clients = pytest.mark.skipif(not os.environ.get("PENSTOCK_CLIENTS"), reason=CLIENTS_MISSING)

ENVIRONMENTS = Path(os.environ.get("PENSTOCK_CLIENTS", ""))
RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
LIMIT = 300  # seconds; on a busy machine some take 20 to import
GATEWAYS = {"smg"}
"""Programs in front of a server, which `test_gateways.py` tests."""
PYTHON_CLIENTS = [name for name, packages in CLIENTS.items() if "pip" in packages and name not in GATEWAYS]


def environment(name: str) -> Path:
    """A client's environment; skips by name where it could not be made."""
    directory = ENVIRONMENTS / name
    if not (directory / ".installed").is_file():
        failed = directory / ".failed"
        why = failed.read_text(encoding="utf-8") if failed.is_file() else "it is not in PENSTOCK_CLIENTS"
        pytest.skip(f"{name} is not installed ({why}): make test-clients tries again")
    return directory.absolute()


def settings(home: Path) -> dict[str, str]:
    """The process's environment without keys, with settings that keep clients from asking other hosts."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return kept | {
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "CONTINUE_TELEMETRY_ENABLED": "0",
        "DO_NOT_TRACK": "1",
    }


@needs_clients
@pytest.mark.model
@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_recipe_runs_as_it_stands(name, default_server, tmp_path):
    python = environment(name) / "bin" / "python"
    code = "\n\n".join(BLOCK.findall((RECIPES / f"{name}.md").read_text(encoding="utf-8")))
    (tmp_path / "recipe.py").write_text(code.replace(ADDRESS, default_server.url), encoding="utf-8")
    done = subprocess.run(
        [str(python), "recipe.py"], cwd=tmp_path, env=settings(tmp_path), capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rest = done.stdout
    assert EXPECTED.search(code)
    for expected in EXPECTED.findall(code):
        assert expected in rest, f"{expected!r} is not printed in its turn:\n{done.stdout}"
        rest = rest.partition(expected)[2]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_recipe_says_which_version_it_was_tried_with(name):
    page = (RECIPES / f"{name}.md").read_text(encoding="utf-8")
    for package in packages_of(name):
        assert package in page


@pytest.fixture
def noted(default_server) -> Iterator[tuple[str, list[tuple[str, dict]]]]:
    """The server behind a proxy that notes requests: its address, and (path, body) of each request."""
    requests: list[tuple[str, dict]] = []

    class Noting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, json.loads(body)))
            headers = {"Content-Type": self.headers["Content-Type"]}
            answer = httpx.post(default_server.url + self.path, content=body, headers=headers, timeout=LIMIT)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Noting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@needs_clients
@pytest.mark.model
def test_continue_answers_with_the_pages_configuration(noted, tmp_path):
    directory = environment("continue")
    url, requests = noted
    page = (RECIPES / "continue.md").read_text(encoding="utf-8")
    config = re.search(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert config
    (tmp_path / "config.yaml").write_text(config[1].replace(ADDRESS, url), encoding="utf-8")
    command = [directory / "node_modules" / ".bin" / "cn", "--config", "config.yaml"]
    done = subprocess.run(
        [*map(str, command), "-p", "What is the capital of France?"],
        cwd=tmp_path,
        env=settings(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Paris" in done.stdout
    path, body = requests[0]
    assert path == "/v1/chat/completions"
    assert body["stream"] is True
    assert len(body["tools"]) > 3
    assert body["temperature"] == 0


OPEN_WEBUI = json.loads(Path(__file__).with_name("open_webui_requests.json").read_text(encoding="utf-8"))


@pytest.mark.model
@pytest.mark.parametrize("sent", OPEN_WEBUI["requests"], ids=lambda sent: sent["for"])
def test_open_webuis_requests_are_answered(sent, default_server):
    headers = {"Authorization": "Bearer none"} | OPEN_WEBUI["headers"]
    answer = httpx.request(
        sent["method"], default_server.url + sent["path"], json=sent.get("body"), headers=headers, timeout=LIMIT
    )
    assert answer.status_code == 200, answer.text
    for expected in sent["answer_has"]:
        assert expected in answer.text
