"""What the operator can set for KV events: addresses, and options that would have no effect."""

from __future__ import annotations

import sys

import pytest
from command_line import only_line, penstock

from penstock import app
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:0",
        "tcp://*:5557",
        "tcp://0.0.0.0:65535",
        "tcp://[::1]:5557",
        "tcp://eth0:5557",
        "tcp://pod-1.example:5557",
        "ipc:///run/penstock/kv",
    ],
)
def test_addresses_to_listen_on(address):
    assert EngineConfig(kv_events=address).kv_events == address


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:5557", "5557", "tcp://5557", "tcp://:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:65536"),
        *("tcp://127.0.0.1:*", "udp://127.0.0.1:5557", "inproc://kv", "ipc://", "tcp://::1:5557", "tcp://a b:1"),
        "tcp://127.0.0.1:5557/path",
    ],
)
@pytest.mark.parametrize("option", ["kv_events", "kv_events_replay"])
def test_what_is_no_address_is_refused_by_its_option(option, address):
    with pytest.raises(ConfigError, match=r"must be an address such as tcp://127\.0\.0\.1:5557") as refused:
        EngineConfig(**{"kv_events": "tcp://127.0.0.1:5555", option: address})
    assert refused.value.option == option


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "kv_events_replay: would do nothing"),
        ({"kv_events_topic": "kv@"}, "kv_events_topic: would do nothing"),
        ({"kv_events": "tcp://*:1", "prefix_caching": False}, "kv_events: would say nothing"),
        ({"kv_events": "tcp://*:1", "kv_events_replay": "tcp://*:1"}, "kv_events_replay: must be another address"),
        ({"kv_events_buffer": 0}, "kv_events_buffer: must be at least 1"),
        ({"kv_events_format": "json"}, "kv_events_format: must be one of maps, arrays"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)


def test_nothing_is_published_unless_it_is_asked_for():
    assert app._kv_events(EngineConfig()) is None


def test_without_zeromq_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("penstock.kv_events")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kv_events: needs zmq, .*pip install 'penstock\[kv-events\]'"):
        app._kv_events(EngineConfig(kv_events="tcp://127.0.0.1:0"))


def test_a_bad_address_is_one_line_on_the_command_line():
    done = penstock("serve", "--kv-events", "5557")
    assert done.returncode == 2
    assert "--kv-events: must be an address" in only_line(done.stderr)
