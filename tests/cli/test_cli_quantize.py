"""`penstock quantize` from the shell: what it writes can be served, and an interrupted run leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import penstock

from penstock import quantizing
from penstock.cli.quantize import DIRECTORY_FORMS, GGUF_FORMS
from penstock.weights import gguf_mixture
from penstock.weights.gguf_header import read_gguf_header


def test_the_forms_of_the_option_are_those_that_can_be_written():
    assert set(GGUF_FORMS) == set(gguf_mixture.FORMS)
    assert set(DIRECTORY_FORMS) == set(quantizing.DIRECTORY_FORMS)


@pytest.mark.model
@pytest.mark.deep
def test_the_default_model_in_another_form_answers(default_model: Path, tmp_path):
    target = tmp_path / "smaller.gguf"
    done = penstock("quantize", str(default_model), str(target), "--form", "q4_k_m")
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    assert "the errors of both forms add up" in done.stderr
    kinds = {tensor.kind.name for tensor in read_gguf_header(target).tensors.values()}
    assert kinds == {"Q5_0", "Q8_0", "Q4_K", "Q6_K", "F32"}, "rows of 576 have no blocks of 256"
    said = penstock(
        "generate", str(target), "-p", "The capital of France is", "--max-tokens", "3", "--temperature", "0"
    )
    assert "Paris" in said.stdout, said.stderr


def test_a_target_that_cannot_be_is_refused_before_anything_is_read(tmp_path, refused):
    (tmp_path / "there.gguf").write_bytes(b"mine")
    for target, form, said in (
        ("there.gguf", "Q8_0", "exists already; --force replaces it"),
        ("model.bin", "Q8_0", "Q8_0 is a form of GGUF files, whose names end in .gguf"),
        ("new.gguf", "INT8", "INT8 is a form of directories"),
        ("none/model.gguf", "Q8_0", "there is no folder"),
        ("", "INT8", "nothing is overwritten"),
    ):
        assert said in refused("quantize", "no-such-model", str(tmp_path / target), "--form", form)
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"


@pytest.mark.model
def test_the_model_itself_is_never_replaced(default_model: Path, refused):
    said = refused("quantize", str(default_model), str(default_model), "--form", "Q8_0", "--force")
    assert said.endswith("is MODEL itself; name another")


@pytest.mark.model
@pytest.mark.deep
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(default_model: Path, tmp_path, number, code):
    target = tmp_path / "new.gguf"
    command = [sys.executable, "-m", "penstock", "quantize", str(default_model), str(target), "--form", "Q4_0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
def test_a_directory_that_was_written_answers(endless, tmp_path):
    target = tmp_path / "small"
    done = penstock("quantize", endless, str(target), "--form", "int8")
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    sizes = ("--kv-cache-memory", "10MB", "--max-model-len", "64", "--threads", "1")
    said = penstock("generate", str(target), "-p", "abc", "--max-tokens", "3", "--temperature", "0", *sizes)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()


STUCK = """
import re, sys, time
from pathlib import Path
from penstock.weights import gguf_writer

write = gguf_writer._write
def second(stream, tensor, place, advance):
    if list(Path(sys.argv[3]).parent.glob(".*partial")) and place:
        print("writing", flush=True)
        {stuck}
    write(stream, tensor, place, advance)
gguf_writer._write = second

from penstock.cli import main
main()
"""


@pytest.mark.parametrize(
    ("number", "code", "stuck"),
    [
        pytest.param(signal.SIGTERM, 143, "time.sleep(600)", id="SIGTERM"),
        pytest.param(signal.SIGTERM, 143, "re.match('(a+)+$', 'a' * 60 + 'b')", marks=pytest.mark.deep, id="deaf"),
        pytest.param(signal.SIGINT, 130, "re.match('(a+)+$', 'a' * 60 + 'b')", marks=pytest.mark.deep, id="Ctrl-C"),
    ],
)
def test_neither_signal_leaves_a_file_whatever_is_being_done(endless, tmp_path, number, code, stuck):
    target = tmp_path / "new.gguf"
    with subprocess.Popen(
        [sys.executable, "-c", STUCK.replace("{stuck}", stuck), "quantize", endless, str(target), "--form", "F16"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "writing\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
