"""`make dist` compiles the kernels of a platform once, and tries wheels in systems that are really there."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch):
    """Imports a module of release/ by its name."""
    for folder in ("native", "release"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    yield __import__
    for name in ("contents", "cross", "macho", "make", "try_debian", "try_install", "try_service", "wheels"):
        sys.modules.pop(name, None)


def test_the_kernels_of_a_platform_are_compiled_once_and_linked_for_every_abi(tools, monkeypatch, tmp_path):
    make = tools("make")
    compiled, linked = [], []

    def build_kernels(source, platform, folder):
        compiled.append(platform)
        return folder / f"{platform}.a"

    def build_wheel(source, abi, interpreter, platform, kernels, folder, output):
        linked.append((abi.abi, kernels.name))
        wheel = output / f"penstock-1-{abi.python}-{abi.abi}-{platform}.whl"
        wheel.touch()
        return wheel

    def build_sdist(root, folder, output):
        archive = output / "penstock-1.tar.gz"
        archive.touch()
        return archive, folder / "source"

    monkeypatch.setattr(make, "find_interpreters", lambda commands: dict.fromkeys(make.ABIS))
    monkeypatch.setattr(make, "build_sdist", build_sdist)
    monkeypatch.setattr(make, "build_kernels", build_kernels)
    monkeypatch.setattr(make, "build_wheel", build_wheel)
    for check in ("problems", "tool_problems"):
        monkeypatch.setattr(make, check, lambda *given: [])
    platforms = ["manylinux_2_28_x86_64", "manylinux_2_28_aarch64"]
    built = make.build([], tmp_path / "build", tmp_path / "dist", platforms)
    assert compiled == platforms
    assert linked == [(abi, f"{platform}.a") for platform in platforms for abi in ("cp311", "abi3")]
    assert len(built) == 5


def test_kernels_are_compiled_again_when_something_that_they_are_made_of_changed(tools, monkeypatch, tmp_path):
    wheels = tools("wheels")
    compiled, installed = [], {"ziglang": "1"}

    def build(target, source, folder, goal):
        folder.mkdir(parents=True)
        compiled.append((source / "a.cpp").read_text())
        kernels = folder / f"lib{goal}.a"
        kernels.touch()
        return kernels

    monkeypatch.setattr(wheels.cross, "build", build)
    monkeypatch.setattr(wheels, "version", installed.get)
    native = tmp_path / "source" / "native"
    native.mkdir(parents=True)

    def kernels_of(text, platform="manylinux_2_28_x86_64"):
        (native / "a.cpp").write_text(text)
        return wheels.build_kernels(tmp_path / "source", platform, tmp_path / "build")

    assert kernels_of("1") == kernels_of("1")
    kernels_of("2")
    kernels_of("2", "manylinux_2_28_aarch64")
    assert compiled == ["1", "2", "2"]
    installed["ziglang"] = "2"
    kernels_of("2")
    (native / "b.h").touch()
    kernels_of("2")
    assert len(compiled) == 5
    (tmp_path / "build" / "manylinux_2_28_x86_64" / "made-of").unlink()  # as when a build was cut off
    kernels_of("2")
    assert len(compiled) == 6


def test_a_python_with_two_names_is_tried_once(tools, monkeypatch):
    make, tried = tools("make"), []
    monkeypatch.setattr(make, "pip_has", lambda python, requirement: False)
    monkeypatch.setattr(make, "try_in_environment", lambda trial, python: not tried.append(python))
    wheel = Path(f"penstock-1-cp311-cp311-manylinux_2_28_{platform.machine()}.whl")
    include = Path("include/python3.11")
    names = {"python3.11": include, "/opt/python3.11": Path("include") / ".." / include, "/other/python3.11": ROOT}
    monkeypatch.setattr(
        make, "ask_interpreter", lambda name: make.Interpreter(name, (3, 11), names[name], Path("pyconfig.h"))
    )
    assert make.try_all([wheel], list(names)) == 0
    assert tried == ["python3.11", "/other/python3.11"]


def test_a_platform_that_is_none_is_refused_by_its_name(tools, monkeypatch, capsys):
    make = tools("make")
    monkeypatch.setattr(sys, "argv", ["make.py", "--platforms", "manylinux_2_28_sparc"])
    with pytest.raises(SystemExit) as ended:
        make.main()
    assert "manylinux_2_28_sparc" in str(ended.value)


def test_every_wheel_for_linux_is_tried_in_a_debian(tools):
    wheels, debian = tools("wheels"), tools("try_debian")
    linux = {wheels.tag(abi, name) for name in wheels.PLATFORMS if "linux" in name for abi in wheels.ABIS}
    assert {system.tag for system in debian.SYSTEMS} == linux


def test_torch_is_installed_where_a_model_is_served_and_nowhere_else(tools):
    assert [system.name for system in tools("try_debian").SYSTEMS if bool(system.torch) != bool(system.model)] == []


@pytest.mark.parametrize(
    ("user", "programs", "formats", "said"),
    [
        (1000, ["debootstrap"], ["qemu-aarch64"], "only root"),
        (0, [], ["qemu-aarch64"], "apt-get install debootstrap"),
        (0, ["debootstrap"], [], "apt-get install qemu-user-static"),
        (0, ["debootstrap"], ["qemu-aarch64"], ""),
    ],
)
def test_what_a_trial_of_arm_lacks_is_said(tools, monkeypatch, tmp_path, user, programs, formats, said):
    debian = tools("try_debian")
    monkeypatch.setattr(debian.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(debian.shutil, "which", lambda name: name if name in programs else None)
    for name in formats:
        (tmp_path / name).touch()
    system = debian.System("bookworm", "arm64", "cp311-cp311", "", "")
    found = debian.lacking(system, user=user, binfmt=tmp_path)
    assert said in found
    assert bool(said) == bool(found)


def test_a_system_of_this_machines_processor_needs_no_emulator(tools, monkeypatch, tmp_path):
    debian = tools("try_debian")
    monkeypatch.setattr(debian.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(debian.shutil, "which", lambda name: name)
    assert debian.lacking(debian.System("trixie", "amd64", "cp312-abi3", "", ""), user=0, binfmt=tmp_path) == ""


def test_a_system_that_was_not_made_to_its_end_is_made_again(tools, monkeypatch, tmp_path):
    debian = tools("try_debian")
    system = debian.SYSTEMS[0]
    (tmp_path / system.name / "half").mkdir(parents=True)
    made = []

    def run(command, **settings):
        made.append(command)
        Path(command[-1]).mkdir()

    monkeypatch.setattr(debian.subprocess, "run", run)
    root = debian.make_root(system, tmp_path)
    assert list(root.iterdir()) == []
    assert debian.make_root(system, tmp_path) == root
    assert len(made) == 1
