"""In a group with little memory a model is served, or refused with numbers; the system never ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from needs import MEMORY_GROUPS

MIB = 1 << 20
GROUPS = Path("/sys/fs/cgroup")


def _own_group() -> tuple[Path, str] | None:
    """The folder of this process's memory group, and the name of the file with its limit; None where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return GROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        if not controllers and (GROUPS / "cgroup.controllers").exists():
            return GROUPS / path.lstrip("/"), "memory.max"
    return None


@pytest.fixture
def limited():
    """Runs `penstock` with some bytes of memory."""
    own = _own_group()
    if own is None or not os.access(own[0], os.W_OK):
        pytest.skip(MEMORY_GROUPS.format(why="this process's own is not writable"))
    folder = own[0] / f"penstock-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / own[1]).write_text(str(1 << 40))
    except OSError as error:
        pytest.skip(MEMORY_GROUPS.format(why=error))

    def run(limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        (folder / own[1]).write_text(str(limit))
        return subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())),
            capture_output=True,
            text=True,
            timeout=600,
        )

    yield run
    folder.rmdir()


@pytest.mark.model
def test_a_kv_cache_that_is_too_large_is_refused_with_numbers(limited, default_model):
    done = limited(1024 * MIB, "generate", str(default_model), "--prompt", "Hello", "--kv-cache-memory", "2GiB")
    assert done.returncode == 2
    assert "--kv-cache-memory" in done.stderr
    assert "GiB of memory are needed and" in done.stderr
    assert "What fits: a KV cache of" in done.stderr


@pytest.mark.model
def test_a_model_that_fits_is_served_to_the_end(limited, default_model):
    done = limited(1024 * MIB, "generate", str(default_model), "--prompt", "Hello", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.deep
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_from_1_to_4_gib_every_limit_serves_or_refuses(limited, tmp_path_factory, quantization):
    """0.9 billion weights: 1.8 GB in bfloat16."""
    model = tmp_path_factory.getbasetemp() / "large"
    if not model.exists():
        script = Path(__file__).parents[2] / "bench" / "make_random_checkpoint.py"
        shape = ["--layers", "18", "--hidden", "2048", "--heads", "32", "--kv-heads", "4", "--inner", "5632"]
        subprocess.run([sys.executable, script, model, *shape], check=True)
    ends = []
    for limit in range(1024, 4096 + 1, 512):
        done = limited(
            limit * MIB, "generate", str(model), "--quantization", quantization, "--prompt", "a b", "--max-tokens", "4"
        )
        assert done.returncode in (0, 2), f"{limit} MiB: {done.returncode} {done.stderr}"
        assert done.returncode == 0 or "of memory are needed and" in done.stderr
        ends.append(done.returncode)
    assert ends == sorted(ends, reverse=True), "what fits in less must fit in more"
    assert ends[-1] == 0
