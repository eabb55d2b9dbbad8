"""Checks what must be true of a wheel before anyone installs it: its name, its list of files, its module.

This module checks what only this project knows: which files belong in the wheel, which processor the module is for and
which kernels it has. The usual tools check the rules for every wheel: auditwheel, abi3audit, twine,
check-wheel-contents.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import json
import re
import subprocess
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import cross
from macho import macho_problems
from wheels import PLATFORMS

__all__ = ["as_old", "problems", "tool_problems"]

_NAME = re.compile(
    r"(?P<project>\w+)-(?P<version>[\w.!+]+)-(?P<tag>(?P<python>\w+)-(?P<abi>\w+)-(?P<platform>\w+))\.whl"
)


def problems(wheel: Path, source: Path) -> list[str]:
    """List what is wrong with a wheel of the checkout or source archive at `source`; empty if it may be released."""
    named = _NAME.fullmatch(wheel.name)
    if named is None or named["platform"] not in PLATFORMS:
        return [f"{wheel.name} is no name of a wheel of this release"]
    with zipfile.ZipFile(wheel) as archive:
        if (broken := archive.testzip()) is not None:
            return [f"{broken} is broken"]
        info = f"{named['project']}-{named['version']}.dist-info"
        return [
            *_wrong_files(archive, source, info),
            *_wrong_record(archive, info),
            *_wrong_tag(archive, info, named["tag"]),
            *_wrong_metadata(archive, info, named["version"], source),
            *_wrong_module(archive, named["abi"], named["python"], named["platform"]),
        ]


def _wrong_files(archive: zipfile.ZipFile, source: Path, info: str) -> Iterator[str]:
    package = source / "src"
    wanted = {
        path.relative_to(package).as_posix()
        for path in (package / "penstock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    there = {name for name in archive.namelist() if not name.startswith(f"{info}/") and not _is_module(name)}
    yield from (f"{name} is missing" for name in sorted(wanted - there))
    yield from (f"{name} does not belong in" for name in sorted(there - wanted))


def _wrong_record(archive: zipfile.ZipFile, info: str) -> Iterator[str]:
    own = f"{info}/RECORD"
    lines = list(csv.reader(archive.read(own).decode("utf-8").splitlines()))
    recorded = {name: (digest, size) for name, digest, size in lines}
    if len(recorded) != len(lines):
        yield "RECORD lists a file twice"
    for name in archive.namelist():
        content = archive.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")
        wanted = ("", "") if name == own else (f"sha256={digest}", str(len(content)))
        if recorded.pop(name, None) != wanted:
            yield f"RECORD is wrong about {name}"
    yield from (f"RECORD lists {name}, which is not there" for name in recorded)


def _wrong_tag(archive: zipfile.ZipFile, info: str, tag: str) -> Iterator[str]:
    said = email.message_from_bytes(archive.read(f"{info}/WHEEL"))
    if said.get_all("Tag") != [tag]:
        yield f"WHEEL says Tag: {said.get_all('Tag')}, the name {tag}"
    if said["Root-Is-Purelib"] != "false":
        yield "WHEEL says that the wheel is for every platform"


def _wrong_metadata(archive: zipfile.ZipFile, info: str, version: str, source: Path) -> Iterator[str]:
    text = (source / "src" / "penstock" / "version.py").read_text(encoding="utf-8")
    if version not in re.findall(r'__version__ = "(.+)"', text):
        yield f"version {version} is not the one in src/penstock/version.py"
    said = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    if said["Version"] != version:
        yield f"METADATA says Version: {said['Version']}"
    if f"{info}/licenses/LICENSE" not in archive.namelist():
        yield "LICENSE is missing"
    if "penstock = penstock.cli:main" not in archive.read(f"{info}/entry_points.txt").decode("utf-8"):
        yield "the command `penstock` is missing"


def _wrong_module(archive: zipfile.ZipFile, abi: str, python: str, platform: str) -> Iterator[str]:
    modules = [name for name in archive.namelist() if _is_module(name)]
    if len(modules) != 1:
        yield f"one compiled module is wanted, there are {len(modules)}"
        return
    target = PLATFORMS[platform]
    system = "darwin" if cross.TARGETS[target].system == "Darwin" else target
    suffix = "abi3" if abi == "abi3" else f"cpython-{python[2:]}-{system}"
    if modules != [f"penstock/_native.{suffix}.so"]:
        yield f"{modules[0]} is not what such a Python imports: penstock/_native.{suffix}.so"
    content = archive.read(modules[0])
    try:
        cross.describe(target, content)
    except SystemExit as wrong:
        yield str(wrong)
        return
    if (mac := re.match(r"macosx_(\d+)_(\d+)_", platform)) is not None:
        yield from (f"{modules[0]}: {problem}" for problem in macho_problems(content, (int(mac[1]), int(mac[2]))))


def _is_module(name: str) -> bool:
    return name.startswith("penstock/_native") and name.endswith(".so")


def tool_problems(wheel: Path) -> list[str]:
    """List what the usual tools find wrong with a wheel."""
    found = [
        *_complaint("twine", "check", "--strict", str(wheel)),
        *_complaint("check-wheel-contents", str(wheel)),
    ]
    if "-abi3-" in wheel.name:
        found += _complaint("abi3audit", "--strict", str(wheel))
    if "manylinux" in wheel.name:
        done = _tool("auditwheel", "show", "--json", str(wheel))
        needed = json.loads(done.stdout)["overall_tag"] if done.returncode == 0 else "nothing"
        promised = wheel.stem.rpartition("-")[2]
        if not as_old(needed, promised):
            found.append(f"auditwheel finds {needed}, not {promised}:\n{done.stdout}{done.stderr}")
    return found


def as_old(needed: str, promised: str) -> bool:
    """Whether a module that needs one manylinux tag runs where another is promised: same processor, glibc not newer."""
    tags = [re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag) for tag in (needed, promised)]
    if tags[0] is None or tags[1] is None:
        return False
    (needs, own), (has, other) = ((tuple(map(int, tag.groups()[:2])), tag[3]) for tag in tags if tag)
    return own == other and needs <= has


def _complaint(*command: str) -> list[str]:
    done = _tool(*command)
    return [f"{' '.join(command[:-1])}:\n{done.stdout}{done.stderr}"] if done.returncode else []


def _tool(*command: str) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / command[0]
    return subprocess.run([str(program), *command[1:]], capture_output=True, text=True)
