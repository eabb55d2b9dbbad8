"""A recording that cannot be written ends by itself; the engine goes on."""

import errno
import os
from pathlib import Path

import engine_harness as harness
import pytest
from engine_harness import tokens_of

from penstock.engine.recorder import Recorder


def failing(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full: run the tests on Linux")
def test_a_full_disk_ends_the_recording_and_nothing_else(caplog):
    bench = harness.build(record=Path("/dev/full"))
    requests = {f"prompt {i}": bench.submit(f"prompt {i}", max_tokens=30) for i in range(8)}
    bench.run()
    for prompt, one in requests.items():
        assert tokens_of(bench.outputs[one]) == bench.expected(prompt, 30)
    bench.engine.close()
    assert [each.getMessage() for each in caplog.records if "recording" in each.getMessage()] == [
        "recording to /dev/full ended: No space left on device"
    ]


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_whatever_fails_first_is_said_once(call, tmp_path, caplog, monkeypatch):
    bench = harness.build(record=tmp_path / "trace")
    one = bench.submit("hello", max_tokens=30)
    recorder = bench.engine._recorder
    assert isinstance(recorder, Recorder)
    real = recorder._file

    class Broken:
        def __getattr__(self, name):
            return failing if name == call else getattr(real, name)

    monkeypatch.setattr(recorder, "_file", Broken())
    bench.run()
    bench.engine.close()
    assert tokens_of(bench.outputs[one]) == bench.expected("hello", 30)
    assert sum("recording" in each.getMessage() for each in caplog.records) == 1
    real.close()
