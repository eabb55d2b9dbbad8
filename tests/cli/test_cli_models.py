"""What is on this machine: models that are removed, servers that run, and what a shell completes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys

import pytest
from command_line import only_line, penstock, started
from served import ALONE
from terminal import Terminal

from penstock.cli.ps import age
from penstock.cli.running_servers import listed, running_servers


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one model of the hub's."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    (tmp_path / "hub" / "acme" / "tiny").mkdir(parents=True)
    (tmp_path / "hub" / "acme" / "tiny" / "config.json").write_text("x" * 1234)
    return tmp_path


def test_a_model_is_removed_after_a_yes(cache):
    with Terminal("rm", "acme/tiny") as terminal:
        terminal.expect("Remove acme/tiny, 1,234 bytes (0.0 MB) in")
        terminal.type("n\r")
        assert terminal.ends() == 0
    assert (cache / "hub" / "acme" / "tiny").exists()
    assert "--yes: is needed" in only_line(penstock("rm", "acme/tiny").stderr)
    done = penstock("rm", "acme/tiny", "--yes")
    assert (done.returncode, done.stdout) == (0, "1,234 bytes (0.0 MB) freed\n")
    assert not (cache / "hub" / "acme" / "tiny").exists()
    again = penstock("rm", "acme/tiny", "--yes")
    assert (again.returncode, only_line(again.stderr)) == (
        2,
        "penstock: acme/tiny: is not in the cache; there: nothing",
    )


def test_a_server_is_listed_while_it_runs_and_its_model_is_not_removed(cache, endless):
    assert "no server runs here" in penstock("ps").stderr
    folder = cache / "hub" / "acme" / "served"
    shutil.copytree(endless, folder)
    named = ("--served-model-name", "mine")
    with Terminal("serve", "acme/served", "--port", "0", "--kv-cache-memory", "10MB", *named, ALONE) as terminal:
        url = "http://" + terminal.expect(" (POST").rpartition("http://")[2].removesuffix(" (POST")
        head, row = started("ps").stdout.splitlines()
        assert head.split() == ["PID", "MODEL", "FOR", "URL"]
        assert row.split()[:2] == [str(terminal.process.pid), "mine"]
        assert row.endswith(url)
        refused = started("rm", "acme/served", "--yes")
        assert refused.returncode == 2
        assert only_line(refused.stderr) == (
            f"penstock: acme/served: is in use: process {terminal.process.pid} serves it at {url};"
            f" end that first (kill {terminal.process.pid})"
        )
        assert (folder / "config.json").exists()
        assert penstock("rm", "acme/tiny", "--yes").returncode == 0
        terminal.interrupt()
        assert terminal.ends() == 0
    assert list((cache / "servers").iterdir()) == []
    assert penstock("rm", "acme/served", "--yes").returncode == 0
    assert not folder.exists()


def test_nothing_outside_of_the_cache_is_removed(cache, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in (str(tmp_path / "mine"), "../hub", "acme/../..", "."):
        assert penstock("rm", name, "--yes").returncode == 2
    assert (tmp_path / "mine").exists()


def test_servers_that_are_gone_are_not_listed(cache):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = cache / "servers"
    folder.mkdir()
    here = {"url": "http://127.0.0.1:1", "model": "m", "started": 0.0}
    (folder / f"{gone.pid}.json").write_text(json.dumps({"pid": gone.pid} | here))
    (folder / "half.json").write_text("{")
    with listed(cache, "http://127.0.0.1:1", "m"):  # a process that lives and a server that does not answer
        mine = folder / f"{os.getpid()}.json"
        assert stat.S_IMODE(mine.stat().st_mode) == 0o600
        assert running_servers(cache) == []
        assert mine.exists()
    assert [file.name for file in folder.iterdir()] == ["half.json"]


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with listed(tmp_path / "file", "http://127.0.0.1:1", "m"):
        assert "will not list this server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (3700, "1 h 1 m"), (90000, "1 d 1 h"), (-5, "0 s")]
)
def test_how_long_a_server_runs(seconds, said):
    assert age(seconds) == said


def completed(*words: str) -> list[str]:
    """What bash would offer for the last of these words."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock"],
        env={
            **os.environ,
            "_PENSTOCK_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("penstock", *words)),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_a_shell_completes_commands_options_and_models(cache):
    assert completed("ch") == ["chat"]
    assert completed("chat", "--temp") == ["--temperature"]
    assert completed("rm", "ac") == ["acme/tiny"]
    assert completed("serve", "smol") == ["smollm2-135m-instruct"]
    assert completed("nonsense", "x") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_one_that_it_reads(shell, tmp_path):
    done = penstock("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_PENSTOCK_COMPLETE" in done.stdout
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], timeout=30).returncode == 0
