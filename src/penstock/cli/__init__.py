"""The command line: parses, calls, prints. The only package that reads the environment.

Exit codes: 0 done, 1 our failure, 2 a mistake in the user's input (one line names it), 130 interrupted.
"""

from __future__ import annotations

import difflib
import re
import sys

import click

from penstock.cli.interrupts import INTERRUPTED, ends_when_interrupted, forget_uncaught_interrupt, say_interrupted
from penstock.contract.errors import PenstockError, RequestError, SetupError
from penstock.version import __version__

__all__ = ["main", "run"]

COMMANDS = {
    "serve": "Serve a model over HTTP, compatible with OpenAI's API.",
    "fleet": "Serve a model over HTTP from several engines, on Ray.",
    "chat": "Talk to a model in the terminal.",
    "generate": "Continue one prompt, or a JSONL file of prompts.",
    "run-batch": "Answer an OpenAI batch file, offline.",
    "pull": "Fetch a model and verify it.",
    "models": "List the models that can be named, and what is on disk.",
    "quantize": "Write a model as a GGUF file or as safetensors, in fewer bits or as it is.",
    "convert": "Turn a GPT-2 in a .pt file into a model directory.",
    "tokenizer": "Write a model's tokenizer as a directory that transformers reads.",
    "rm": "Remove a model from the cache.",
    "cache": "List, measure, clear and verify KV blocks kept in files.",
    "ps": "List the servers running on this machine.",
    "explain": "Show where the time of a request went, from a running server or a record.",
    "served": "List, load, unload and pin the models of a running server.",
    "show": "Show what a model is made of, down to every operation of a step.",
    "bench": "Measure throughput, a server under load, single kernels, or what quantisation costs.",
    "verify": "Prove on this machine that no batch, chunk, cache or thread count changes an answer.",
    "replay": "Replay a record on today's scheduler: check its plans, or simulate other options.",
    "plan": "Find how much of a workload this machine holds within bounds, and what would hold more.",
    "certify": "Answer prompts, and write certificates that anyone with the model can verify.",
    "completion": "Print a shell script that completes commands, options and models.",
}


_OPTION = re.compile(r"[a-z]+(_[a-z]+)*")


class _Commands(click.Group):
    """Loads a command's module only when it is called, so that `--help` and `--version` are immediate."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was named, or an error that suggests similar names."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            likely = difflib.get_close_matches(args[0], COMMANDS, n=2)
            meant = f"Did you mean {' or '.join(repr(each) for each in likely)}?" if likely else "See penstock --help."
            ctx.fail(f"No such command {args[0]!r}. {meant}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = __import__(f"penstock.cli.{cmd_name.replace('-', '_')}", fromlist=["command"])
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="penstock")
def penstock() -> None:
    """Penstock: an LLM inference engine and server.

    `penstock serve` fetches a small model and serves it; then open http://127.0.0.1:8000. `penstock COMMAND --help`
    describes a command and its options.
    """


def main() -> None:
    """Run the command line and exit with its code."""
    run(penstock, "penstock")


def run(command: click.Command, name: str) -> None:
    """Run a command under this name and exit with its code; user errors are one line, not a traceback."""
    try:
        with ends_when_interrupted():
            code = _exit_code(command, name)
    except KeyboardInterrupt:
        sys.stdout.flush()
        say_interrupted()
        forget_uncaught_interrupt()
        sys.exit(INTERRUPTED)
    sys.exit(code)


def _exit_code(command: click.Command, name: str) -> int:
    try:
        return command.main(prog_name=name, standalone_mode=False) or 0
    except click.ClickException as mistake:
        mistake.show()
        return 2
    except (SetupError, RequestError) as mistake:
        click.echo(f"penstock: {_with_flag(mistake)}", err=True)
        return 2
    except PenstockError as failure:
        click.echo(f"penstock: {failure}", err=True)
        return 1


def _with_flag(mistake: PenstockError) -> str:
    """The message, with an option at its beginning spelled as users type it: `--max-num-seqs` for `max_num_seqs`."""
    option = getattr(mistake, "option", "") or getattr(mistake, "param", "")
    said = str(mistake)
    if _OPTION.fullmatch(option) and option != "model" and said.startswith(option):
        return f"--{option.replace('_', '-')}{said.removeprefix(option)}"
    return said
