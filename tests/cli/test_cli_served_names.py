"""`--served-model-name`: several times on the command line, and one or several in the file."""

from __future__ import annotations

from ast import literal_eval
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.cli.options import build_configs, config_options
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError


def names(*arguments: str) -> tuple[str, ...]:
    @click.command()
    @config_options(EngineConfig)
    @click.pass_context
    def command(context: click.Context, /, **_: object) -> None:
        (config,) = build_configs(context, EngineConfig)
        click.echo(repr(config.served_model_name))

    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    return literal_eval(done.output)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ()),
        (("--served-model-name", "a"), ("a",)),
        (("--served-model-name", "a", "--served-model-name", "*"), ("a", "*")),
    ],
)
def test_the_flag_may_be_given_several_times(arguments, expected):
    assert names(*arguments) == expected


@pytest.mark.parametrize(("line", "expected"), [("abc", ("abc",)), ("[a, b]", ("a", "b")), ("'*'", ("*",))])
def test_the_file_has_one_name_or_a_list(tmp_path: Path, line, expected):
    file = tmp_path / "options.yaml"
    file.write_text(f"served-model-name: {line}\n")
    assert names("--config", str(file)) == expected


@pytest.mark.parametrize("value", ["abc", ("",), None])
def test_what_is_no_list_of_names_is_refused(value):
    with pytest.raises(ConfigError, match="served_model_name"):
        EngineConfig(served_model_name=value)
