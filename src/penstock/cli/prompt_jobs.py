"""The prompts of a command that answers one prompt or a file of them: its options, and a file's lines as jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from penstock.contract.errors import ConfigError, InvalidParameter, RequestError
from penstock.contract.request import Prompt, TextPrompt
from penstock.llm.prompts import as_chat_prompt, as_prompt
from penstock.sampling import SamplingParams

__all__ = ["READ_AHEAD", "Job", "one_prompt", "prompt_options", "read_jobs"]

READ_AHEAD = 1024
"""Prompts queued at once: enough to keep every slot busy, few enough for files of any length."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def prompt_options(command: _Command) -> _Command:
    """Give a command the options of a single prompt: `text` and `chat`."""
    text = click.option("--prompt", "-p", "text", help="Prompt; '-' reads it from standard input.")
    chat = click.option(
        "--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template."
    )
    return text(chat(command))


def one_prompt(text: str, chat: bool) -> Prompt:
    """The prompt that the options ask for; "-" reads it from standard input."""
    content = sys.stdin.read() if text == "-" else text
    return _as_message(content) if chat else as_prompt(content)


def _as_message(content: str) -> Prompt:
    return as_chat_prompt([{"role": "user", "content": content}])


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input file.

    Attributes:
        key: the line's id, or its line number.
        sampling: sampling parameters from the command, overridden by the line's.
        error: why the line cannot be served, with its number; "" if it can.
    """

    key: str
    asked: Prompt
    sampling: dict[str, Any]
    error: str = ""


def read_jobs(source: Path, sampling: dict[str, Any], chat: bool) -> list[Job]:
    """Read every line of the input, before the model is loaded. An invalid request fails only its own line.

    Raises:
        ConfigError: the file cannot be read, a line is not a JSON object, or an id is used twice; names the line.
    """
    jobs: dict[str, Job] = {}
    for number, record in _read_lines(source):
        place = f"{source}:{number}"
        key = str(record.pop("id", number))
        try:
            job = _job(record, key, sampling, chat)
        except RequestError as error:
            job = Job(key, TextPrompt(""), {}, f"line {number}: {error}")
        if job.key in jobs:
            raise ConfigError(place, f"the id {job.key!r} was used on an earlier line")
        jobs[job.key] = job
    return list(jobs.values())


def _read_lines(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--input", f"{source} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source}:{number}", f"is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{source}:{number}", "must be a JSON object")
        yield number, record


def _job(fields: dict[str, Any], key: str, sampling: dict[str, Any], chat: bool) -> Job:
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidParameter("prompt", "give either prompt or messages")
    if "messages" in fields:
        asked: Prompt = as_chat_prompt(fields.pop("messages"))
    else:
        given = fields.pop("prompt")
        asked = _as_message(given) if chat and isinstance(given, str) else as_prompt(given)
    SamplingParams.from_fields(sampling | fields)  # reports a mistake before the model is loaded
    return Job(key, asked, sampling | fields)
