"""How questions are typed: with history, several lines and completion at a terminal, line by line from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.chat_session import DEFAULT, SETTABLE
from penstock.cli.interrupts import wakeups_lent

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

__all__ = ["HISTORY", "open_input", "open_history"]

HISTORY = "chat-history"
"""The file's name, in the cache directory."""

MARK = "> "
OWNER_ONLY = 0o600
WITH_FILES = ("/save", "/load")


def open_input(commands: Sequence[str], cache_dir: Path) -> Callable[[], str]:
    """A function that reads the next question.

    The function raises EOFError at the end of the input, and KeyboardInterrupt on Ctrl-C.

    Args:
        commands: the slash commands, for completion.
        cache_dir: where the history is kept.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input(MARK)
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.formatted_text import ANSI

    session: PromptSession[str] = PromptSession(
        ANSI(f"\x1b[1;32m{MARK}\x1b[0m"),
        multiline=True,
        prompt_continuation=lambda _width, _number, wrapped: "  " if wrapped else ". ",
        history=open_history(cache_dir / HISTORY),
        completer=_completer(commands),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        key_bindings=_keys(),
        reserve_space_for_menu=4,
    )

    def read() -> str:
        with wakeups_lent():  # its event loop handles signals itself
            return session.prompt()

    return read


def open_history(path: Path) -> History:
    """Earlier questions, in a file that only its owner can read; in memory if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, OWNER_ONLY))
        path.chmod(OWNER_ONLY)  # the file may have existed with wider access
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    """Enter sends, unless the line ends with a backslash; Alt-Enter begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(commands: Sequence[str]) -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document as Typed

    class Commands(Completer):
        """Completes slash commands, then their arguments."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            """See `Completer`."""
            before = document.text_before_cursor
            if not before.startswith("/") or "\n" in before:
                return
            word, space, rest = before.partition(" ")
            if space and word in WITH_FILES:
                yield from PathCompleter(expanduser=True).get_completions(Typed(rest), complete_event)
                return
            for each in candidates(word, space, rest, commands):
                typed = rest.rpartition(" ")[2] if space else word
                yield Completion(each, -len(typed))

    return Commands()


def candidates(word: str, space: str, rest: str, commands: Sequence[str]) -> list[str]:
    """Completions for `rest`, typed after `word` and a space; for `word` itself if there is no space yet."""
    if not space:
        return [each for each in commands if each.startswith(word)]
    if word != "/set":
        return []
    name, more, value = rest.partition(" ")
    if not more:
        return [each for each in SETTABLE if each.startswith(name)]
    return [DEFAULT] if DEFAULT.startswith(value) else []
