"""Installs a wheel where there is no compiler, and shows that it works: in a clean environment, or in another system.

    python release/try_install.py WHEEL --python python3.12              an environment outside the checkout
    python release/try_install.py WHEEL --root FOLDER                    a system that debootstrap made, as root
    python release/try_install.py WHEEL --root FOLDER --container        there as in a container: read-only, no rights

installed.py says what is tried: kernels, a server, `penstock verify`. A root for another processor is entered through
qemu-user, which the Linux kernel must know (binfmt_misc). Mounts end with the process.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Trial", "entered", "fails", "pinned_torch", "try_in_environment", "try_in_root"]

CHECK = Path(__file__).with_name("installed.py")
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
USER = 10001
"""The id of the user without rights, as in the Dockerfile."""


@dataclass(frozen=True)
class Trial:
    """What is installed, and what is tried."""

    wheel: Path
    model: str = ""  # a path, "default", or "" to run only the kernels; then no torch is installed
    requirements: tuple[str, ...] = ()  # besides the wheel: torch==2.13.0
    find_links: str = ""  # a folder of wheels for pip, besides its index
    requests: int = 20
    patience: int = 300  # seconds that the server may take to start

    def pip(self, python: str, wheel: str, links: str) -> list[str]:
        """Return the command that installs the wheel; pip may take only wheels, so that nothing is compiled."""
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary", ":all:"]
        if links:
            command += ["--find-links", links]
        return [*command, wheel, *self.requirements, *([] if self.model else ["--no-deps"])]

    def check(self, python: str, script: str, model: str) -> list[str]:
        """Return the command that tries the installation."""
        return [
            python,
            script,
            *([model] if model else []),
            "--requests",
            str(self.requests),
            "--patience",
            str(self.patience),
        ]


def pinned_torch() -> str:
    """Return the torch that the project is tested with, for CPUs: torch==2.13.0+cpu."""
    found = re.search(r"^torch==[\d.]+", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, CONSTRAINTS
    # Without the suffix, pip on Linux takes a build for CUDA from its index, which takes gigabytes.
    return found[0] + ("+cpu" if platform.system() == "Linux" else "")


def try_in_environment(trial: Trial, python: str) -> bool:
    """Whether the wheel works in a new environment of one of this machine's Pythons, with no compiler on the path."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        venv = Path(temporary) / "venv"
        if fails([python, "-m", "venv", str(venv)]):
            return False
        own = str(venv / "bin" / "python")
        script = shutil.copy(CHECK, temporary)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        variables |= {"PATH": str(venv / "bin"), "CC": "false", "CXX": "false"}
        commands = [trial.pip(own, str(trial.wheel.resolve()), trial.find_links), trial.check(own, script, trial.model)]
        return not any(fails(command, cwd=temporary, env=variables) for command in commands)


def try_in_root(trial: Trial, root: Path, python: str = "python3", *, container: bool = False) -> bool:
    """Whether the wheel works in the system in `root`, installed there into /opt/penstock.

    Args:
        trial: what is tried.
        root: a folder that debootstrap made, with a Debian that has Python's venv. Only root may enter it.
        python: the name of the Python command in that system.
        container: after the installation the root is read-only except /models and /tmp, and the user has no rights.
    """
    inside = root / "srv" / "penstock"
    shutil.rmtree(inside, ignore_errors=True)
    shutil.rmtree(root / "opt" / "penstock", ignore_errors=True)
    inside.mkdir(parents=True)
    inside.chmod(0o755)
    shutil.copy(CHECK, inside)
    shutil.copy(trial.wheel, inside)
    _lend_network(root)
    links = ""
    if trial.find_links:
        links = "/srv/penstock/links"
        shutil.copytree(trial.find_links, root / links[1:])
    model = trial.model
    if model not in ("", "default"):
        model = f"/srv/penstock/{Path(model).name}"
        copy = shutil.copytree if Path(trial.model).is_dir() else shutil.copyfile
        copy(trial.model, root / model[1:])
    own = "/opt/penstock/bin/python"
    commands = [
        [python, "-m", "venv", "/opt/penstock"],
        trial.pip(own, f"/srv/penstock/{trial.wheel.name}", links),
    ]
    for command in commands:
        if fails(entered(root, command)):
            return False
    return not fails(entered(root, trial.check(own, f"/srv/penstock/{CHECK.name}", model), container=container))


def _lend_network(root: Path) -> None:
    """Copy this machine's name servers, certificates and pip settings, so that pip reaches its index from inside."""
    for name in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
        if Path(name).is_file():
            (root / name[1:]).unlink(missing_ok=True)
            shutil.copyfile(name, root / name[1:])


def entered(root: Path, command: Sequence[str], *, container: bool = False) -> list[str]:
    """Return the command line that runs a command inside `root`, with mounts of its own."""
    steps = ["mount -t proc proc /proc", "mount -t tmpfs tmpfs /dev/shm"]
    start = "exec env -i PATH=/usr/bin:/bin LANG=C.UTF-8 "
    if container:
        steps += [
            f"install -d -o {USER} /models",
            "mount -o remount,ro,bind /",
            f"mount -t tmpfs -o uid={USER} tmpfs /models && mount -t tmpfs -o mode=1777 tmpfs /tmp",
        ]
        start += "HOME=/tmp PENSTOCK_CACHE=/models "
        start += f"setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all --no-new-privs "
    else:
        start += "HOME=/root "
    script = " && ".join([*steps, start + shlex.join(command)])
    # Bound to itself, the folder becomes a mount of its own: only a mount can be made read-only.
    enter = f'mount --bind "$0" "$0" && exec chroot "$0" /bin/sh -c {shlex.quote(script)}'
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", enter, str(root)]


def fails(command: list[str], **settings: object) -> bool:
    """Run a command, whose output is shown; returns whether it failed, and prints it then."""
    code = subprocess.run(command, **settings).returncode  # type: ignore[call-overload]
    if code:
        print(f"   exit code {code}: {shlex.join(command)}", flush=True)
    return bool(code)


def main() -> None:
    """Try one wheel in one place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default="python3")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--container", action="store_true")
    parser.add_argument("--model", default="default", help='a path, "default", or "" to try the kernels alone')
    parser.add_argument("--require", action="append", default=[], metavar="REQUIREMENT", help="such as torch==2.13.0")
    parser.add_argument("--find-links", default="", help="a folder of wheels for pip, beside its index")
    parser.add_argument("--requests", type=int, default=20)
    given = parser.parse_args()
    trial = Trial(given.wheel, given.model, tuple(given.require), given.find_links, given.requests)
    if given.root is None:
        works = try_in_environment(trial, given.python)
    else:
        works = try_in_root(trial, given.root, given.python, container=given.container)
    sys.exit(0 if works else 1)


if __name__ == "__main__":
    main()
