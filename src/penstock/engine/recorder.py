"""Writes the scheduler's inputs and decisions to a file, as a trace that `penstock.core.replaying` replays.

A trace holds token ids of prompts and answers, so it is as private as they are. Recording never stops the engine: if
the file can no longer be written, that is logged once and recording ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from penstock.contract.errors import ConfigError
from penstock.contract.plan import Draft, StepPlan, StepResult
from penstock.contract.ports import Clock
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.trace import (
    encode_abort,
    encode_drafts,
    encode_drop,
    encode_fail,
    encode_header,
    encode_plan,
    encode_reset,
    encode_result,
    encode_stored,
    encode_submit,
    stamped,
)

__all__ = ["NoRecorder", "Recorder"]

log = logging.getLogger(__name__)


class Recorder:
    """Appends records to a trace file. Owned by the engine; not thread-safe.

    What a request's time was spent on follows from when events happened, so the methods take that instant as `at`, from
    the clock of arrival times; None is now.

    Args:
        path: path of the file, which is overwritten.
        config: the scheduler's configuration.
        clock: the clock of arrival times; without it records have no times.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, path: Path, config: SchedulerConfig, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock
        try:
            self._file: TextIO | None = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("record", f"{path} cannot be written: {error.strerror}") from error
        self._write(encode_header(config))

    def submitted(self, request: SequenceRequest, at: float | None = None) -> None:
        """A sequence was queued."""
        self._write(encode_submit(request), at)

    def aborted(self, seq_id: str, at: float | None = None) -> None:
        """A sequence was ended from outside the scheduler."""
        self._write(encode_abort(seq_id), at)

    def reset(self) -> None:
        """The prefix cache was reset."""
        self._write(encode_reset())

    def dropped(self, at: float | None = None) -> None:
        """The plans in flight were taken back."""
        self._write(encode_drop(), at)

    def failed(self, killed: bool, at: float | None = None) -> None:
        """A plan in flight failed as a whole, and all of them were taken back; see `Scheduler.fail_step`."""
        self._write(encode_fail(killed), at)

    def drafted(self, drafts: tuple[Draft, ...]) -> None:
        """These drafts are given to the next plan."""
        self._write(encode_drafts(drafts))

    def stored(self, seq_id: str, blocks: int) -> None:
        """This many leading blocks of a waiting sequence were found in the store."""
        self._write(encode_stored(seq_id, blocks))

    def planned(self, plan: StepPlan, at: float | None = None) -> None:
        """A step was decided."""
        self._write(encode_plan(plan), at)

    def ran(self, result: StepResult, at: float | None = None) -> None:
        """A step was computed; all records up to this one survive a crash of this process."""
        self._write(encode_result(result), at)
        self._attempt(lambda file: file.flush())

    def close(self) -> None:
        """End the trace; later calls record nothing."""
        self._attempt(lambda file: file.close())
        self._file = None

    def _write(self, line: str, at: float | None = None) -> None:
        if self._clock is not None:
            line = stamped(line, self._clock.now() if at is None else at)
        self._attempt(lambda file: file.write(line + "\n"))

    def _attempt(self, work: Callable[[TextIO], object]) -> None:
        """Do something with the file while there is one; a failure is logged and ends the recording."""
        file = self._file
        if file is None:
            return
        try:
            work(file)
        except OSError as error:
            log.error("recording to %s ended: %s", self._path, error.strerror)
            self._file = None
            with suppress(OSError):  # what the file still holds has nowhere to go
                file.close()


class NoRecorder:
    """Records nothing: the recorder of an engine that is not asked to record."""

    def submitted(self, request: SequenceRequest, at: float | None = None) -> None:
        """See `Recorder`."""

    def aborted(self, seq_id: str, at: float | None = None) -> None:
        """See `Recorder`."""

    def reset(self) -> None:
        """See `Recorder`."""

    def dropped(self, at: float | None = None) -> None:
        """See `Recorder`."""

    def failed(self, killed: bool, at: float | None = None) -> None:
        """See `Recorder`."""

    def drafted(self, drafts: tuple[Draft, ...]) -> None:
        """See `Recorder`."""

    def stored(self, seq_id: str, blocks: int) -> None:
        """See `Recorder`."""

    def planned(self, plan: StepPlan, at: float | None = None) -> None:
        """See `Recorder`."""

    def ran(self, result: StepResult, at: float | None = None) -> None:
        """See `Recorder`."""

    def close(self) -> None:
        """See `Recorder`."""
