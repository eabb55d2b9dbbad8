"""The layout of a command's help: what MODEL may be, then the command's own options, then shared options.

Decides only headings and their order. Does not know options: each names its section.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from penstock.contract.config import DEFAULT_MODEL, EngineConfig
from penstock.contract.options import option_help

__all__ = ["OWN", "SectionedCommand", "SectionedOption", "complete_model", "model_argument", "section_of"]

OWN = "Options"
"""The section of a command's own options, which comes first."""


class SectionedOption(click.Option):
    """An option with a heading."""

    def __init__(self, *names: Any, section: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.section = section


def section_of(parameter: click.Parameter) -> str:
    """The heading of an option."""
    return parameter.section if isinstance(parameter, SectionedOption) else OWN


class SectionedCommand(click.Command):
    """A command whose help lists its options under headings, in the order of their declaration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write MODEL, if the command takes one, and every option in its section."""
        if any(parameter.name == "model" and isinstance(parameter, click.Argument) for parameter in self.params):
            with formatter.section("Model"):
                formatter.write_dl([("MODEL", f"{option_help(EngineConfig, 'model')}  [default: {DEFAULT_MODEL}]")])
        sections: dict[str, list[tuple[str, str]]] = {OWN: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):  # newer clicks describe arguments too
                sections.setdefault(section_of(parameter), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def model_argument(command: Any) -> Any:
    """Give a command its MODEL, which is the default model when left out."""
    return click.argument("model", default=DEFAULT_MODEL, metavar="[MODEL]", shell_complete=complete_model)(command)


def complete_model(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A shell's completions for MODEL: names in the catalogue or the cache, else files."""
    from penstock.weights.catalogue import CATALOGUE
    from penstock.weights.locate import default_cache_dir, installed_models

    installed = (model.name for model in installed_models(default_cache_dir(os.environ)))
    names = [name for name in dict.fromkeys((*CATALOGUE, *installed)) if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]
