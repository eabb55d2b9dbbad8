"""Keeps learned step times in a file from one server to the next.

The cache folder has one small JSON file for each machine, model, form of its weights and number of threads. It is read
once, at the start; it is written when the engine rests after work, and when it ends. A file that is damaged, or of
another version or machine, is ignored and written anew. Losing it costs a few seconds of learning, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.contract.known_times import KnownParts, KnownTimes
from penstock.contract.memory import RunnerFacts
from penstock.core.step_time import StepTimes
from penstock.processor import cpus, processor_name
from penstock.version import __version__

__all__ = ["KeptTimes", "kept_times"]

log = logging.getLogger(__name__)

_MOST_FILES = 64
"""The most files in the folder; the oldest are deleted for new ones."""


_PARTS = 2
"""Version of the parts into which times are divided: files with another number are ignored."""


class KeptTimes:
    """The file of one machine and model. Owned by an assembly.

    Args:
        folder: folder of all these files; made when one is written.
        about: what the times are about. A file about anything else is not read.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._about = {"penstock": __version__, "parts": _PARTS, **about}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:32]}.json"
        self._written = -1  # how many steps the last written times were learned from

    def read(self) -> KnownTimes | None:
        """What an earlier process learned, with more doubt than it had; None if there is no valid file."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            log.warning("step times are not read from %s: %s", self.path, error)
            return None
        try:
            data = json.loads(text)
            if data["about"] != self._about:
                log.info("step times in %s are of another version or machine, and are ignored", self.path)
                return None
            times = _times(data["times"])
            StepTimes(known=times)  # checks the number of parts
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, ConfigError) as error:
            log.warning("step times in %s are damaged, and are ignored: %s", self.path, error)
            return None
        return times.later()

    def write(self, times: KnownTimes | None) -> None:
        """Write the times, unless nothing was learned since the last write. A failure is logged."""
        if times is None or times.steps.learned == self._written:
            return
        self._written = times.steps.learned
        text = json.dumps({"about": self._about, "times": asdict(times)}, indent=1) + "\n"
        partial = self.path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path)
            self._make_room()
        except OSError as error:
            log.warning("step times are not kept in %s: %s", self.path, error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _make_room(self) -> None:
        files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST_FILES]:
            file.unlink(missing_ok=True)


def kept_times(cache_dir: Path, facts: RunnerFacts) -> KeptTimes:
    """The file for the times of this model on this machine."""
    config, memory = facts.config, facts.memory
    about = {
        "processor": processor_name(),
        "cpus": cpus(),
        "device": config.device,
        "instruction_set": "" if facts.contract is None else facts.contract.instruction_set,
        "threads": config.threads,
        "ranks": config.tensor_parallel,
        "model": facts.model_digest.hex(),
        "weights": memory.weight_formats,
        "keys_and_values": memory.kv_dtype,
        "draft_weights": memory.draft_formats,
    }
    return KeptTimes(cache_dir / "step-times", about)


def _times(data: Mapping[str, Any]) -> KnownTimes:
    """The times from which `asdict` made `data`.

    Raises:
        ConfigError: a number is impossible.
        KeyError, TypeError, ValueError: `data` is something else.
    """
    drafts = tuple((_whole(rows), _parts(parts)) for rows, parts in data["drafts"])
    if type(data["chunks"]) is not bool:
        raise TypeError("chunks is neither true nor false")
    guessing, reading = (None if data[name] is None else _parts(data[name]) for name in ("guessing", "reading"))
    return KnownTimes(_parts(data["steps"]), data["chunks"], guessing, drafts, reading)


def _parts(data: Mapping[str, Any]) -> KnownParts:
    seconds, doubts = (tuple(float(each) for each in data[name]) for name in ("seconds", "doubts"))
    return KnownParts(seconds, doubts, float(data["pace"]), _whole(data["learned"]))


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is no whole number")
    return number
