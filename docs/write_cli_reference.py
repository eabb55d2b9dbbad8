"""Writes docs/cli.md from the commands themselves: `.venv/bin/python docs/write_cli_reference.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from penstock.cli import penstock
from penstock.cli.sections import OWN, section_of

PAGE = Path(__file__).parent / "cli.md"

SHARED = {
    "Engine": ("serve", "Of the model and the engine: every command that runs a model takes them."),
    "Sampling": ("generate", "How `generate` and `chat` choose tokens and stop; [what each means](sampling.md)."),
}
"""Sections that several commands have: the command whose defaults are shown, and what the options are for."""


def page() -> str:
    """Return docs/cli.md."""
    commands = dict(_commands(penstock, "penstock"))
    parts = [INTRODUCTION]
    parts += [_command(path, command, commands) for path, command in commands.items()]
    for title, (owner, purpose) in SHARED.items():
        options = _options(commands[f"penstock {owner}"], title)
        parts.append(f"\n## {title} options\n\n{purpose}\n\n{_table(options)}")
    return "".join(parts)


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")


def _command(path: str, command: click.Command, commands: dict[str, click.Command]) -> str:
    usage = " ".join([path, *command.collect_usage_pieces(click.Context(command, info_name=path))])
    text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n")).strip()
    level = "##" if path.count(" ") == 1 else "###"
    parts = [f"\n{level} {path}\n\n{text}\n\n```text\n{usage}\n```\n"]
    sections = dict.fromkeys(section_of(option) for option in command.params if isinstance(option, click.Option))
    for title in (OWN, *(each for each in sections if each not in (*SHARED, OWN))):
        options = _options(command, title)
        if options:
            heading = "" if title == OWN else f"\n{title} options:\n"
            parts.append(f"{heading}\n{_table(options)}")
    parts += [
        _shared(command, commands[f"penstock {SHARED[title][0]}"], title) for title in SHARED if title in sections
    ]
    return "".join(parts)


def _shared(command: click.Command, owner: click.Command, title: str) -> str:
    """Say which of a shared section's options a command takes, and which have defaults of its own."""
    shown = {option.name: option for option in _options(owner, title)}
    taken = {option.name: option for option in _options(command, title)}
    sentence = f"Also the [{title.lower()} options](#{title.lower()}-options)"
    missing = [_flag(option) for name, option in shown.items() if name not in taken]
    if missing:
        sentence += f", but for {_listed(missing)}"
    extra = [_flag(option) for name, option in taken.items() if name not in shown]
    assert not extra, f"{extra} would be described nowhere"
    other = [option for name, option in taken.items() if option.default != shown[name].default]
    defaults = [f"{_flag(option)} is {_default(option) or 'unset'} by default" for option in other]
    return f"\n{sentence}{'; ' if defaults else ''}{_listed(defaults)}.\n"


def _options(command: click.Command, title: str) -> list[click.Option]:
    options = (each for each in command.params if isinstance(each, click.Option))
    return [each for each in options if not each.hidden and section_of(each) == title]


def _table(options: Iterable[click.Option]) -> str:
    rows = [f"| {_spelled(option)} | {_default(option)} | {_meaning(option)} |\n" for option in options]
    return "".join(["| option | default | meaning |\n|---|---|---|\n", *rows])


def _spelled(option: click.Option) -> str:
    """Return every name of an option, with what it takes: `-i`, `--input FILE`."""
    names = sorted([*option.opts, *option.secondary_opts], key=lambda name: name.startswith("--"))
    if not option.is_flag and not isinstance(option.type, click.Choice):
        names[-1] += f" {option.make_metavar(click.Context(click.Command('any'))).removesuffix(' RANGE')}"
    return _cell(", ".join(f"`{name}`" for name in names))


def _meaning(option: click.Option) -> str:
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    said = f"One of {_listed([f'`{choice}`' for choice in choices])}. " if choices else ""
    return _cell(said + (option.help or ""))


def _default(option: click.Option) -> str:
    given: Any = option.default
    if option.required:
        return "required"
    if option.is_flag and option.secondary_opts:
        return f"`{(option.opts if given else option.secondary_opts)[0]}`"
    if not isinstance(given, str | int | float | tuple) or isinstance(given, bool) or given in ("", ()):
        return ""
    return f"`{', '.join(map(str, given)) if isinstance(given, tuple) else given}`"


def _flag(option: click.Option) -> str:
    return f"`{option.opts[0]}`"


def _listed(items: list[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


INTRODUCTION = """\
# Command line

Written by `docs/write_cli_reference.py` from the commands themselves; a test holds the two equal.
`penstock COMMAND --help` says the same.

**MODEL** is a name that `penstock models` lists, a directory in Hugging Face layout, a `.gguf` file, or `org/name` on
the Hugging Face hub (extra `penstock[hub]`). Left out, it is the default model, which is fetched when it is not there.

**Options in a file.** `--config FILE` reads options from YAML, with dashes or underscores. A flag wins over the file,
the file over the default. A key that is no option of the command is an error.

```yaml
max-num-seqs: 32
kv-cache-memory: 4GiB
quantization: int8
```

**Environment.** No variable stands in for an option, but `PENSTOCK_KV_STORE`, which says what `--kv-store` is where
nothing else does. `PENSTOCK_CACHE` is the folder of fetched models (else
`$XDG_CACHE_HOME/penstock` or `~/.cache/penstock`); `PENSTOCK_API_KEY`, `PENSTOCK_ADMIN_KEY` and
`PENSTOCK_GATEWAY_KEY` each add a key to `penstock serve`. `PENSTOCK_ISA` makes every command use the compiled kernels
of one instruction set (`avx512_amx`, `avx512_bf16`, `avx512`, `avx2` or `portable`) instead of the best that the
machine has, or with `torch` none of them ([what for](tuning.md#measure)).

**Servers that run** leave a file in `servers/` of the cache directory while they listen; `penstock ps` lists them:

```text
    PID  MODEL                       FOR  URL
   4711  smollm2-135m-instruct    12 min  http://127.0.0.1:8000
```

`penstock rm MODEL` asks (`--yes` does not) and says how many bytes were freed. Beside `penstock chat`:
[what can be typed there](chat.md).

**Exit codes.** 0: done. 1: our failure, or `penstock verify` could not prove exactness. 2: a mistake in what was given,
said in one line on standard error. 130: interrupted, in two seconds at most. 143: SIGTERM ended it; `quantize` removes
its unfinished file before that. `serve` ends with 0 after Ctrl-C or SIGTERM: it was told to stop, and did so in order.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
