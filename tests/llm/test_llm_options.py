"""Options of the library: sizes may be text, and a value of a wrong type is refused by its field's name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from penstock import LLM, AsyncLLM
from penstock.app import engine_config
from penstock.contract.config import EngineConfig, options_behind
from penstock.contract.errors import ConfigError
from penstock.contract.options import BYTE_FIELDS, Front, read_bytes
from penstock.contract.server_config import ServerConfig

NUMBERS = [
    (config, field.name, type(field.default))
    for config in (EngineConfig, ServerConfig)
    for field in fields(config)
    if isinstance(field.default, bool | int | float)
]


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GB", 2 * 10**9), ("8GiB", 8 * 2**30), (" 1.5 kib ", 1536), ("500MB", 5 * 10**8), ("1048576", 2**20), ("7b", 7)],
)
def test_sizes_are_read_as_on_the_command_line(text, count):
    assert read_bytes(text) == engine_config(kv_cache_memory=text).kv_cache_memory == count


@pytest.mark.parametrize("text", ["", "2 XB", "GB", "-1GB", "2GB 3", "1e9"])
def test_what_is_no_size_is_refused_by_the_fields_name(text):
    with pytest.raises(ConfigError, match=r"kv_cache_memory: .* is not a number of bytes"):
        LLM("no-such-model", kv_cache_memory=text)


@pytest.mark.parametrize(("config", "name", "wanted"), NUMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_a_number_of_a_wrong_type_is_refused_by_its_fields_name(config, name, wanted):
    wrong = ["3", None, [1], 1 if wanted is bool else True]
    wrong += [1.5] if wanted is int else []
    for value in wrong:
        with pytest.raises(ConfigError) as refused:
            config(**{name: value})
        assert refused.value.option == name
        assert repr(value) in str(refused.value)
        if config is EngineConfig and not (name in BYTE_FIELDS and isinstance(value, str)):
            with pytest.raises(ConfigError, match=name):
                LLM("no-such-model", **{name: value})


def test_a_whole_number_stands_for_a_float():
    assert ServerConfig(request_timeout=3).request_timeout == 3


QUEUE = {
    "tensor_parallel": 2,
    "max_queued_requests": 8,
    "max_queued_tokens": 100,
    "runner": "process",
    "standby": False,
    "step_target_ms": 50,
    "max_queue_seconds": 9,
}
HTTP = {
    "served_model_name": ("mine",),
    "lora_dir": "adapters",
    "scheduling_policy": "priority",
    "memory_limit": 64 << 20,
    "keep_step_times": False,
    "kv_events": "tcp://127.0.0.1:5557",
    "kv_events_replay": "tcp://127.0.0.1:5558",
    "kv_events_topic": "kv@",
    "kv_events_format": "arrays",
    "kv_events_buffer": 9,
}


@pytest.mark.parametrize(("library", "unread"), [(LLM, QUEUE | HTTP), (AsyncLLM, HTTP)])
def test_an_option_that_nothing_would_read_is_refused_by_its_name(library, unread):
    for name, value in unread.items():
        with pytest.raises(ConfigError, match="is not an option; options are block_size, ") as refused:
            library("no-such-model", **{name: value})
        assert refused.value.option == name
        assert name not in str(refused.value).partition("options are")[2]


def test_what_each_front_reads_is_all_that_the_one_before_it_reads():
    names = {field.name for field in fields(EngineConfig)}
    assert options_behind(Front.HTTP) == names
    assert options_behind(Front.QUEUE) == names - HTTP.keys()
    assert options_behind(Front.NONE) == names - HTTP.keys() - QUEUE.keys()


def test_the_limits_of_the_queue_are_the_async_librarys_too():
    with pytest.raises(ConfigError, match="max_queued_tokens: must be at least 1"):
        AsyncLLM("no-such-model", max_queued_tokens=0)
