"""How a conversation looks: markdown as it streams where the output is a terminal, plain text elsewhere.

A block of markdown (a paragraph, a list, a fenced piece of code) is drawn again with each piece until it is complete,
then it is printed for good. So a long answer scrolls as any text does, and what was printed never moves.
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
"""Between two drawings of a block: an eye sees no more, and the model needs the processor."""

MOST_SHARE = 0.1
"""Of the time may go into drawing: a block without an end takes longer with each piece."""

LONGEST_PAUSE = 2.0
"""Seconds between two drawings at most: one that took long says little of the next where the machine was busy."""

FENCES = ("```", "~~~")


class AnswerView(Protocol):
    """Where one answer is written."""

    def write(self, text: str, reasoning: str = "") -> None:
        """Add what came."""
        ...


class Screen(Protocol):
    """Where a conversation is seen."""

    def say(self, text: str) -> None:
        """What the program says."""
        ...

    def aside(self, text: str) -> None:
        """A line that matters less; where text is piped, none."""
        ...

    def answer(self) -> AbstractContextManager[AnswerView]:
        """A context in which an answer is written."""
        ...


def open_screen() -> Screen:
    """Colours and markdown on a terminal that can show them, else plain text."""
    if not sys.stdout.isatty():
        return PlainScreen()
    from rich.console import Console  # a tenth of a second that pipes need not wait

    console = Console(highlight=False)
    return PlainScreen() if console.is_dumb_terminal else RichScreen(console)


class PlainScreen:
    """Text as it comes."""

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
    """One answer, its finished blocks above and the one being written below. Use with `with`."""

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
    """A block as markdown, or as dim text; of one that is being written, what fits the screen: its end."""

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
            if self._whole or number < len(shown):  # what is drawn again ends where the cursor is
                yield Segment.line()


def split_blocks(text: str) -> tuple[list[str], str]:
    """The blocks of markdown that are complete, and the rest.

    A block ends with an empty line outside of fenced code; what belongs together by indentation, as the items of a
    list do, stays together.
    """
    lines = text.split("\n")
    blocks: list[str] = []
    block: list[str] = []
    fence = ""
    for number, line in enumerate(lines[:-1]):  # the last line may go on
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
    """Whether what follows an empty line is seen, and does not belong to the block before."""
    following = next((line for line in rest if line.strip()), "")
    if not following.strip():
        return False
    item = _is_item(next(line for line in block if line.strip()))
    return not (item and (following[0] in " \t" or _is_item(following)))


def _is_item(line: str) -> bool:
    marker = line.strip().split(" ", 1)[0]
    return marker in ("-", "*", "+") or marker.rstrip(".)").isdigit()  # its dot may be yet to come
