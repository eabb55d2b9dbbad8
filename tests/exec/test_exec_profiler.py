"""Torch's profiler behind its port: what it records, and in what files."""

from __future__ import annotations

import json
import threading

import pytest
import torch
import torch.profiler

from penstock.contract.errors import EngineFault
from penstock.exec.profiler import TorchProfiler


def events(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_operations_are_recorded_inside_their_span(tmp_path):
    profiler = TorchProfiler()
    for name in ("first", "second"):
        profiler.start()
        with profiler.span(name):
            torch.ones(3, 3) @ torch.ones(3, 3)
        torch.ones(5).cumsum(0)
        write = profiler.stop()
        torch.ones(5).sort()
        writing = threading.Thread(target=write, args=[tmp_path / name])
        writing.start()
        writing.join()
        found = {event["name"]: event for event in events(tmp_path / name)}
        assert "aten::cumsum" in found
        assert "aten::sort" not in found
        span, product = found[name], found["aten::matmul"]
        assert span["ts"] <= product["ts"] <= product["ts"] + product["dur"] <= span["ts"] + span["dur"] + 1
        assert "first" not in found or name == "first"


def test_no_file_is_written_over(tmp_path):
    profiler = TorchProfiler()
    profiler.start()
    write = profiler.stop()
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "nowhere" / "file")


@pytest.mark.parametrize("part", ["start", "stop"])
def test_what_torch_refuses_is_no_end_of_the_engine(monkeypatch, part):
    stop = torch.profiler.profile.stop

    def refuse(profile: torch.profiler.profile) -> None:
        if part == "stop":
            stop(profile)  # a profiler that still runs at the end of the process crashes it
        raise RuntimeError("made of it")

    profiler = TorchProfiler()
    profiler.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, part, refuse)
        with pytest.raises(EngineFault, match="Torch's profiler"):
            getattr(profiler, part)()
    if part == "start":
        profiler.stop()
