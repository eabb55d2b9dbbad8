"""Shows a conversation: streamed markdown on a terminal, plain text elsewhere.

A block of markdown (a paragraph, a list, a fenced piece of code) is redrawn with each piece until it is complete, then
printed for good. So a long answer scrolls like any text, and printed text never moves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["AnswerView", "PlainScreen", "RichScreen", "Screen", "open_screen", "split_blocks"]

REDRAW_SECONDS = 0.06
"""Shortest time between two drawings of a block: the eye sees no more, and the model needs the processor."""

MOST_SHARE = 0.1
"""Share of the time that may go into drawing: an endless block takes longer with each piece."""

LONGEST_PAUSE = 2.0
"""Longest pause between two drawings in seconds: on a busy machine, one slow drawing predicts little of the next."""

FENCES = ("```", "~~~")


class AnswerView(Protocol):
    """Displays one answer."""

    def write(self, text: str, reasoning: str = "") -> None:
        """Add new text and reasoning."""
        ...


class Screen(Protocol):
    """Displays a conversation."""

    def say(self, text: str) -> None:
        """Show a message of the program."""
        ...

    def aside(self, text: str) -> None:
        """Show a less important line; nothing if the output is piped."""
        ...

    def answer(self) -> AbstractContextManager[AnswerView]:
        """A context in which an answer is written."""
        ...


def open_screen() -> Screen:
    """Colours and markdown on a terminal that can show them, else plain text."""
    if not sys.stdout.isatty():
        return PlainScreen()
    from rich.console import Console  # takes a tenth of a second, which pipes need not wait for

    console = Console(highlight=False)
    return PlainScreen() if console.is_dumb_terminal else RichScreen(console)


class PlainScreen:
    """Text as it arrives, without markup."""

    def say(self, text: str) -> None:
        """See `Screen.say`."""
        click.echo(text)

    def aside(self, text: str) -> None:
        """See `Screen.aside`."""

    @contextmanager
    def answer(self) -> Iterator[PlainScreen]:
        """See `Screen.answer`."""
        try:
            yield self
        finally:
            click.echo()

    def write(self, text: str, reasoning: str = "") -> None:
        """See `AnswerView.write`."""
        click.echo(text, nl=False)


class RichScreen:
    """Markdown and colours."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """See `Screen.say`."""
        self._console.print(text, style="cyan", markup=False)

    def aside(self, text: str) -> None:
        """See `Screen.aside`."""
        self._console.print(text, style="dim", markup=False)
        self._console.print()

    def answer(self) -> StreamedMarkdown:
        """See `Screen.answer`."""
        return StreamedMarkdown(self._console)


class StreamedMarkdown:
    """One answer: finished blocks above, the block being written below. A context manager."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._text = ""
        self._thoughts = ""
        self._next = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.update("")
        self._live.stop()
        self._print_thoughts()
        if self._text.strip():
            self._print(self._text)

    def write(self, text: str, reasoning: str = "") -> None:
        """See `AnswerView.write`."""
        if text.strip():
            self._print_thoughts()
        self._thoughts += reasoning
        done, self._text = split_blocks(self._text + text)
        for block in done:
            self._print(block)
        now = time.monotonic()
        if done or now >= self._next:
            self._live.update(_Tail(self._thoughts or self._text, thoughts=bool(self._thoughts)), refresh=True)
            took = time.monotonic() - now
            self._next = now + min(max(REDRAW_SECONDS, took / MOST_SHARE), LONGEST_PAUSE)

    def _print(self, block: str) -> None:
        self._console.print(_Tail(block, whole=True))
        self._console.print()

    def _print_thoughts(self) -> None:
        if self._thoughts.strip():
            self._console.print(_Tail(self._thoughts, thoughts=True, whole=True))
            self._console.print()
        self._thoughts = ""


class _Tail:
    """A block as markdown, or as dim text; of an unfinished block only the end is shown, as much as fits the screen."""

    def __init__(self, text: str, *, thoughts: bool = False, whole: bool = False) -> None:
        self._text, self._thoughts, self._whole = text, thoughts, whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markdown import Markdown
        from rich.segment import Segment
        from rich.text import Text

        drawn = Text(self._text.strip(), style="dim italic") if self._thoughts else Markdown(self._text.strip("\n"))
        lines = console.render_lines(drawn, options.update(height=None), pad=False)
        shown = lines if self._whole else lines[-max(1, console.height - 2) :]
        for number, line in enumerate(shown, start=1):
            yield from line
            if self._whole or number < len(shown):  # a block to be redrawn must end at the cursor
                yield Segment.line()


def split_blocks(text: str) -> tuple[list[str], str]:
    """The blocks of markdown that are complete, and the rest.

    A block ends with an empty line outside fenced code; lines that belong together, such as list items and indented
    lines, stay together.
    """
    lines = text.split("\n")
    blocks: list[str] = []
    block: list[str] = []
    fence = ""
    for number, line in enumerate(lines[:-1]):  # the last line may be incomplete
        block.append(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) and not stripped.strip(fence[0]) else fence
        elif stripped.startswith(FENCES):
            fence = stripped[:3]
        elif not stripped and any(map(str.strip, block)) and _ends_before(lines[number + 1 :], block):
            blocks.append("\n".join(block))
            block = []
    return blocks, "\n".join([*block, lines[-1]])


def _ends_before(rest: list[str], block: list[str]) -> bool:
    """Whether text after an empty line has arrived, and does not belong to the block before."""
    following = next((line for line in rest if line.strip()), "")
    if not following.strip():
        return False
    item = _is_item(next(line for line in block if line.strip()))
    return not (item and (following[0] in " \t" or _is_item(following)))


def _is_item(line: str) -> bool:
    marker = line.strip().split(" ", 1)[0]
    return marker in ("-", "*", "+") or marker.rstrip(".)").isdigit()  # the dot after a number may not have arrived yet
