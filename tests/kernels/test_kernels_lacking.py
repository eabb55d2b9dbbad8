"""An installation without compiled kernels says whether a compiler or Python's headers were missing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"


@pytest.fixture
def lacking(tmp_path):
    """What is said of a machine with these programs and headers."""
    spec = importlib.util.spec_from_file_location("native_lacking", NATIVE / "lacking.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def said(*there: str, compiler: str = "") -> str:
        for name in there:
            (tmp_path / name).touch(mode=0o755)
        return "; ".join(module.lacking(tmp_path, compiler, str(tmp_path)))

    return said


def test_each_of_the_two_is_named_with_the_package_that_has_it(lacking):
    assert "a C++17 compiler (c++ or g++ or clang++): the package g++" in lacking()
    assert "Python.h): the package python3-dev" in lacking()
    assert "headers" not in lacking("Python.h")
    assert "compiler" in lacking()
    assert lacking("clang++") == ""


def test_missing_headers_are_not_called_a_missing_compiler(lacking):
    assert lacking("g++").startswith("Python's headers")


def test_the_compiler_that_is_looked_for_is_cxxs(lacking):
    assert "(ccache)" in lacking("g++", "Python.h", compiler="ccache g++")
    assert lacking("ccache", compiler="ccache g++") == ""


def test_the_makefile_runs_it_and_has_it_say_what_to_do():
    said = subprocess.run([sys.executable, NATIVE / "lacking.py"], capture_output=True, text=True, env={"PATH": ""})
    assert "This lacks a C++17 compiler" in said.stdout
    assert said.stdout.splitlines()[-1] == "== Install what is missing, then: make clean serve"
    makefile = (NATIVE.parent / "Makefile").read_text()
    assert "'import penstock._native' 2>/dev/null || $(BIN)/python native/lacking.py" in makefile


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="cmake and a C++ compiler are needed")
def test_the_build_names_the_headers_that_it_does_not_find(tmp_path):
    command = ["cmake", "-S", str(NATIVE), "-B", str(tmp_path / "build"), f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run([*command, "-DPython_INCLUDE_DIR=/nowhere"], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "The headers of Python 3" in said
    assert "install python3-dev" in said
