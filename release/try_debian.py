"""Tries the wheels of `make dist` in Debian systems that have no compiler: `make dist-debian`, as root.

    python release/try_debian.py [--only bookworm-amd64] [--find-links FOLDER]

debootstrap makes each system once, in /var/tmp/penstock-debian. In one system the server runs as in a container,
read-only and without rights; then the system is booted, to try the service of docs/service.md. Systems for Arm run
under qemu-user and serve a tiny model that the tests write, because an emulated processor is about thirty times slower.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from try_install import Trial, pinned_torch, try_in_root
from try_service import try_service

__all__ = ["SYSTEMS", "System", "lacking", "make_root"]

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS_LIE_IN = Path("/var/tmp/penstock-debian")
"""Outside the checkout: the build of the source archive would follow links of such a system into this one."""
PACKAGES = "python3-venv,ca-certificates"
TO_BOOT = ",systemd-sysv,dbus"
PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's names of processors, and the names that `uname -m` prints."""


@dataclass(frozen=True)
class System:
    """A Debian system, and what is tried there."""

    suite: str
    processor: str  # Debian's name
    wheel: str  # the tag of the wheel without its platform
    torch: str  # "": torch is not installed, and only the kernels run
    model: str  # "default" or "tiny"; "" without torch
    requests: int = 20
    patience: int = 300
    boots: bool = False  # if True, the trial runs as in a container, and after it the service of docs/service.md

    @property
    def name(self) -> str:
        """The name of the system on the command line."""
        return f"{self.suite}-{self.processor}"

    @property
    def tag(self) -> str:
        """The tag of the wheel."""
        return f"{self.wheel}-manylinux_2_28_{PROCESSORS[self.processor]}"

    @property
    def emulated(self) -> bool:
        """Whether this machine has another processor."""
        return PROCESSORS[self.processor] != platform.machine()


SYSTEMS = (
    System("bookworm", "amd64", "cp311-cp311", pinned_torch(), "default", boots=True),
    # For this Python the index has torch only with CUDA, which takes gigabytes.
    System("trixie", "amd64", "cp312-abi3", "", ""),
    # The last torch without CUDA for Arm in the index.
    System("bookworm", "arm64", "cp311-cp311", "torch==2.9.1", "tiny", patience=1800),
    System("trixie", "arm64", "cp312-abi3", "torch==2.9.1", "tiny", patience=1800),
)


def lacking(system: System, *, user: int, binfmt: Path = Path("/proc/sys/fs/binfmt_misc")) -> str:
    """Say what keeps a system from being made and entered here, and what to do about it; "" if nothing does."""
    if user != 0:
        return "only root makes and enters another system"
    if shutil.which("debootstrap") is None:
        return "debootstrap is missing: apt-get install debootstrap"
    if system.boots and shutil.which("systemd-nspawn") is None:
        return "systemd-nspawn is missing: apt-get install systemd-container"
    if system.emulated and not (binfmt / f"qemu-{PROCESSORS[system.processor]}").exists():
        return (
            f"the kernel does not run programs for {PROCESSORS[system.processor]}: "
            "apt-get install qemu-user-static binfmt-support; in a container also "
            f"mount -t binfmt_misc binfmt_misc {binfmt} && "
            f"update-binfmts --enable qemu-{PROCESSORS[system.processor]}"
        )
    return ""


def make_root(system: System, folder: Path) -> Path:
    """Return the folder of a system; makes the system if it is missing or incomplete."""
    root, whole = folder / system.name, folder / f"{system.name}.whole"
    if not whole.exists():
        shutil.rmtree(root, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        say(f"{system.name}: making it with debootstrap, minutes; {folder}/{system.name}.log")
        packages = PACKAGES + (TO_BOOT if system.boots else "")
        command = ["debootstrap", f"--arch={system.processor}", "--variant=minbase", f"--include={packages}"]
        with (folder / f"{system.name}.log").open("w", encoding="utf-8") as log:
            subprocess.run([*command, system.suite, str(root)], stdout=log, stderr=log, check=True)
        whole.touch()
    return root


def write_tiny_model(folder: Path) -> str:
    """Write a Llama of a few thousand weights, with a tokenizer, as the tests do; returns its path."""
    for room in ("tests", "tests/models"):
        sys.path.insert(0, str(ROOT / room))
    checkpoints = importlib.import_module("tiny_checkpoints")
    return str(checkpoints.write_lettered(folder / "tiny-llama", "llama", "wide_heads_untied"))


def try_system(system: System, wheels: Path, folder: Path, find_links: str) -> bool:
    """Whether the wheel works in a system; prints the reason if it cannot be tried."""
    wheel = next(wheels.glob(f"penstock-*-{system.tag}.whl"), None)
    reason = lacking(system, user=os.geteuid()) or ("" if wheel else f"{wheels} has no wheel {system.tag}: make dist")
    if reason or wheel is None:
        say(f"{system.name}: not tried, {reason}")
        return False
    root = make_root(system, folder)
    say(f"{system.name}: {wheel.name}")
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        model = write_tiny_model(Path(temporary)) if system.model == "tiny" else system.model
        requirements = (system.torch,) if system.torch else ()
        trial = Trial(wheel, model, requirements, find_links, system.requests, system.patience)
        if not system.boots:
            return try_in_root(trial, root)
        return try_in_root(trial, root, container=True) and try_service(root)


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(f"== {line}", flush=True)


def main() -> None:
    """Try the wheels; exit code 1 if one does not work or cannot be tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="the folder that they lie in")
    parser.add_argument(
        "--folder", type=Path, default=SYSTEMS_LIE_IN, help="for the systems, 0.3 GB each and what pip adds"
    )
    parser.add_argument("--only", action="append", choices=[system.name for system in SYSTEMS], metavar="SYSTEM")
    parser.add_argument("--find-links", default="", help="a folder of wheels for pip, beside its index")
    given = parser.parse_args()
    chosen = [system for system in SYSTEMS if given.only is None or system.name in given.only]
    works = [try_system(system, given.wheels.resolve(), given.folder.resolve(), given.find_links) for system in chosen]
    say(f"{sum(works)} of {len(works)} systems run it")
    sys.exit(0 if all(works) else 1)


if __name__ == "__main__":
    main()
