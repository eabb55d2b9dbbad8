"""The container's files name what exists: commands, options, paths, variables. No container is built here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest
import yaml

from penstock.cli import penstock
from penstock.contract.server_config import ServerConfig
from penstock.server.http.guard import OPEN_PATHS
from penstock.weights.locate import default_cache_dir

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "container.md").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order: (word, the rest), without comments and line continuations."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


STAGES = [[]]
for instruction in instructions():
    if instruction[0] == "FROM":
        STAGES.append([])
    STAGES[-1].append(instruction)
_, BUILD, FINAL = STAGES


def every(word: str, stage: list[tuple[str, str]]) -> list[str]:
    return [rest for each, rest in stage if each == word]


def environment() -> dict[str, str]:
    return dict(each.split("=", 1) for rest in every("ENV", FINAL) for each in shlex.split(rest))


def compose() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def parsed(arguments: list[str]) -> click.Context:
    """The command line `penstock ARGUMENTS` as the command reads it; an unknown option is an error."""
    command = penstock.get_command(click.Context(penstock), arguments[0])
    assert command is not None, arguments
    return command.make_context(arguments[0], arguments[1:])


def copied() -> list[str]:
    return [name for rest in every("COPY", BUILD) for name in rest.split()[:-1]]


def test_what_is_copied_exists_and_is_all_that_the_builder_is_sent():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(copied())
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_the_sources_are_enough_to_build_the_wheel():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for named in re.findall(r'^(?:readme|cmake.source-dir) = "(.+)"$', pyproject, re.MULTILINE):
        assert named in copied()
    assert {"pyproject.toml", "LICENSE", "src"} <= set(copied())


def test_nothing_of_the_build_is_left_but_the_environment():
    assert every("COPY", FINAL) == ["--from=build /opt/penstock /opt/penstock"]
    assert not any("apt-get" in rest for rest in every("RUN", FINAL))


def test_it_serves_as_a_user_without_rights_with_options_that_exist():
    (user,) = every("USER", FINAL)
    assert int(user) > 0
    assert f"useradd --system --uid {user} " in " ".join(every("RUN", FINAL))
    assert json.loads(every("ENTRYPOINT", FINAL)[0]) == ["penstock"]
    arguments = json.loads(every("CMD", FINAL)[0])
    assert parsed(arguments).params["host"] == "0.0.0.0"
    assert compose()["services"]["penstock"]["command"] == arguments


def test_models_lie_in_the_volume():
    (volume,) = every("VOLUME", FINAL)
    assert default_cache_dir(environment()) == Path(volume)
    service = compose()["services"]["penstock"]
    (name,) = compose()["volumes"]
    assert service["volumes"] == [f"{name}:{volume}"]


def test_the_port_is_the_servers_own_and_published_to_this_machine_only():
    port = next(each.default for each in fields(ServerConfig) if each.name == "port")
    assert every("EXPOSE", FINAL) == [str(port)]
    assert compose()["services"]["penstock"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_a_stop_lasts_longer_than_running_answers_may():
    drain = next(each.default for each in fields(ServerConfig) if each.name == "drain_timeout")
    assert int(compose()["services"]["penstock"]["stop_grace_period"].removesuffix("s")) > drain


class Alive(BaseHTTPRequestHandler):
    """Answers 200 where no key is needed, and 401 elsewhere."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.encode() in OPEN_PATHS else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


def test_the_health_check_asks_a_path_that_needs_no_key_and_fails_where_nobody_answers():
    check = json.loads(every("HEALTHCHECK", FINAL)[0].partition("CMD ")[2])
    assert check[:2] == ["python", "-c"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Alive) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        code = check[2].replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
        assert code != check[2]
        try:
            asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        finally:
            server.shutdown()
            thread.join()
    assert asked.returncode == 0, asked.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("line", re.findall(r"penstock ((?:serve|models|chat).*)$", PAGE, re.MULTILINE))
def test_the_pages_commands_are_valid(line):
    assert parsed(shlex.split(line))
