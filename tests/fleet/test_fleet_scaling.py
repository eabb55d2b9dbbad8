"""How many replicas a fleet wants, and what its options may say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from penstock import fleet_server
from penstock.cli.fleet import command
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, SetupError
from penstock.contract.fleet_config import FleetConfig
from penstock.contract.server_config import ServerConfig
from penstock.fleet.ray_scaling import WaitingPolicy, replicas_wanted


@pytest.mark.parametrize(
    ("waits", "busy", "wanted"),
    [
        ([0.0], [0.2], 1),
        ([4.9], [3.0], 1),
        ([5.1], [3.0], 2),
        ([60.0], [9.0], 2),  # at most twice as many
        ([60.0, 0.0], [9.0, 0.1], 2),  # a new request would wait only at the first
        ([0.0, 0.0], [0.3, 0.3], 1),
        ([0.0, 0.0], [0.5, 0.3], 2),  # one alone would be nearly full
        ([0.0, 0.1], [0.1, 0.1], 2),
        ([], [], 1),
    ],
)
def test_replicas_follow_the_wait_of_a_new_request(waits, busy, wanted):
    assert replicas_wanted(waits, busy, 5.0) == wanted


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), min_size=1, max_size=50), st.floats(0, 100))
def test_a_step_is_never_larger_than_twice_or_one_fewer(said, most_wait):
    waits, busy = zip(*said, strict=True)
    wanted = replicas_wanted(waits, busy, most_wait)
    assert max(1, len(said) - 1) <= wanted <= max(2, 2 * len(said))


def test_the_policy_waits_until_every_replica_has_spoken():
    policy = WaitingPolicy(most_wait=5.0)
    said = {"waiting_seconds": {"a": 9.0}, "busy": {"a": 2.0}}
    context = SimpleNamespace(aggregated_metrics=said, current_num_replicas=2, target_num_replicas=2)
    assert policy(context) == (2, {})
    context.current_num_replicas = 1
    assert policy(context) == (2, {})
    context.aggregated_metrics = None
    assert policy(context) == (2, {})


@pytest.mark.parametrize("replicas", ["a", "3-2", "0-2", "-1", "1-", "2-99999", "0-0"])
def test_a_number_of_replicas_that_is_none_is_refused(replicas):
    with pytest.raises(ConfigError, match="replicas"):
        FleetConfig(replicas=replicas)


def test_replicas_are_ended_in_a_cluster_that_goes_on():
    assert FleetConfig(replicas="0", address="10.0.0.1:6379").ends
    assert not FleetConfig(replicas="1", address="10.0.0.1:6379").ends
    with pytest.raises(ConfigError, match="--address"):
        FleetConfig(replicas="0")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("/models/my model#2/", "my-model-2"),
        ("models/llama.Q4_K_M.gguf", "llama.Q4_K_M.gguf"),
        ("x" * 500, "x" * 100),
    ],
)
def test_replicas_are_called_like_their_model(model, name):
    assert FleetConfig().name_for(model) == name
    assert FleetConfig(name="chat").name_for(model) == "chat"


@pytest.mark.parametrize("name", ["a#b", "a/b", "é", "x" * 101, " "])
def test_a_name_that_ray_could_not_take_is_refused(name):
    with pytest.raises(ConfigError, match="name"):
        FleetConfig(name=name)


def test_bounds_and_other_numbers():
    assert FleetConfig(replicas="3").bounds == (3, 3)
    assert FleetConfig(replicas="1-4").bounds == (1, 4)
    for wrong in ({"scale_up_wait": -1.0}, {"replica_gpus": float("nan")}, {"replica_drain": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            FleetConfig(**wrong)


@pytest.mark.parametrize(
    ("engine", "server"),
    [({"kv_events": "tcp://127.0.0.1:5557"}, {}), ({"lora_dir": "/tmp"}, {}), ({}, {"profile_dir": "/tmp"})],
)
def test_what_is_for_one_engine_is_refused(engine, server, tmp_path):
    with pytest.raises(ConfigError, match=next(iter({**engine, **server}))):
        fleet_server.serve_fleet(EngineConfig(**engine), ServerConfig(**server), FleetConfig(), tmp_path, print)


def test_without_ray_the_command_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(fleet_server, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"pip install 'penstock\[ray\]'"):
        fleet_server.serve_fleet(EngineConfig(), ServerConfig(), FleetConfig(), tmp_path, print)


def test_the_command_knows_its_options():
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    for option in (
        "--replicas",
        "--address",
        "--name",
        "--scale-up-wait",
        "--replica-drain",
        "--max-num-seqs",
        "--port",
    ):
        assert option in shown.output
