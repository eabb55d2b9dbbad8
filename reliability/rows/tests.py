"""R1, R3, R8, R30 and R34: tests of the repository, run at the depth that the table asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.row import Depth, Measured, Progress, judge

__all__ = [
    "corrupt_files",
    "leaving_in_faults",
    "messages_between_threads",
    "planted_bugs",
    "random_episodes",
    "read_summary",
    "run_tests",
]

ROOT = Path(__file__).resolve().parent.parent.parent
_VERDICT = re.compile(r"(?P<test>\S+::.+?) (?P<verdict>PASSED|FAILED|ERROR|SKIPPED)\b")
_COUNT = re.compile(r"collected (\d+) items(?: / (\d+) deselected)?")


def random_episodes(depth: Depth, progress: Progress) -> Measured:
    """R1: random lives of scheduler, block pool and prefix cache."""
    episodes = depth.of(10_000)
    counts, failed = run_tests(progress, ["tests/core/test_core_episodes.py"], {"PENSTOCK_EPISODES": str(episodes)})
    figure = f"{episodes} random episodes and as many of Hypothesis: {len(failed) or 'no'} violations"
    return judge(figure, failed, **counts)


def planted_bugs(depth: Depth, progress: Progress) -> Measured:
    """R3: bugs planted in the core, and under `penstock verify` in a deep run."""
    seeds = depth.of(20, 1)
    files = ["tests/core/test_core_mutants.py"]
    files += ["tests/verify/test_verify_plants.py"] if depth is Depth.DEEP else []
    counts, failed = run_tests(progress, files, {"PENSTOCK_PLANT_SEEDS": str(seeds)})
    where = "the core and under `penstock verify`" if depth is Depth.DEEP else "the core"
    figure = f"{counts['passed']} tests of bugs planted in {where}, {len(failed) or 'none'} missed"
    return judge(figure, failed, **counts)


def leaving_in_faults(depth: Depth, progress: Progress) -> Measured:
    """R8: clients leave at each point of a fault."""
    times = depth.of(2000)
    counts, failed = run_tests(progress, ["tests/engine/test_engine_leaving.py"], {"PENSTOCK_LEAVING": str(times)})
    figure = (
        f"{times} times, at each point of seven faults: {'a hang, a leak or a wrong answer' if failed else 'no hang'}"
    )
    return judge(figure, failed, **counts)


def messages_between_threads(depth: Depth, progress: Progress) -> Measured:
    """R34: messages between the engine's thread and readers on event loops."""
    messages = depth.of(1_000_000)
    counts, failed = run_tests(progress, ["tests/engine/test_engine_messages.py"], {"PENSTOCK_MESSAGES": str(messages)})
    figure = (
        f"{messages:,} messages between the engine and 72 readers: {'some' if failed else 'none'} lost or out of order"
    )
    return judge(figure, failed, **counts)


def corrupt_files(depth: Depth, progress: Progress) -> Measured:
    """R30: damaged files."""
    marks = [] if depth is Depth.DEEP else ["-m", "not deep"]
    files = ["tests/weights/test_weights_corruption.py", "tests/weights/test_weights_mutations.py"]
    counts, failed = run_tests(progress, [*files, *marks])
    figure = f"{counts['passed']} tests of damaged files: {len(failed) or 'no'} crashes or wrong loads"
    return judge(figure, failed, **counts)


def run_tests(
    progress: Progress, arguments: list[str], environment: Mapping[str, str] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Run tests in one process; returns how many had which verdict, and the names of failed tests.

    Raises:
        RuntimeError: pytest did not run them, or reported no test that passed or failed.
    """
    # The project's own options would remove each test's verdict from the output.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-rfE", "--tb=line", *arguments]
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "250", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if found := _COUNT.search(line):
                progress.expect(int(found[1]) - int(found[2] or 0))
            elif _VERDICT.search(line):
                progress.update()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {process.returncode}: {''.join(lines[-8:])}")
    counts, failed = read_summary(lines)
    if not counts["passed"] + counts["failed"]:
        raise RuntimeError(f"pytest told of no test: {''.join(lines[-8:])}")
    return counts, failed


def read_summary(lines: list[str]) -> tuple[dict[str, int], list[str]]:
    """Count the verdicts and list the failed tests in the lines of `pytest -v`."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for line in lines:
        found = _VERDICT.search(line)
        if found is None or line.startswith(("FAILED", "ERROR")):
            continue
        kind = "failed" if found["verdict"] == "ERROR" else found["verdict"].lower()
        counts[kind] += 1
        if kind == "failed":
            failed.append(found["test"])
    return counts, failed
