"""`make cross` takes a module for what its target should have, and for nothing else."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

import pytest

from penstock.kernels import native

SCRIPT = Path(__file__).parents[2] / "native" / "cross.py"


def cross():
    spec = importlib.util.spec_from_file_location("native_cross", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(start: bytes, *isas: str) -> bytes:
    return start.ljust(64, b"\0") + b"".join(b"\0" + isa.encode() + b"\0" for isa in isas)


ELF_ARM = b"\x7fELF\2\1\1".ljust(18, b"\0") + b"\xb7\0"
MACH_ARM = b"\xcf\xfa\xed\xfe\x0c\0\0\1"


@pytest.mark.parametrize(("target", "start"), [("aarch64-linux-gnu", ELF_ARM), ("aarch64-macos", MACH_ARM)])
def test_a_module_for_arm_has_portable_kernels_and_no_others(target, start):
    assert cross().describe(target, made(start, "portable")).endswith("kernels: portable")
    for content in (made(start), made(start, "avx2", "portable"), made(start[:-2] + b"\x3e\0", "portable")):
        with pytest.raises(SystemExit, match="not for a"):
            cross().describe(target, content)


@pytest.mark.skipif(
    not native.available() or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the module of this installation is the sample",
)
def test_the_module_in_use_is_one_for_linux_on_x86_64():
    content = Path(native.module.__file__).read_bytes()
    assert "portable" in cross().describe("x86_64-linux-gnu", content)
    with pytest.raises(SystemExit, match="not for aarch64"):
        cross().describe("aarch64-linux-gnu", content)
