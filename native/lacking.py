"""Says what an installation without compiled kernels lacked: a C++ compiler, or the headers of Python.

Run it with the Python that was installed into, as the Makefile does if `penstock._native` is missing.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

__all__ = ["lacking", "main"]

_COMPILERS = ("c++", "g++", "clang++")


def lacking(include: Path, compiler: str, search: str) -> list[str]:
    """List what has to be installed, and how to install each.

    Args:
        include: where this Python's headers should be.
        compiler: the command in `CXX`; "" if it is not set.
        search: folders of programs, in the form of `PATH`.
    """
    found = []
    names = compiler.split()[:1] or _COMPILERS
    if not any(shutil.which(name, path=search) for name in names):
        found.append(f"a C++17 compiler ({' or '.join(names)}): the package g++, gcc-c++ or clang has one")
    if not (include / "Python.h").is_file():
        found.append(f"Python's headers ({include / 'Python.h'}): the package python3-dev or python3-devel has them")
    return found


def main() -> None:
    """Print what is lacking on standard output."""
    missing = lacking(Path(sysconfig.get_path("include")), os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    lines = ["Without compiled kernels: torch's serve, slower", *(f"This lacks {each}" for each in missing)]
    if missing:
        lines.append("Install what is missing, then: make clean serve")
    else:
        lines.append("A compiler and Python's headers are there: .venv/bin/pip install -v . shows why the build failed")
    for line in lines:
        print(f"== {line}")  # noqa: T201


if __name__ == "__main__":
    main()
