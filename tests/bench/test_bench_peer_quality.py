"""Quality beside llama.cpp: the file of base logits, its words, and `bench/quality.py`."""

from __future__ import annotations

import json
import stat
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from quality_harness import TOKENS, random_logits, scored

from peers import perplexity
from peers.contenders import Absent
from peers.install import install_peer
from penstock.bench import quality
from penstock.cli import run
from penstock.contract.errors import ConfigError, EngineFault
from penstock.exec.divergence import sixteen_bit_log_probs, sixteen_bit_nll
from penstock.models import gguf_dialect
from penstock.weights.files import open_model
from quality import command

SAMPLE = (Path(__file__).parent / "samples" / "llama-perplexity.txt").read_text(encoding="utf-8")


def read_base(data: bytes) -> tuple[int, list[int], np.ndarray]:
    """Context, tokens and log probabilities `[S, V]` of a file of base logits, by the layout alone."""
    magic, context, vocab, count = struct.unpack_from("<8s3i", data)
    assert magic == b"_logits_"
    tokens = np.frombuffer(data, "<i4", context * count, 20)
    scored_rows = count * (context - 1 - context // 2)
    rows = np.frombuffer(data, "<u2", offset=20 + 4 * len(tokens)).reshape(scored_rows, 4 + vocab + vocab % 2)
    scale, minimum = np.ascontiguousarray(rows[:, :4]).view("<f4").astype(np.float64).T
    return context, tokens.tolist(), rows[:, 4 : 4 + vocab] * scale[:, None] + minimum[:, None]


def test_base_logits_read_back_as_what_the_model_predicts(tiny, tmp_path):
    reference, scores = scored(tiny, TOKENS)
    told = perplexity.write_base(reference, tmp_path / "base", lambda: None)
    context, tokens, log_probs = read_base((tmp_path / "base").read_bytes())
    assert (context, tokens) == (20, TOKENS)
    following = [TOKENS[start + position + 1] for start in (0, 20, 40) for position in range(10, 19)]
    found = [-row[token] for row, token in zip(log_probs, following, strict=True)]
    assert found == pytest.approx(scores.reference_nll, abs=1e-3)
    assert np.exp(log_probs).sum(axis=1) == pytest.approx(np.ones(27), abs=1e-3)
    assert told == pytest.approx(np.exp(np.mean(found)), rel=1e-4)


@pytest.mark.parametrize("vocab", [6, 7])
def test_stored_log_probs_are_off_by_half_a_step_and_cut_16_below_the_largest(vocab):
    logits = random_logits(3, vocab, 4, spread=1.0)
    logits[1, 2], logits[2] = -40.0, 1.5  # a token too unlikely to be stored exactly, a row of equal logits
    data = sixteen_bit_log_probs(logits)
    _, _, found = read_base(struct.pack("<8s3i", b"_logits_", 8, vocab, 1) + bytes(4 * 8) + data)
    expected = logits.clamp(min=logits.amax(1, keepdim=True) - 16).double() - logits.double().logsumexp(1, keepdim=True)
    assert np.abs(found - expected.numpy()).max() < 16 / 65535
    assert sixteen_bit_nll(logits, [2, 2, 0]) == pytest.approx(-found[range(3), [2, 2, 0]], abs=16 / 65535)


def test_what_llama_perplexity_printed_is_understood():
    found = perplexity.read_perplexity(SAMPLE, "llama.cpp", 98_362_432, 1020)
    expected = {
        "positions": 1020,
        "weight_bytes": 98_362_432,
        "kl_mean": 0.002699,
        "kl_error": 0.000065,
        "kl_median": 0.002291,
        "kl_p99": 0.009525,
        "kl_p999": 0.015183,
        "kl_max": 0.025354,
        "same_top": 0.96275,
        "same_top_error": 0.00593,
        "perplexity": 46.517806,
        "reference_perplexity": 46.289067,
        "log_ratio": 0.004929,
        "log_ratio_error": 0.002382,
    }
    assert found.record() == {"name": "llama.cpp"} | {key: pytest.approx(value) for key, value in expected.items()}
    with pytest.raises(EngineFault, match="printed no kl_mean"):
        perplexity.read_perplexity("too few positions", "llama.cpp", 1, 9)


def test_a_base_that_was_read_as_something_else_is_found(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    commands, chunks = [], quality.Chunks(512, ((0,) * 512,) * 4)

    def execute(command):
        commands.append(" ".join(command))
        return SAMPLE

    def measure(name, base_perplexity):
        return perplexity.score_peer(
            name, tmp_path, model, tmp_path / "base", base_perplexity, chunks, 3, execute=execute
        )

    program(tmp_path, "llama-perplexity", "")
    assert measure("llama.cpp", 46.289).weight_bytes == 4
    assert measure("llama.cpp:F32", 46.289).name == "llama.cpp:F32"
    with pytest.raises(EngineFault, match=r"read a perplexity of 46\.289067 from base logits that have 45"):
        measure("llama.cpp", 45.0)
    for part in (
        f"-m {model}",
        "--kl-divergence ",
        f"--kl-divergence-base {tmp_path / 'base'}",
        "-c 512",
        "-b 512",
        "-t 3",
    ):
        assert part in commands[0]
    assert "f32" not in commands[0]
    assert "--cache-type-k f32 --cache-type-v f32" in commands[1]


def program(folder: Path, name: str, code: str) -> None:
    path = folder / "llama.cpp" / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_peers_that_cannot_tell_their_quality_say_why(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"only llama\.cpp can"):
        perplexity.find_peer_model("transformers", tmp_path, model)
    absent = perplexity.find_peer_model("llama.cpp", tmp_path, model)
    assert isinstance(absent, Absent)
    assert "--install --peer llama.cpp" in absent.reason
    program(tmp_path, "llama-perplexity", "")
    assert perplexity.find_peer_model("llama.cpp", tmp_path, model) == model
    assert "GGUF" in perplexity.find_peer_model("llama.cpp", tmp_path, tmp_path).reason
    assert "llama-quantize" in perplexity.find_peer_model("llama.cpp:Q8_0", tmp_path, model).reason


def test_an_installation_without_llama_perplexity_is_not_whole(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr("peers.install._build_llama_cpp", lambda folder, isa: built.append(folder))
    for name in ("llama-batched-bench", "llama-quantize", "llama-imatrix", "llama-server"):
        program(tmp_path, name, "")
    install_peer("llama.cpp", tmp_path, lambda line: None)
    assert built == [tmp_path]
    program(tmp_path, "llama-perplexity", "")
    install_peer("llama.cpp", tmp_path, lambda line: None)
    assert built == [tmp_path]


# ---- the command


@pytest.fixture
def call(monkeypatch, capsys, tmp_path, text_file, tiny):
    def call(*arguments: str) -> tuple[int, str, str]:
        fixed = ["--threads", "1", "--text", str(text_file), "--context", "64", "--peers-dir", str(tmp_path / "peers")]
        monkeypatch.setattr(sys, "argv", ["quality.py", str(tiny), *fixed, *arguments])
        with pytest.raises(SystemExit) as end:
            run(command, "quality.py")
        return (int(end.value.code or 0), *capsys.readouterr())

    return call


def test_llama_cpp_stands_beside_us_and_a_failure_of_it_is_told(call, tmp_path, monkeypatch, tiny):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setattr(
        "penstock.loading.find_model", lambda config: replace(open_model(tiny, gguf_dialect), path=model)
    )
    # the stand-in reads the base logits itself, so the perplexity it reports is the file's
    code = f"""
import numpy as np
path = pathlib.Path(sys.argv[sys.argv.index("--kl-divergence-base") + 1])
context, vocab, count = np.frombuffer(path.read_bytes(), "<i4", 3, 8)
assert str(context) == sys.argv[sys.argv.index("-c") + 1]
tokens = np.frombuffer(path.read_bytes(), "<i4", context * count, 20).reshape(count, context)
rows = np.frombuffer(path.read_bytes(), "<u2", offset=20 + 4 * tokens.size).reshape(-1, 4 + vocab + vocab % 2)
head = np.ascontiguousarray(rows[:, :4]).view("<f4")
numbers = rows[:, 4:][range(len(rows)), tokens[:, context // 2 + 1 :].ravel()]
base = np.exp(-np.mean(numbers * head[:, 0] + head[:, 1]))
print(pathlib.Path({str(tmp_path / "sample")!r}).read_text().replace("46.289067", str(base)))
"""
    (tmp_path / "sample").write_text(SAMPLE, encoding="utf-8")
    program(tmp_path / "peers", "llama-perplexity", code)
    program(tmp_path / "peers", "llama-quantize", "pathlib.Path(sys.argv[3]).write_text('GGUF')")
    status, out, _ = call("--quantization", "int8", "--json", str(tmp_path / "found.json"))
    assert status == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["penstock int8", *perplexity.DEFAULT_PEERS]
    assert found["rows"][1]["kl_mean"] == 0.002699
    assert found["rows"][1]["reference_perplexity"] == pytest.approx(found["rows"][0]["reference_perplexity"], rel=1e-3)
    assert "by llama.cpp" in out.splitlines()[-1]
    assert sorted(path.name for path in (tmp_path / "peers").iterdir()) == ["llama.cpp", "models"]  # the base is gone
    program(tmp_path / "peers", "llama-perplexity", "sys.exit('no memory')")
    status, out, _ = call("--quantization", "int8", "--peer", "llama.cpp")
    assert status == 0
    assert "no memory" in out.splitlines()[-1]


def test_a_peer_that_reads_no_such_model_is_absent_with_its_reason(call, tmp_path):
    code, out, err = call("--quantization", "int8", "--json", str(tmp_path / "found.json"))
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["penstock int8"]
    assert list(found["absent"]) == ["llama.cpp"]
    assert out.splitlines()[-1].startswith("llama.cpp: reads GGUF files only")


@pytest.mark.parametrize("arguments", [("--peer", "llama.cpp"), ("--peer", "nonsense")])
def test_mistakes_are_exit_code_2_and_name_the_option(call, arguments):
    code, _, err = call(*arguments)
    assert code == 2
    assert "peer" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("script", ["compare.py", "quality.py"])
def test_the_scripts_run_from_a_checkout_and_their_help_loads_no_torch(script):
    path = Path(__file__).parents[2] / "bench" / script
    code = f"import runpy, sys; sys.argv = [{str(path)!r}, '--help']; sys.path.insert(0, {str(path.parent)!r})\n"
    code += f"try:\n    runpy.run_path({str(path)!r}, run_name='__main__')\n"
    code += "except SystemExit as end:\n    assert not end.code\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--peer", "--peers-dir", "--install", "--json", "--dtype", "--threads"):
        assert option in done.stdout
