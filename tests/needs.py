"""What some tests need that not every machine has, and how to have it: the reasons that skipped tests give."""

from __future__ import annotations

__all__ = ["CLIENTS", "COMPILED", "LLAMA_CPP", "MEMORY_GROUPS", "OPEN_WEBUI"]

COMPILED = "the compiled kernels are missing here: install a C++ compiler, then make clean test"
MEMORY_GROUPS = (
    "no memory control group can be made here ({why}): run the tests as root, or under systemd-run --user --scope"
    " -p Delegate=yes, on Linux with /sys/fs/cgroup mounted writable"
)
CLIENTS = "other projects' clients are not installed here: make test-clients does that (2 GB, pip and npm)"
LLAMA_CPP = "llama.cpp is not installed here: python bench/compare.py --install --peer llama.cpp does that"
OPEN_WEBUI = (
    "OPEN_WEBUI does not name the program of an installed Open WebUI: pip install open-webui (6 GB), then its path"
)
