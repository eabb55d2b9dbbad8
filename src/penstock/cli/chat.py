"""`penstock chat`: a conversation in the terminal, streamed, with the engine in this process or with a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from penstock.cli.chat_input import open_input
from penstock.cli.chat_partner import EnginePartner, Partner
from penstock.cli.chat_screen import Screen, open_screen
from penstock.cli.chat_session import NOT_IN_CHAT, SETTABLE, Conversation, ReplyMeter
from penstock.cli.fallback import tell_torch_computes
from penstock.cli.interrupts import interrupts_taken
from penstock.cli.options import NOT_OFFLINE, build_configs, config_options, library_options, only_adapter
from penstock.cli.sampling_options import sampling_options, sampling_params
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, PenstockError
from penstock.imports import lasting_imports
from penstock.sampling import PARAMETERS, Parameter

__all__ = ["Chat", "command"]

HELP = {
    "/set": "list the sampling parameters; /set NAME VALUE sets one, /set NAME default resets it",
    "/system": "show the system prompt; /system TEXT sets it, /system - removes it",
    "/retry": "answer the last question again",
    "/stats": "speed of this conversation, and how much of the context it takes",
    "/save": "/save FILE: write the conversation as JSON",
    "/load": "/load FILE: continue a saved conversation, or a list of messages",
    "/clear": "forget the conversation (system prompt and parameters stay)",
    "/help": "this list",
    "/exit": "leave (so does Ctrl-D); Ctrl-C stops an answer",
}
MORE_LINES = "A backslash at the end of a line, or Alt-Enter, begins another line of the question."
WIDTH = 100


@click.command("chat", cls=SectionedCommand)
@click.option("--system", default="", help="System prompt.")
@click.option(
    "--base-url",
    default="",
    metavar="URL",
    help="Talk to a running server, such as http://127.0.0.1:8000, instead of loading a model; MODEL is then a name"
    " that the server offers, by default the first.",
)
@click.option(
    "--api-key",
    default="",
    help="Bearer token for that server; by default the value of PENSTOCK_API_KEY.",
)
@sampling_options(leave_out=NOT_IN_CHAT, max_tokens=None)
@config_options(EngineConfig, leave_out=NOT_OFFLINE | {"model", "tool_call_parser"})
@click.pass_context
def command(context: click.Context, /, system: str, base_url: str, api_key: str, **_: object) -> None:
    """Chat with MODEL in the terminal; type /help for a list of commands."""
    (config,) = build_configs(context, EngineConfig)
    sampling_params(context)  # report values out of range before the model is loaded
    conversation = Conversation(system, _chosen(context))
    with _partner(context, config, base_url, api_key) as partner, interrupts_taken():
        from penstock.weights.locate import default_cache_dir

        screen = open_screen()
        screen.say(f"{partner.name}: type a question; /help for more, /exit to leave.")
        Chat(partner, conversation, screen).run(open_input(tuple(HELP), default_cache_dir(os.environ)))


@contextmanager
def _partner(context: click.Context, config: EngineConfig, base_url: str, api_key: str) -> Iterator[Partner]:
    """The partner that the options select."""
    if base_url:
        from penstock.cli.chat_server import ServerPartner

        _refuse_engine_options(context)
        yield ServerPartner(
            base_url,
            config.model if _given(context, "model") else "",
            api_key or os.environ.get("PENSTOCK_API_KEY", ""),
        )
        return
    if api_key:
        raise ConfigError("api_key", "has no meaning without --base-url")
    adapter = only_adapter(config)
    with lasting_imports():
        from penstock.llm.offline import LLM  # imports torch: too slow for --help
    tell_torch_computes(config.device)
    with LLM(**library_options(config)) as llm:
        yield EnginePartner(llm, adapter)


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (None, click.core.ParameterSource.DEFAULT)


def _refuse_engine_options(context: click.Context) -> None:
    """Refuse engine options with --base-url: a server that is already running does not read them."""
    for name in (*EngineConfig.__dataclass_fields__, "config_file"):
        if name != "model" and _given(context, name):
            option = "--config" if name == "config_file" else name
            raise ConfigError(option, "has no meaning with --base-url: the server has options of its own")


def _chosen(context: click.Context) -> dict[str, Any]:
    """The sampling parameters that the command line names."""
    names = (each.name for each in PARAMETERS if _given(context, each.name))
    values = {name: context.params[name] for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class Chat:
    """Reads, answers, repeats. Owns the conversation."""

    def __init__(self, partner: Partner, conversation: Conversation, screen: Screen) -> None:
        self._partner = partner
        self._conversation = conversation
        self._screen = screen

    def run(self, read: Callable[[], str]) -> None:
        """Run until the input ends, or /exit."""
        while True:
            try:
                line = read().strip()
                if line == "/exit":
                    return
                self.take(line)
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                self._screen.say("\n(/exit to leave)")

    def take(self, line: str) -> None:
        """Handle a question or a slash command; a mistake is reported, and changes nothing."""
        try:
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)
        except PenstockError as error:
            self._screen.say(f"({error})")

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/system": self._system,
            "/retry": self._retry,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/clear": self._clear,
            "/help": self._help,
        }
        if word not in commands:
            self._screen.say(f"unknown: {word}")
            word = "/help"
        commands[word](rest)

    def _answer(self, question: str) -> None:
        """Stream one answer and keep the turn; of an answer that Ctrl-C stopped, keep what has arrived."""
        conversation, answer, stopped = self._conversation, "", False
        asked = conversation.asking(question)
        meter = ReplyMeter()
        with self._screen.answer() as view:
            try:
                with closing(self._partner.stream(asked, conversation.params)) as pieces:
                    for piece in pieces:
                        meter.take(piece)
                        answer += piece.text
                        view.write(piece.text, piece.reasoning)
            except KeyboardInterrupt:
                stopped = True
                view.write(" [stopped]")
        reply = meter.reply(stopped=stopped)
        conversation.remember(question, answer, reply)
        self._screen.aside(reply.line(self._partner.context))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name and value.strip():
            self._conversation.choose(name, value.strip())
            name = name.replace("-", "_")
        elif name and name.replace("-", "_") not in SETTABLE:
            self._conversation.choose(name, "")  # raises: there is no such parameter
        for parameter in SETTABLE.values():
            if name in ("", parameter.name):
                self._screen.say(self._setting(parameter, whole=bool(name)))

    def _setting(self, parameter: Parameter, *, whole: bool) -> str:
        """A parameter, its value (starred if it was chosen) and its meaning, cut to a line unless `whole`."""
        chosen = self._conversation.params
        default = None if parameter.name == "max_tokens" else parameter.default
        value = chosen.get(parameter.name, default)
        line = f"{'*' if parameter.name in chosen else ' '} {parameter.name:26} {value!s:8} {parameter.doc}"
        return line if whole or len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = "" if rest == "-" else rest
        self._screen.say(self._conversation.system or "(no system prompt)")

    def _retry(self, _: str) -> None:
        if not self._conversation.turns:
            self._screen.say("(nothing was asked yet)")
            return
        earlier = self._conversation.turns
        try:
            self._answer(self._conversation.take_back())
        except PenstockError:
            self._conversation.turns = earlier
            raise

    def _stats(self, _: str) -> None:
        replies, context = self._conversation.replies, self._partner.context
        timed = [reply for reply in replies if reply.rate]
        rate = sum(reply.rate for reply in timed) / len(timed) if timed else 0.0
        used = replies[-1].used if replies and self._conversation.turns else 0
        at_least = "" if all(reply.counted for reply in replies) else "at least "
        tokens = f"{at_least}{sum(reply.tokens for reply in replies)} tokens"
        self._screen.say(
            f"model     {self._partner.name}\n"
            f"answers   {len(replies)} of {tokens}, {rate:.1f} tokens/s\n"
            f"context   {used} of {context or 'unknown'} tokens"
        )

    def _save(self, rest: str) -> None:
        self._conversation.save(_path("/save", rest))
        self._screen.say(f"(saved to {rest})")

    def _load(self, rest: str) -> None:
        self._conversation.load(_path("/load", rest))
        self._screen.say(f"({len(self._conversation.turns) // 2} turns from {rest})")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._screen.say("(the conversation is forgotten)")

    def _help(self, _: str) -> None:
        lines = [f"{name:9} {meaning}" for name, meaning in HELP.items()]
        self._screen.say("\n".join([*lines, MORE_LINES]))


def _path(word: str, rest: str) -> Path:
    if not rest:
        raise ConfigError(word, "name a file")
    return Path(rest)
