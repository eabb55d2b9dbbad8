"""A command under a pseudo-terminal, as a person uses it: types, presses Ctrl-C, reads what is on the screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

__all__ = ["Terminal"]

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07|\x1b[=>]")
BEGUN = re.compile(r"\x1b(\[[0-9;?]*|[()]|\][^\x07]*)?$")
SIZES = ("COLUMNS", "LINES")
"""What workers of pytest-xdist inherit: the size of the terminal that the tests were started from, or 80 by 24."""

TURN = 0.2
"""Seconds for which one look at the terminal waits."""
PATIENCE = 60.0
"""Seconds for anything to appear, on a machine that has other things to do."""


class Terminal:
    """Runs `python -m penstock` with these arguments on a terminal of its own, inside `with`."""

    def __init__(self, *arguments: str, rows: int = 40, columns: int = 100, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            preexec_fn=lambda: os.login_tty(slave),
            env={
                **{name: value for name, value in os.environ.items() if name not in SIZES},
                "TERM": "xterm-256color",
                "PROMPT_TOOLKIT_NO_CPR": "1",  # nothing here reports where the cursor is
                "PENSTOCK_TEST_MARK": self._mark,
                **environment,
            },
        )
        os.close(slave)
        self.raw = ""
        self.screen = ""
        """All that was written so far, without colours and movements of the cursor."""
        self._rest = ""  # the beginning of an escape sequence that is not complete yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.left_running():
            os.kill(pid, signal.SIGKILL)
        os.close(self._master)

    def type(self, text: str) -> None:
        """Press these keys; a line ends with `\\r`."""
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.type("\x03")

    def expect(self, text: str) -> str:
        """Wait for `text` to follow the text that was waited for last; returns what lies between them."""
        end = time.monotonic() + PATIENCE
        while (found := self.screen.find(text, self._read)) < 0:
            assert time.monotonic() < end, f"{text!r} never came:\n{self.screen[self._read :]}"
            assert self._more(), f"ended without {text!r}:\n{self.screen[self._read :]}"
        between, self._read = self.screen[self._read : found], found + len(text)
        return between

    def ends(self, within: float = 20.0) -> int:
        """Wait for the process to end; returns its exit code. Two seconds are promised on a machine that is not busy.

        Moments in which the whole machine stood still, including this process, hardly count.
        """
        waited, last = 0.0, time.monotonic()
        while self._more():
            now = time.monotonic()
            waited, last = waited + min(now - last, 2 * TURN), now
            assert waited < within, f"still runs:\n{self.screen}"
        return self.process.wait(timeout=20)

    def left_running(self) -> list[int]:
        """Processes that the command started, directly or not, in whatever session they are."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it ended meanwhile, or is not ours
                continue
            if self._mark.encode() in environment:
                found.append(int(entry.name))
        return found

    def _more(self) -> bool:
        """Read what is there; False when the terminal is closed."""
        ready, _, _ = select.select([self._master], [], [], TURN)
        if not ready:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        decoded = self._decoder.decode(piece)
        self.raw += decoded
        text = self._rest + decoded
        cut = BEGUN.search(text)
        self._rest = cut[0] if cut else ""
        self.screen += ESCAPES.sub("", text[: cut.start()] if cut else text)
        return bool(piece)
