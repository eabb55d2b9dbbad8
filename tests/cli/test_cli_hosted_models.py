"""`penstock serve` with several models: which models are meant, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from penstock.cli.hosted_models import choose_models
from penstock.cli.options import build_configs
from penstock.cli.serve import command
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.hosting import HostedModel, ModelChoice
from penstock.contract.server_config import HostingConfig
from penstock.hosting_server import hosted_models


def choices(*arguments: str) -> list[ModelChoice]:
    """What a command line means, without serving it."""
    with command.make_context("serve", list(arguments)) as context:
        config, hosting = build_configs(context, EngineConfig, HostingConfig)
        given = context.get_parameter_source("model") is not click.core.ParameterSource.DEFAULT
        models = (config.model, *context.params["more"]) if given else ()
        return choose_models(context, config, hosting, models)


def models_file(folder: Path, text: str) -> str:
    path = folder / "models.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("arguments", [(), ("a",), ("a", "--max-num-seqs", "3")])
def test_one_model_alone_is_served_as_ever(arguments):
    assert choices(*arguments) == []


def test_all_share_the_options_of_the_command_line():
    found = choices("a", "b", "c", "--max-model-len", "64", "--unload-after", "9")
    assert [each.config.model for each in found] == ["a", "b", "c"]
    assert {each.config.max_model_len for each in found} == {64}
    assert {each.idle_seconds for each in found} == {9.0}


def test_one_model_is_hosted_where_it_may_leave():
    (found,) = choices("--unload-after", "9")
    assert found.config.model == EngineConfig().model


def test_in_a_file_each_has_its_own(tmp_path):
    text = (
        "models:\n  - a\n  - model: b\n    served-model-name: [x, y]\n    kv-cache-memory: 1GiB\n"
        "    pin: true\n    unload-after: 3\n"
    )
    first, second = choices("--models-file", models_file(tmp_path, text), "--max-num-seqs", "5")
    assert first == ModelChoice(EngineConfig(model="a", max_num_seqs=5))
    wanted = EngineConfig(model="b", max_num_seqs=5, served_model_name=("x", "y"), kv_cache_memory=1 << 30)
    assert second == ModelChoice(wanted, pinned=True, idle_seconds=3.0)


def test_arguments_and_the_file_go_together(tmp_path):
    found = choices("a", "--models-file", models_file(tmp_path, "models: [b]"))
    assert [each.config.model for each in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: []", "a list `models`"),
        ("modells: [a]", "a list `models`"),
        ("models: [a]\nother: 1", "a list `models`"),
        ("models:\n  - pin: true", "must have a `model`"),
        ("models:\n  - model: a\n    pinn: true", "unknown keys: pinn"),
        ("models:\n  - model: a\n    pin: 1", "must be true or false"),
        ("models:\n  - model: a\n    memory-limit: 1GiB", "unknown keys: memory-limit"),
        ("models:\n  - model: a\n    max-model-len: many", "max_model_len|max-model-len"),
        ("models:\n  - model: a\n    unload-after: -1", "from 0 up"),
        ("models: [", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_what_is_wrong(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        choices("--models-file", models_file(tmp_path, text))


def test_an_option_of_one_model_is_refused_for_several(tmp_path):
    for several in (("a", "b"), ("--models-file", models_file(tmp_path, "models: [a, b]"))):
        with pytest.raises(ConfigError, match="give each its own"):
            choices(*several, "--served-model-name", "x")


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """Two models as far as names go."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return [str(tmp_path / name) for name in ("one", "two")]


def named(folders: list[str], *pins: str, names: tuple[tuple[str, ...], ...] = ((), ())) -> list[HostedModel]:
    chosen = [
        ModelChoice(EngineConfig(model=folder, served_model_name=own))
        for folder, own in zip(folders, names, strict=True)
    ]
    return hosted_models(chosen, pins, Path("cache"))


def test_models_are_called_as_they_are_when_served_alone(folders):
    assert [each.names for each in named(folders)] == [("one",), ("two",)]
    first, second = named(folders, names=(("x", "y"), ("*",)))
    assert (first.names, first.any_name) == (("x", "y"), False)
    assert (second.names, second.any_name) == (("two",), True)
    assert all(each.file_bytes == 2 for each in (first, second))


def test_a_model_is_pinned_by_any_name_or_as_it_was_given(folders):
    for pin in ("two", folders[1]):
        assert [each.pinned for each in named(folders, pin)] == [False, True]


@pytest.mark.parametrize(
    ("pins", "names", "said"),
    [
        (("three",), ((), ()), "'three' is none of the models: one, two"),
        ((), (("x",), ("x",)), "two models would be called 'x'"),
        ((), (("*",), ("*",)), "two models would answer to any name"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(folders, pins, names, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        named(folders, *pins, names=names)


def test_two_models_cannot_publish_on_one_address(folders):
    first, second, free = "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "tcp://127.0.0.1:0"

    def published(*addresses: tuple[str, str]) -> list[HostedModel]:
        configs = [
            EngineConfig(model=folder, kv_events=address, kv_events_replay=replay)
            for folder, (address, replay) in zip(folders, addresses, strict=True)
        ]
        return hosted_models([ModelChoice(config) for config in configs], (), Path("cache"))

    assert len(published((first, ""), (second, ""))) == len(published((free, ""), (free, ""))) == 2
    for addresses in (((first, ""), (first, "")), ((first, second), ("tcp://127.0.0.1:9", second))):
        with pytest.raises(ConfigError, match=r"two models would listen on tcp://127\.0\.0\.1:555[78]"):
            published(*addresses)
    with pytest.raises(ConfigError, match="kv_events: is for one model; give each its own in a file"):
        choices("a", "b", "--kv-events", first)


@pytest.mark.parametrize("option", ["--max-loaded-models", "--unload-after", "--model-wait"])
def test_numbers_below_zero_are_refused(option):
    with pytest.raises(ConfigError, match="from 0 up"):
        choices("a", "b", option, "-1")
