"""Scripts that measure quantised files: tokens beside llama.cpp's, quality of many files, start, wider rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peer_programs import program
from safetensors.torch import load_file, save_file

import make_quantised
import make_random_checkpoint
import quality_of_files
import same_tokens
import start
from needs import LLAMA_CPP
from peers.llama_server import Greedy, ask, serving
from peers.process import NotInstalledError
from peers.process import program as peer_program
from penstock.contract.errors import EngineFault
from penstock.weights.locate import default_cache_dir
from widen_checkpoint import widen, widened_config

SIZES = ["--hidden", "384", "--layers", "2", "--heads", "6", "--kv-heads", "3", "--inner", "160", "--vocabulary", "300"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small random Llama; not to be changed. Its norms differ from 1."""
    directory = tmp_path_factory.mktemp("checkpoints") / "llama"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_random_checkpoint.py", str(directory), "--family", "llama", *SIZES])
        make_random_checkpoint.main()
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensor.copy_(torch.linspace(0.5, 1.5, len(tensor)))
        elif "norm" not in name:
            tensor.mul_(5)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


# ---- wider rows


def test_a_widened_model_computes_the_same(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    widen(checkpoint, tmp_path, 256)
    token_ids = torch.tensor([[(7 * i + 3) % 300 for i in range(24)]])
    found = []
    for directory in (checkpoint, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            found.append(model(token_ids).logits)
    assert found[0].std() > 0.1
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-5)
    wide = load_file(tmp_path / "model.safetensors")
    assert all(tensor.shape[-1] % 256 == 0 for tensor in wide.values())
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == 8


@pytest.mark.parametrize("change", [{"model_type": "qwen2"}, {"attention_bias": True}])
def test_what_cannot_be_widened_is_refused_by_name(checkpoint, change):
    config = json.loads((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match="only a Llama without biases can be widened"):
        widened_config(config | change, 256)


# ---- importance matrices


def test_formats_below_three_bits_are_made_with_an_importance_matrix(checkpoint, tmp_path):
    log = tmp_path / "log"
    binaries = tmp_path / "peers" / "llama.cpp" / "bin"
    said = f"print(*map(lambda a: pathlib.Path(a).name, sys.argv[1:]), file=open({str(log)!r}, 'a'))"
    program(binaries / "llama-quantize", f"{said}; pathlib.Path(sys.argv[-2]).write_text('made')")
    program(binaries / "llama-imatrix", f"{said}; pathlib.Path(sys.argv[-1]).write_text('made')")
    make_quantised.make_quantised(checkpoint, tmp_path / "made", ["IQ2_XS", "IQ2_S", "Q2_K"], tmp_path / "peers")
    counted, first, second, plain = log.read_text().splitlines()
    assert counted.startswith("-m llama-BF16.gguf -f northanger-abbey.txt")
    assert first.startswith("--imatrix llama-BF16.imatrix llama-BF16.gguf")
    assert second.startswith("--imatrix")
    assert "--imatrix" not in plain


# ---- token by token


def greedy(*tokens: int, margin: float = 1.0) -> Greedy:
    return Greedy(tokens, tuple(-0.5 for _ in tokens), tuple(margin for _ in tokens))


def test_continuations_are_compared_up_to_the_first_difference():
    same = same_tokens.compare(greedy(1, 2, 3), greedy(1, 2, 3))
    assert (same.tokens, same.differs, same.our_margin) == (3, False, None)
    other = same_tokens.compare(greedy(1, 2, 3, margin=0.1), greedy(1, 5, 3, margin=0.2))
    assert (other.tokens, other.differs, other.our_margin, other.their_margin) == (1, True, 0.1, 0.2)
    short = same_tokens.compare(greedy(1, 2), greedy(1, 2, 3, margin=0.2))
    assert (short.tokens, short.differs, short.our_margin, short.their_margin) == (2, True, None, 0.2)
    apart = Greedy((1,), (-0.75,), (1.0,))
    assert same_tokens.compare(greedy(1), apart).logprob_difference == 0.25


ANSWERS = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.reply({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["temperature"], asked["cache_prompt"], asked["n_probs"]) == (0, False, 2)
        best, other = ({"id": n, "logprob": -0.1 * n} for n in (len(asked["prompt"]), asked["n_predict"]))
        self.reply({"tokens": [best["id"], 200, 5], "completion_probabilities": [
            best | {"top_logprobs": [best, other]}, {"id": 5, "logprob": -1, "top_logprobs": []}]})
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_asked_for_greedy_tokens_and_their_margins(tmp_path):
    server = program(tmp_path / "llama-server", ANSWERS)
    with serving(server, tmp_path / "model.gguf", ["-c", "64"]) as served:
        found = ask(served, [7, 8, 9], 8)
    assert found == Greedy((3, 200, 5), (pytest.approx(-0.3),), (pytest.approx(0.5),))
    assert served.process.poll() is not None


def test_a_server_that_ends_while_it_loads_is_an_error_with_its_words(tmp_path):
    server = program(tmp_path / "llama-server", "sys.exit('no such file')")
    with (
        pytest.raises(EngineFault, match="llama-server ended with status 1 while it loaded: no such file"),
        serving(server, tmp_path / "model.gguf", []),
    ):
        pass


@pytest.mark.deep
def test_llama_cpp_says_the_same_tokens_of_a_file_that_it_wrote(checkpoint, tmp_path, monkeypatch):
    """Every K kind and more, with rows of 256: the script itself, on a model that takes a second."""
    peers = default_cache_dir(os.environ) / "peers"
    try:
        for name in ("llama-server", "llama-quantize"):
            peer_program(peers, "llama.cpp", name)
    except NotInstalledError:
        pytest.skip(LLAMA_CPP)
    widen(checkpoint, tmp_path / "wide", 256)
    formats = ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ4_NL", "IQ3_S", "MXFP4", "Q5_0", "TQ2_0"]
    files = make_quantised.make_quantised(tmp_path / "wide", tmp_path, formats, peers)
    target = tmp_path / "record.json"
    words = [*map(str, files), "--prompts", "2", "--new-tokens", "24", "--threads", "1", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["same_tokens.py", *words])
    same_tokens.main()
    for file in json.loads(target.read_text())["files"]:
        for prompt in file["prompts"]:
            assert prompt["logprob_difference"] < 1e-3, file["name"]
            assert not prompt["differs"] or prompt["our_margin"] < 1e-3, file["name"]


# ---- quality of many files


def test_records_of_files_are_gathered_and_a_failure_is_told(tmp_path, monkeypatch, capsys):
    calls = []

    def fake_run(command):
        calls.append(command[2:])
        if "Q6_K" in command[2]:
            raise EngineFault("no memory")
        rows = [{"name": "penstock file", "kl_mean": 0.001}, {"name": "llama.cpp", "kl_mean": 0.002}]
        absent = {"llama.cpp": "no such thing"} if "Q2_K" in command[2] else {}
        Path(command[command.index("--json") + 1]).write_text(
            json.dumps({"rows": rows, "absent": absent, "config": {}})
        )

    monkeypatch.setattr(quality_of_files, "run", fake_run)
    target = tmp_path / "record.json"
    files = ["a-b-Q4_K_M.gguf", "a-b-Q6_K.gguf", "a-b-Q2_K.gguf"]
    monkeypatch.setattr(sys, "argv", ["quality_of_files.py", *files, "--tokens", "512", "--json", str(target)])
    with pytest.raises(SystemExit) as end:
        quality_of_files.main()
    assert end.value.code == 1
    found = json.loads(target.read_text())
    assert found["kind"] == "quality-of-files"
    assert [record["name"] for record in found["records"]] == ["Q4_K_M"]
    assert calls[0][:5] == ["a-b-Q4_K_M.gguf", "--quantization", "file", "--peer", "llama.cpp"]
    assert calls[0][-4:] == ["--tokens", "512", "--threads", "0"]
    out, err = capsys.readouterr()
    assert "penstock file 0.001000, llama.cpp 0.002000" in out
    assert "no memory" in err
    assert "no such thing" in err


# ---- start and memory


def test_memory_of_a_process_is_that_of_its_children_too():
    code = "import sys; held = bytearray(b'x' * (64 << 20)); print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = start.memory_of(process.pid)
    finally:
        process.communicate(timeout=60)
    assert 64 << 20 < found["anonymous"] < 256 << 20
    assert found["anonymous"] + found["file"] <= found["proportional"] + (1 << 20)
    assert found["proportional"] <= found["resident"]


def test_a_round_waits_for_the_server_and_ends_it(tmp_path):
    server = program(tmp_path / "server", ANSWERS)
    body = {"prompt": [1], "n_predict": 8, "temperature": 0, "cache_prompt": False, "n_probs": 2}
    found = start.measure_round(lambda port: [str(server), "--port", str(port)], "/completion", body)
    assert 0 < found["ready_seconds"] < found["answered_seconds"]
    assert found["anonymous"] > 1 << 20
    with pytest.raises(EngineFault, match="ended with status 3"):
        start.measure_round(lambda _: [sys.executable, "-c", "raise SystemExit(3)"], "/", body)
