"""A module that macOS on Apple silicon would not load is found without a Mac."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from written_macho import PAGE, SYSTEM_LIBRARY, mach_o


@pytest.fixture
def problems(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "release"))
    from macho import macho_problems

    yield lambda module: macho_problems(module, (14, 0))
    del sys.modules["macho"]


@pytest.mark.parametrize("version", [(11, 0), (14, 0)])
def test_a_sound_module_has_no_problems(problems, version):
    assert problems(mach_o("portable", version=version)) == []


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (mach_o(version=(14, 1)), "from 14.1 on, not for macOS 14.0"),
        (mach_o(system=2), "for system 2"),
        (mach_o(dated=False), "does not say for which macOS"),
        (mach_o(libraries=(SYSTEM_LIBRARY, "@rpath/libc++.1.dylib")), "needs @rpath/libc++.1.dylib"),
        (mach_o(signed=False), "not signed"),
        (b"\x7fELF".ljust(64, b"\0"), "no Mach-O file"),
        (mach_o()[:40], "no Mach-O file"),
        (b"", "no Mach-O file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_keeps_it_from_being_loaded_is_said(problems, module, said):
    (found,) = problems(module)
    assert said in found


@pytest.mark.parametrize(("place", "page"), [(300, 0), (PAGE, 1)])
def test_a_byte_that_changed_after_the_signature_is_found(problems, place, page):
    module = bytearray(mach_o("portable"))
    module[place] ^= 1
    (found,) = problems(bytes(module))
    assert f"page {page}" in found


def test_a_signature_of_a_shorter_file_is_found(problems):
    module = mach_o("portable")
    limit = module.rindex(b"\xfa\xde\x0c\x02") + 32
    shorter = module[:limit] + PAGE.to_bytes(4, "big") + module[limit + 4 :]
    (found,) = problems(shorter)
    assert f"up to byte {PAGE} of" in found
