"""What the tests of every room may use."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from served import Served

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: its kernels run on the CPU

gc.disable()  # until all tests are collected: nothing is freed meanwhile, and looking for garbage takes half the time

TESTS = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""Which of several processes this is that share the tests, `gw0`, `gw1`, ...; "" if it runs them alone."""

LENDERS = (
    "core",
    "models",
    "weights",
    "server",
    "engine",
    "e2e",
    "conformance",
    "kernels",
    "cli",
    "remote",
    "workers",
    "store",
    "kv_events",
    "certificates",
    "fleet",
    "latency",
)
"""Rooms whose tests lend something to others."""

for folder in LENDERS:
    sys.path.insert(0, str(TESTS / folder))
for folder in ("bench", "docs"):  # scripts and what they share; not part of the wheel
    sys.path.insert(0, str(TESTS.parent / folder))


def _share_processors(number: int, workers: int) -> None:
    """Give this process, and the servers that it starts, its share of the processors: one or two of its own.

    By default an engine runs a thread on each processor that it may use. Two workers with two threads each on two
    processors take three times as long: threads that wait for one another spin while the one they wait for has no
    processor. Tests of threads say how many they want. Torch gets one thread unless a test asks for more, since its
    idle threads would spin as well. Torch reads this when it is imported, so nothing may import it earlier.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        share = min(2, max(1, len(allowed) // workers))
        os.sched_setaffinity(0, {allowed[(number * share + each) % len(allowed)] for each in range(share)})


if WORKER:
    assert "torch" not in sys.modules
    _share_processors(int(WORKER.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))

os.environ["PENSTOCK_KV_STORE"] = "off"
"""A server that a test starts reads no blocks of another's, and leaves none in the user's cache; or it says where."""

os.environ["PENSTOCK_KEEP_STEP_TIMES"] = "false"
"""Nor does it begin with what another has learned."""

ssl.create_default_context = functools.cache(ssl.create_default_context)
"""Each HTTP client reads the authorities' certificates, 20 ms of work that 127.0.0.1 has no use for."""

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # how long an example takes says how busy the machine is, and nothing about the code


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A worker for each processor that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_configure() -> None:
    """Hear Ctrl-C, here and in what tests start, even if a shell started this in the background with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_to_deep(items: list[pytest.Item]) -> None:
    """Mark as `deep` the cases that their test's `one_in(n)` leaves out: all but the first of every n, as collected."""
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None or item.get_closest_marker("deep") is not None:
            continue
        key = (item.path, item.nodeid.partition("[")[0])
        if seen[key] % marker.args[0]:
            item.add_marker(pytest.mark.deep)
        seen[key] += 1


@pytest.hookimpl(tryfirst=True)  # before pytest drops what `-m "not deep"` leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that run the default model come first: they take longest, and a worker should not begin one last."""
    _leave_to_deep(items)
    long = {item.path for item in items if "default_model" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Collect garbage again from here on, except for the tests themselves and what they import, which stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched when it is not there: a test that needs it never skips."""
    from penstock.contract.config import DEFAULT_MODEL
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    return pull(DEFAULT_MODEL, default_cache_dir(os.environ), show_progress=True)


@pytest.fixture(scope="session")
def default_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`penstock serve` with few flags besides the port and the trace, in a process of its own.

    Shared by all tests that need nothing else. `make test-hosting` adds an option that makes the model hosted.
    """
    from served import serve

    folder = tmp_path_factory.mktemp("default")
    more = os.environ.get("PENSTOCK_TEST_SERVE_OPTIONS", "").split()
    with serve(folder / "trace.jsonl", "--profile-dir", str(folder / "profiles"), *more, forked=False) as served:
        yield served
