"""Makes a release and tries it: `make dist`.

Builds the source archive, and from it a wheel for each platform and ABI, and checks each wheel. Installs the wheels
that run here into clean environments, one for each Python on this machine, serves the default model and verifies it.
If pip has no torch for CPUs, only the kernels run. Prints what is wrong; the exit code is then 1.
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
    """Build every file of the release, and print each when it is there.

    Raises:
        ReleaseError: a file could not be built, or is not as it should be.
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
    """Build a wheel, check that nothing is wrong with it, and print that it is there.

    Raises:
        ReleaseError: the wheel could not be built, or is not as it should be.
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
    """Install the wheels of this platform for each Python on this machine; returns how many did not work.

    The default model is served if pip has a torch for CPUs; otherwise only the kernels run, which need no torch.

    Args:
        wheels: the wheels of this release.
        commands: Pythons; skips a Python that is not there, or that was already tried by another name.
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
    """Whether a Python's pip finds a wheel for the requirement in the indexes that it is configured to use."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed"]
    return (
        subprocess.run([*command, "--no-deps", "--only-binary", ":all:", requirement], capture_output=True).returncode
        == 0
    )


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(f"== {line}", flush=True)


def main() -> None:
    """Make the release; exit code 1 and the reason if it fails."""
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
