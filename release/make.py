"""Makes a release and tries it: `make dist`.

Builds the source archive, and from it a wheel for each platform and ABI; looks into each wheel; installs each that runs
here into clean environments, one for each Python that is here, serves the default model there and verifies it. Where
pip has no torch for CPUs, the kernels alone compute. What is not as it should be is said, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from contents import problems, tool_problems
from try_install import Trial, pinned_torch, try_in_environment
from wheels import (
    ABIS,
    PLATFORMS,
    Abi,
    Interpreter,
    ReleaseError,
    ask_interpreter,
    build_kernels,
    build_sdist,
    build_wheel,
    find_interpreters,
)

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")


def build(commands: list[str], folder: Path, output: Path, platforms: list[str]) -> list[Path]:
    """Every file of the release, each said when it is there.

    Raises:
        ReleaseError: one could not be built, or is not as it should be.
    """
    for leftover in output.glob("penstock-*"):
        leftover.unlink()
    for place in (folder, output):
        place.mkdir(parents=True, exist_ok=True)
    interpreters = find_interpreters(commands)
    archive, source = build_sdist(ROOT, folder, output)
    say(f"{archive.name}  {archive.stat().st_size / 1e6:.1f} MB")
    built = [archive]
    for name in platforms:
        say(f"{name}: the kernels, minutes where they are to be compiled")
        begun = time.monotonic()
        kernels = build_kernels(source, name, folder)
        say(f"{name}: the kernels are there, {time.monotonic() - begun:.0f} s")
        built += [build_sound_wheel(source, abi, interpreters[abi], name, kernels, folder, output) for abi in ABIS]
    return built


def build_sound_wheel(
    source: Path, abi: Abi, interpreter: Interpreter, platform: str, kernels: Path, folder: Path, output: Path
) -> Path:
    """A wheel in which nothing is wrong; says that it is there.

    Raises:
        ReleaseError: it could not be built, or is not as it should be.
    """
    begun = time.monotonic()
    wheel = build_wheel(source, abi, interpreter, platform, kernels, folder, output)
    if found := [*problems(wheel, source), *tool_problems(wheel)]:
        raise ReleaseError("\n".join([f"{wheel.name}:", *found]))
    say(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB, {time.monotonic() - begun:.0f} s, in order")
    return wheel


def runs_here(wheel: Path) -> bool:
    """Whether the wheel is for this system and processor."""
    here = {"Linux": f"manylinux_2_28_{platform.machine()}", "Darwin": f"macosx_14_0_{platform.machine()}"}
    return wheel.stem.endswith(here.get(platform.system(), "nowhere"))


def try_all(wheels: list[Path], commands: list[str]) -> int:
    """Install the wheels of this platform for each Python that is here; returns how many did not work.

    The default model is served where pip has a torch for CPUs; elsewhere the kernels compute, which needs no torch.

    Args:
        wheels: those of this release.
        commands: Pythons; one that is not there is passed over, and so is one that was tried by another name.
    """
    failed = tried = 0
    known: set[Path] = set()
    for command in commands:
        there = ask_interpreter(command)
        fitting = [
            wheel
            for abi in ABIS
            if there and abi.builds_with(there.version)
            for wheel in wheels
            if f"-{abi.python}-" in wheel.name
        ]
        if there is None or not fitting or there.include.resolve() in known:
            continue
        known.add(there.include.resolve())
        version = "{}.{}".format(*there.version)
        torch = pinned_torch()
        has_torch = pip_has(there.command, torch)
        say(f"Python {version}: a clean environment, {fitting[-1].name}")
        if not has_torch:
            say(f"Python {version}: pip has no {torch}, so no model is served: the kernels alone compute")
        trial = Trial(fitting[-1], "default", (torch,)) if has_torch else Trial(fitting[-1])
        tried += 1
        failed += not try_in_environment(trial, there.command)
    say(f"{tried - failed} of {tried} installations work")
    return failed if tried else 1


def pip_has(python: str, requirement: str) -> bool:
    """Whether a Python's pip finds a wheel, where it is told to look."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed"]
    return (
        subprocess.run([*command, "--no-deps", "--only-binary", ":all:", requirement], capture_output=True).returncode
        == 0
    )


def say(line: str) -> None:
    """A line of progress, at once."""
    print(f"== {line}", flush=True)


def main() -> None:
    """Make the release; exit code 1 with the reason where it is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "dist", help="for what is no part of it")
    parser.add_argument("--pythons", default="", help="Pythons to build and to try with, besides those on the path")
    parser.add_argument("--platforms", default=" ".join(PLATFORMS), help="platform tags, all unless told otherwise")
    parser.add_argument("--no-build", action="store_true", help="try what lies in the output already")
    given = parser.parse_args()
    platforms = given.platforms.split()
    if unknown := [name for name in platforms if name not in PLATFORMS]:
        sys.exit(f"--platforms: {', '.join(unknown)} is none of {', '.join(PLATFORMS)}")
    commands = [*given.pythons.split(), *PYTHONS]
    commit = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    taken = subprocess.run(commit, capture_output=True, text=True)
    if taken.returncode == 0:  # the same sources make the same archives
        os.environ.setdefault("SOURCE_DATE_EPOCH", taken.stdout.strip())
    try:
        if not given.no_build:
            build(commands, given.folder.resolve(), given.output.resolve(), platforms)
    except ReleaseError as reason:
        sys.exit(f"no release: {reason}")
    wheels = sorted(wheel for wheel in given.output.glob("penstock-*.whl") if runs_here(wheel))
    if try_all(wheels, commands):
        sys.exit(f"no release: what lies in {given.output} does not work everywhere")
    say(f"the release lies in {given.output}")


if __name__ == "__main__":
    main()
