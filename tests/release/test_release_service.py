"""The systemd unit in docs/service.md: systemd accepts it, and rates its sandbox as good. None is started here."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from penstock.cli import penstock

PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")
UNIT = re.search(r"```ini\n(.*?)```", PAGE, re.DOTALL)[1]
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def unit(tmp_path):
    """The unit in a file, with a program that exists."""
    program = tmp_path / "penstock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "penstock.service"
    path.write_text(UNIT.replace("/opt/penstock/bin/penstock", str(program)))
    return path


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    parser.optionxform = str
    parser.read_string(UNIT)
    return parser["Service"]


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60)


@needs_systemd
def test_systemd_takes_every_line(unit):
    done = analyze("verify", str(unit))
    about_it = [line for line in done.stderr.splitlines() if unit.name in line]
    assert about_it == []


@needs_systemd
def test_a_misspelt_line_would_be_seen(unit):
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "ProtectHomes" in analyze("verify", str(unit)).stderr


@needs_systemd
def test_the_service_is_fenced_in(unit):
    done = analyze("security", "--offline=yes", "--threshold=20", str(unit))  # tenths: below 2.0 of 10
    assert done.returncode == 0, done.stdout[-500:]


def test_the_command_is_one_that_penstock_takes():
    program, command, *options = shlex.split(service()["ExecStart"])
    assert program == "/opt/penstock/bin/penstock"
    context = penstock.get_command(click.Context(penstock), command).make_context(command, options)
    assert context.params["probe_port"] == 9000


def test_models_are_kept_where_the_service_may_write():
    assert service()["Environment"] == f"PENSTOCK_CACHE=/var/cache/{service()['CacheDirectory']}"


def test_what_is_said_beside_the_unit_is_not_in_it():
    left_out = ("MemoryDenyWriteExecute", "ProcSubset", "IPAddressDeny")
    assert [name for name in left_out if name not in PAGE or name in service()] == []
