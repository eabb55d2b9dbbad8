"""`make dist` releases no faulty wheel: each fault, planted in a sound wheel, is named."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from written_macho import mach_o

ROOT = Path(__file__).parents[2]
INFO = "penstock-1.2.3.dist-info"
ELF_X86 = b"\x7fELF\2\1\1".ljust(18, b"\0") + b"\x3e\0"
ELF_ARM = b"\x7fELF\2\1\1".ljust(18, b"\0") + b"\xb7\0"


@pytest.fixture
def contents(monkeypatch):
    for folder in ("native", "release"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import contents

    yield contents
    for name in ("contents", "cross", "macho", "wheels"):
        del sys.modules[name]


@pytest.fixture
def source(tmp_path):
    package = tmp_path / "source" / "src" / "penstock"
    (package / "page").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text('__version__ = "1.2.3"\n')
    (package / "page" / "page.html").write_text("<p>")
    return tmp_path / "source"


def module(start: bytes, *isas: str) -> bytes:
    return start.ljust(64, b"\0") + b"".join(b"\0" + isa.encode() + b"\0" for isa in isas)


@dataclass
class Wheel:
    """A wheel to be written; sound by default."""

    tag: str = "cp312-abi3-manylinux_2_28_x86_64"
    module_name: str = "penstock/_native.abi3.so"
    module_bytes: bytes = module(ELF_X86, "portable", "avx2", "avx512", "avx512_bf16", "avx512_amx")
    tag_line: str = ""
    metadata_version: str = "1.2.3"
    without: tuple[str, ...] = ()
    extra: dict[str, bytes] = field(default_factory=dict)
    record: dict[str, tuple[str, str]] = field(default_factory=dict)  # lines of RECORD that are wrong

    def write(self, folder: Path) -> Path:
        files = {
            "penstock/__init__.py": b"",
            "penstock/version.py": b'__version__ = "1.2.3"\n',
            "penstock/page/page.html": b"<p>",
            self.module_name: self.module_bytes,
            f"{INFO}/METADATA": f"Metadata-Version: 2.4\nName: penstock\nVersion: {self.metadata_version}\n".encode(),
            f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {self.tag_line or self.tag}\n".encode(),
            f"{INFO}/entry_points.txt": b"[console_scripts]\npenstock = penstock.cli:main\n",
            f"{INFO}/licenses/LICENSE": b"Apache",
            **self.extra,
        }
        files = {name: content for name, content in files.items() if name not in self.without}
        lines = {name: (f"sha256={digest(content)}", str(len(content))) for name, content in files.items()}
        lines |= {f"{INFO}/RECORD": ("", "")} | self.record
        text = io.StringIO()
        csv.writer(text).writerows([name, *rest] for name, rest in lines.items())
        path = folder / f"penstock-1.2.3-{self.tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**files, f"{INFO}/RECORD": text.getvalue().encode()}.items():
                archive.writestr(name, content)
        return path


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


SOUND = Wheel()


@pytest.mark.parametrize(
    "wheel",
    [
        SOUND,
        replace(
            SOUND,
            tag="cp311-cp311-manylinux_2_28_x86_64",
            module_name="penstock/_native.cpython-311-x86_64-linux-gnu.so",
        ),
        replace(SOUND, tag="cp312-abi3-manylinux_2_28_aarch64", module_bytes=module(ELF_ARM, "portable")),
        replace(
            SOUND,
            tag="cp311-cp311-macosx_14_0_arm64",
            module_name="penstock/_native.cpython-311-darwin.so",
            module_bytes=mach_o("portable"),
        ),
    ],
    ids=lambda wheel: wheel.tag,
)
def test_a_sound_wheel_has_no_problems(contents, source, tmp_path, wheel):
    assert contents.problems(wheel.write(tmp_path), source) == []


@pytest.mark.parametrize(
    ("wheel", "said"),
    [
        (replace(SOUND, without=("penstock/page/page.html",)), ["penstock/page/page.html is missing"]),
        (replace(SOUND, extra={"tests/test_a.py": b""}), ["tests/test_a.py does not belong in"]),
        (replace(SOUND, extra={"penstock/bench.csv": b""}), ["penstock/bench.csv does not belong in"]),
        (replace(SOUND, without=("penstock/_native.abi3.so",)), ["one compiled module is wanted, there are 0"]),
        (
            replace(SOUND, extra={"penstock/_native.cpython-312-x86_64-linux-gnu.so": SOUND.module_bytes}),
            ["one compiled module is wanted, there are 2"],
        ),
        (
            replace(SOUND, module_name="penstock/_native.cpython-312-x86_64-linux-gnu.so"),
            ["is not what such a Python imports: penstock/_native.abi3.so"],
        ),
        (replace(SOUND, module_bytes=module(ELF_ARM, "portable")), ["not for x86_64"]),
        (replace(SOUND, module_bytes=module(ELF_X86, "portable", "avx2")), ["not all that it should have"]),
        (replace(SOUND, tag_line="cp312-abi3-linux_x86_64"), ["WHEEL says Tag: ['cp312-abi3-linux_x86_64']"]),
        (replace(SOUND, metadata_version="1.2.4"), ["METADATA says Version: 1.2.4"]),
        (replace(SOUND, without=(f"{INFO}/licenses/LICENSE",)), ["LICENSE is missing"]),
        (
            replace(SOUND, record={"penstock/__init__.py": (f"sha256={digest(b'other')}", "0")}),
            ["RECORD is wrong about penstock/__init__.py"],
        ),
        (
            replace(SOUND, record={"penstock/gone.py": (f"sha256={digest(b'')}", "0")}),
            ["RECORD lists penstock/gone.py, which is not there"],
        ),
        (
            replace(SOUND, tag="cp312-abi3-macosx_14_0_arm64", module_bytes=mach_o("portable", signed=False)),
            ["penstock/_native.abi3.so: it is not signed"],
        ),
        (replace(SOUND, tag="cp312-abi3-linux_x86_64"), ["is no name of a wheel of this release"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named_and_nothing_else(contents, source, tmp_path, wheel, said):
    found = contents.problems(wheel.write(tmp_path), source)
    assert [part in problem for part, problem in zip(said, found, strict=True)] == [True] * len(said), found


def test_a_version_that_is_not_the_sources_is_named(contents, source, tmp_path):
    (source / "src" / "penstock" / "version.py").write_text('__version__ = "1.3.0"\n')
    found = contents.problems(SOUND.write(tmp_path), source)
    assert "version 1.2.3 is not the one in src/penstock/version.py" in found


@pytest.mark.parametrize(
    ("needed", "fits"),
    [
        ("manylinux_2_17_x86_64", True),
        ("manylinux_2_28_x86_64", True),
        ("manylinux_2_34_x86_64", False),
        ("manylinux_3_0_x86_64", False),
        ("manylinux_2_17_aarch64", False),
        ("linux_x86_64", False),
    ],
)
def test_a_wheel_may_need_an_older_glibc_than_its_name_promises_and_no_newer_one(contents, needed, fits):
    assert contents.as_old(needed, "manylinux_2_28_x86_64") is fits
