"""`penstock chat`: a conversation in the terminal, streamed, with the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from penstock.cli.imports import lasting_imports
from penstock.cli.options import NOT_OFFLINE, build_configs, config_options, library_options
from penstock.cli.sampling_options import sampling_options, sampling_params
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.errors import RequestError
from penstock.contract.request import ChatPrompt, Message
from penstock.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.llm.offline import LLM

__all__ = ["command"]

HELP = """/clear    forget the conversation (the system prompt stays)
/system   show the system prompt, or set it: /system You are terse.
/help     this list
/exit     leave (so does Ctrl-D); Ctrl-C stops an answer"""


class Conversation:
    """The messages so far, system prompt first when there is one."""

    def __init__(self, system: str) -> None:
        self.system = system
        self._turns: list[Message] = []

    def clear(self) -> None:
        """Forget every turn."""
        self._turns = []

    def prompt(self, question: str) -> ChatPrompt:
        """The conversation with one more question."""
        head = [Message("system", self.system)] if self.system else []
        return ChatPrompt((*head, *self._turns, Message("user", question)))

    def remember(self, question: str, answer: str) -> None:
        """Keep a finished turn."""
        self._turns += [Message("user", question), Message("assistant", answer)]


@click.command("chat", cls=SectionedCommand)
@click.option("--system", default="", help="System prompt.")
@sampling_options(leave_out=frozenset({"best_of", "logprobs_mode", "prompt_logprobs"}), max_tokens=None)
@config_options(EngineConfig, leave_out=NOT_OFFLINE | {"model", "tool_call_parser"})
@click.pass_context
def command(context: click.Context, /, system: str, **_: object) -> None:
    """Talk to MODEL in the terminal; /help lists what can be typed beside questions."""
    (config,) = build_configs(context, EngineConfig)
    sampling_params(context)  # a mistake is told before the model is loaded
    with lasting_imports():
        from penstock.llm.offline import LLM  # brings torch in: not for --help

    with LLM(**library_options(config)) as llm:
        click.echo("Type a question; /help for more, /exit to leave.")
        converse(llm, Conversation(system), sampling_params(context, llm.card.sampling_defaults))


def converse(llm: LLM, conversation: Conversation, params: SamplingParams) -> None:
    """Read, answer, repeat, until the input ends or /exit."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(/exit to leave)")
            continue
        if line == "/exit":
            return
        if line.startswith("/"):
            obey(conversation, line)
        elif line:
            reply(llm, conversation, line, params)


def obey(conversation: Conversation, line: str) -> None:
    """One of the slash commands."""
    word, _, rest = line.partition(" ")
    if word == "/clear":
        conversation.clear()
        click.echo("(the conversation is forgotten)")
    elif word == "/system":
        conversation.system = rest.strip() or conversation.system
        click.echo(conversation.system or "(no system prompt)")
    elif word == "/help":
        click.echo(HELP)
    else:
        click.echo(f"unknown: {word}\n{HELP}")


def reply(llm: LLM, conversation: Conversation, question: str, params: SamplingParams) -> None:
    """Stream one answer and keep the turn; an answer stopped by Ctrl-C is kept as far as it got."""
    answer = ""
    try:
        for piece in stream(llm, conversation.prompt(question), params):
            answer += piece
            click.echo(piece, nl=False)
    except RequestError as error:
        click.echo(f"({error})")
        return
    click.echo()
    conversation.remember(question, answer)


def stream(llm: LLM, prompt: ChatPrompt, params: SamplingParams) -> Iterator[str]:
    """The pieces of one answer as they come."""
    request_id = llm.add_request(prompt, params)
    shown = 0
    try:
        while llm.has_unfinished_requests():
            for output in llm.step():
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)
                if output.error:
                    yield f"\n(the answer failed: {output.error})"
    except KeyboardInterrupt:
        yield " [stopped]"
    finally:  # whoever reads may be interrupted too, between two pieces
        llm.abort_request(request_id)
