"""Quality: the arithmetic of divergences, what is scored, llama.cpp's file of logits and its words, the command."""

from __future__ import annotations

import json
import math
import stat
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_checkpoints import reference_logits, write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedTokenizerFast

from penstock.bench import llama_perplexity, quality
from penstock.bench.forms import FORMS, form_name, in_form
from penstock.bench.peer_install import install_peer
from penstock.bench.peers import Absent
from penstock.cli import main
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault
from penstock.exec.divergence import divergence, sixteen_bit_log_probs
from penstock.kernels import native, onednn_linear
from penstock.text import open_text
from penstock.weights.files import open_model

SAMPLE = (Path(__file__).parent / "samples" / "llama-perplexity.txt").read_text(encoding="utf-8")


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


# ---- arithmetic


def test_divergences_are_those_of_torch_in_float64():
    p, q, targets = random_logits(7, 101, 1), random_logits(7, 101, 2), list(range(7))
    found = divergence(p, q, targets)
    assert found.kl == pytest.approx(
        kl_divergence(Categorical(logits=p.double()), Categorical(logits=q.double())).tolist(), rel=1e-12
    )
    surprise = torch.nn.functional.cross_entropy(q.double(), torch.tensor(targets), reduction="none")
    assert found.nll == pytest.approx(surprise.tolist(), rel=1e-12)
    assert found.reference_nll == divergence(q, p, targets).nll
    assert found.same_top == [bool(a == b) for a, b in zip(p.argmax(1), q.argmax(1), strict=True)]


def test_a_tiny_divergence_is_not_lost_in_rounding():
    # p = (1/2, 1/2), q = (1/2 + e, 1/2 - e): the divergence is -ln(1 - 4 e^2) / 2
    e = 2.0**-11
    p, q = torch.zeros(1, 2), torch.tensor([[math.log(0.5 + e), math.log(0.5 - e)]])
    assert divergence(p, q, [0]).kl[0] == pytest.approx(-math.log1p(-4 * e * e) / 2, rel=1e-3)
    assert divergence(p, p + 5, [0]).kl == [0.0]  # a constant added to logits changes no probability


def test_figures_are_means_with_standard_errors():
    kl, nll, base = [0.1, 0.4, 0.1, 0.2], [1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 3.0, 4.5]
    found = quality.Quality.of("ours", 5, quality.Scores(kl, [True, False, True, True], nll, base))
    assert (found.positions, found.kl_mean, found.kl_median, found.kl_max) == (
        4,
        pytest.approx(0.2),
        0.15000000000000002,
        0.4,
    )
    # as llama-perplexity has it: sqrt((mean of squares - square of mean) / (n - 1))
    assert found.kl_error == pytest.approx(math.sqrt((np.mean(np.square(kl)) - 0.2**2) / 3))
    assert found.same_top_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99))
    assert found.perplexity == pytest.approx(math.exp(2.5))
    assert found.log_ratio == pytest.approx(math.log(found.perplexity / found.reference_perplexity))
    assert found.log_ratio_error == pytest.approx(np.std(np.subtract(nll, base), ddof=1) / 2)


# ---- what is scored


def text_model(begins: bool) -> SimpleNamespace:
    """A tokenizer of one token a character, that begins texts with BOS, 1, or does not."""
    tokenizer = SimpleNamespace(encode=lambda text: ((1,) if begins else ()) + tuple(map(ord, text)))
    return SimpleNamespace(tokenizer=tokenizer, bos_token_id=1)


def test_a_text_is_cut_into_whole_chunks_and_a_rest_is_left_out():
    chunks = quality.cut(text_model(begins=False), "abcdefghijk", 4)
    assert chunks.tokens == (tuple(b"abcd"), tuple(b"efgh"))
    assert (chunks.first, chunks.positions) == (2, 2)
    assert quality.cut(text_model(begins=False), "abcdefghijk", 4, most_tokens=7).tokens == (tuple(b"abcd"),)


def test_where_texts_begin_with_bos_every_chunk_does_in_place_of_its_first_token():
    chunks = quality.cut(text_model(begins=True), "abcdefghijk", 4)
    assert chunks.tokens == ((1, *b"abc"), (1, *b"efg"), (1, *b"ijk"))


def test_a_text_that_fills_no_chunk_is_refused():
    with pytest.raises(ConfigError, match=r"tokens: .* 3 tokens do not fill one chunk of 4"):
        quality.cut(text_model(begins=False), "abc", 4)


def test_the_corpus_is_prose_that_is_long_enough(default_model):
    chunks = quality.cut(open_text(open_model(default_model).text), quality.CORPUS.read_text(encoding="utf-8"), 512)
    assert len(chunks.tokens) * 512 >= 20_000


# ---- models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    directory = write_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", "llama", "wide_heads_untied", torch.bfloat16
    )
    vocab = {letter: index for index, letter in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:100]])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<s>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>").save_pretrained(directory)
    return directory


def opened(directory: Path, context: int, **options) -> quality.Subject:
    config = EngineConfig(model=str(directory), dtype="float32", threads=1)
    return quality.open_subject(replace(config, **options), open_model(directory), context)


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 256), (3, 7)])
def test_a_scorer_predicts_what_transformers_does_at_every_position(tiny, block_size, chunk):
    scorer = opened(tiny, 40, block_size=block_size, max_num_batched_tokens=chunk).scorer
    for seed in (1, 2):  # a second text must not see the first
        tokens = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        logits = scorer.logits(scorer.hidden(tokens))
        torch.testing.assert_close(logits, reference_logits(tiny, tokens), atol=1e-4, rtol=1e-4)


def scored(
    directory: Path, tokens: list[int], context: int = 20, **options
) -> tuple[quality.Reference, quality.Scores]:
    chunks = quality.Chunks(context, tuple(tuple(tokens[i : i + context]) for i in range(0, len(tokens), context)))
    steps: list[None] = []
    reference = quality.Reference(opened(directory, context), chunks, lambda: steps.append(None))
    scores = quality.score(reference, opened(directory, context, **options).scorer, lambda: steps.append(None))
    assert len(steps) == 2 * len(chunks.tokens)
    return reference, scores


TOKENS = torch.randint(3, 100, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def test_the_second_half_of_each_chunk_is_scored_from_what_precedes_it_there(tiny):
    _, scores = scored(tiny, TOKENS)
    expected = []
    for start in (0, 20, 40):
        chunk = TOKENS[start : start + 20]
        logits = reference_logits(tiny, chunk)[10:-1]
        expected += torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[11:]), reduction="none").tolist()
    assert scores.reference_nll == pytest.approx(expected, abs=1e-4)
    assert len(scores.kl) == len(expected) == 27


def test_float32_does_not_diverge_from_itself_and_coarser_forms_diverge_more(tiny):
    means = {}
    for name, options in {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"dtype": "bfloat16", "quantization": "int8"},
        "int4": {"dtype": "bfloat16", "quantization": "int4"},
    }.items():
        means[name] = np.mean(scored(tiny, TOKENS, **options)[1].kl)
    assert means["float32"] < 1e-9
    assert 0 < means["bfloat16"] < means["int8"] < means["int4"]


def test_forms_are_all_that_can_be_had_and_others_are_refused_by_name(tiny, monkeypatch):
    files = open_model(tiny)

    def named(*wanted: str, **options: str) -> list[str]:
        return [form_name(each) for each in quality.possible_forms(EngineConfig(**options), files, wanted)]

    assert named() == ["none", "int8", "int4"]
    assert named("int4", "none", "int4") == ["int4", "none"]
    assert named("int4:int8-kv", "int4") == ["int4:int8-kv", "int4"]
    assert named(kv_cache_dtype="int8") == ["none:int8-kv", "int8:int8-kv", "int4:int8-kv"]
    assert named("int4:int8-kv", "int4", kv_cache_dtype="int8") == ["int4:int8-kv"]
    with pytest.raises(ConfigError, match="quantization: the file is not quantised"):
        named("file")
    assert named("none:int8-kv", dtype="float32") == ["none:int8-kv"]
    monkeypatch.setattr(native, "module", None)
    for wanted, options in [(["none:int8-kv"], {}), ([], {"kv_cache_dtype": "int8"})]:
        with pytest.raises(ConfigError, match="kv_cache_dtype: int8 needs"):
            named(*wanted, **options)


def test_the_name_of_a_form_says_weights_and_kv_cache_and_leaves_the_rest():
    given = EngineConfig(model="m", threads=3, quantization="int4")
    for name in FORMS:
        config = in_form(given, name)
        assert form_name(config) == name
        assert replace(config, quantization="int4", kv_cache_dtype="auto") == given
    assert form_name(in_form(given, "none:int8-kv"), plain="bf16") == "bf16:int8-kv"
    assert form_name(in_form(given, "file"), plain="bf16") == "file"
    with pytest.raises(ConfigError, match="quantization"):
        in_form(given, "int9:int8-kv")


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_predictions_over_an_int8_kv_cache_are_made_of_the_rounded_keys_and_values(tiny, weights):
    form = {"dtype": "bfloat16", "quantization": weights}
    _, plain = scored(tiny, TOKENS, **form)
    # a chunk that sees some keys as they were before rounding would differ from one that sees others so
    rounded = [
        scored(tiny, TOKENS, **form, kv_cache_dtype="int8", max_num_batched_tokens=chunk)[1] for chunk in (1, 7, 256)
    ]
    assert rounded[0] == rounded[1] == rounded[2]
    assert all(a != b for a, b in zip(plain.kl, rounded[0].kl, strict=True))
    assert all(a != b for a, b in zip(plain.nll, rounded[0].nll, strict=True))
    assert np.mean(rounded[0].kl) < 3 * np.mean(plain.kl)  # yet not far away


@pytest.mark.skipif(
    not (native.available() and onednn_linear.available()), reason="oneDNN serves beside the compiled kernels"
)
def test_forms_that_the_kernels_asked_for_do_not_serve_are_left_out(tiny):
    files, by_onednn = open_model(tiny), EngineConfig(dtype="bfloat16", linear_kernels="onednn")
    assert [each.quantization for each in quality.possible_forms(by_onednn, files, ())] == ["none"]
    with pytest.raises(ConfigError, match="linear_kernels"):
        quality.possible_forms(by_onednn, files, ("int8",))


def test_a_context_that_the_model_has_not_is_refused(tiny):
    with pytest.raises(ConfigError, match="context: 513 is above the model's context, 512"):
        opened(tiny, 513)


# ---- llama.cpp


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
    llama_perplexity.write_base(reference, tmp_path / "base", lambda: None)
    context, tokens, log_probs = read_base((tmp_path / "base").read_bytes())
    assert (context, tokens) == (20, TOKENS)
    following = [TOKENS[start + position + 1] for start in (0, 20, 40) for position in range(10, 19)]
    found = [-row[token] for row, token in zip(log_probs, following, strict=True)]
    assert found == pytest.approx(scores.reference_nll, abs=1e-3)
    assert np.exp(log_probs).sum(axis=1) == pytest.approx(np.ones(27), abs=1e-3)


@pytest.mark.parametrize("vocab", [6, 7])
def test_stored_log_probs_are_off_by_half_a_step_and_cut_16_below_the_largest(vocab):
    logits = random_logits(3, vocab, 4, spread=1.0)
    logits[1, 2], logits[2] = -40.0, 1.5  # a token too unlikely to tell, a row of equals
    data = sixteen_bit_log_probs(logits)
    _, _, found = read_base(struct.pack("<8s3i", b"_logits_", 8, vocab, 1) + bytes(4 * 8) + data)
    expected = logits.clamp(min=logits.amax(1, keepdim=True) - 16).double() - logits.double().logsumexp(1, keepdim=True)
    assert np.abs(found - expected.numpy()).max() < 16 / 65535


def test_what_llama_perplexity_printed_is_understood():
    found = llama_perplexity.read_perplexity(SAMPLE, "llama.cpp", 98_362_432, 1020)
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
        llama_perplexity.read_perplexity("too few positions", "llama.cpp", 1, 9)


def ours(perplexity: float) -> quality.Quality:
    known = llama_perplexity.read_perplexity(SAMPLE, "penstock none", 1, 1020)
    return replace(known, reference_perplexity=perplexity)


def test_a_base_that_was_read_as_something_else_is_found(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    commands = []

    def execute(command):
        commands.append(" ".join(command))
        return SAMPLE

    def measure(name, perplexity):
        return llama_perplexity.score_peer(
            name, tmp_path, model, tmp_path / "base", ours(perplexity), 512, 3, execute=execute
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
        llama_perplexity.find_peer_model("transformers", tmp_path, model)
    absent = llama_perplexity.find_peer_model("llama.cpp", tmp_path, model)
    assert isinstance(absent, Absent)
    assert "--install --peer llama.cpp" in absent.reason
    program(tmp_path, "llama-perplexity", "")
    assert llama_perplexity.find_peer_model("llama.cpp", tmp_path, model) == model
    assert "GGUF" in llama_perplexity.find_peer_model("llama.cpp", tmp_path, tmp_path).reason
    assert "llama-quantize" in llama_perplexity.find_peer_model("llama.cpp:Q8_0", tmp_path, model).reason


def test_an_installation_without_llama_perplexity_is_not_whole(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr("penstock.bench.peer_install._build_llama_cpp", built.append)
    for name in ("llama-batched-bench", "llama-quantize"):
        program(tmp_path, name, "")
    install_peer("llama.cpp", tmp_path, lambda line: None)
    assert built == [tmp_path]
    program(tmp_path, "llama-perplexity", "")
    install_peer("llama.cpp", tmp_path, lambda line: None)
    assert built == [tmp_path]


# ---- the command


@pytest.fixture
def call(monkeypatch, capsys, tmp_path, tiny):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog; " * 12, encoding="utf-8")

    def call(*arguments: str) -> tuple[int, str, str]:
        fixed = ["--threads", "1", "--text", str(tmp_path / "text.txt"), "--context", "64"]
        peers = ["--peers-dir", str(tmp_path / "peers")]
        monkeypatch.setattr(sys, "argv", ["penstock", "bench", "quality", str(tiny), *fixed, *peers, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return call


def test_the_command_reports_every_form_as_table_and_json(call, tmp_path):
    code, out, err = call("--json", str(tmp_path / "found.json"))
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["penstock none, bfloat16", "penstock int8", "penstock int4"]
    assert (found["kind"], found["context"], found["chunks"], found["text"]) == ("quality", 64, 8, "text.txt")
    assert all(row["positions"] == 8 * 31 for row in found["rows"])
    assert list(found["absent"]) == ["llama.cpp"]
    lines = out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == [row["name"] for row in found["rows"]]
    assert lines[-1].startswith("llama.cpp: reads GGUF files only")


def test_forms_over_an_int8_kv_cache_have_rows_of_their_own(call, tmp_path):
    forms = ("int8", "int8:int8-kv", "none:int8-kv")
    options = [part for form in forms for part in ("--quantization", form)]
    code, _, err = call("--no-peers", *options, "--json", str(tmp_path / "found.json"))
    assert (code, err) == (0, "")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "penstock int8", "penstock int8:int8-kv", "penstock none:int8-kv, bfloat16"
    ]  # fmt: skip
    assert rows[0]["weight_bytes"] == rows[1]["weight_bytes"]
    assert rows[0]["reference_perplexity"] == rows[1]["reference_perplexity"]  # float32 keeps its keys and values
    assert all(rows[0][figure] != rows[1][figure] for figure in ("kl_mean", "perplexity", "log_ratio"))


def test_the_kv_cache_of_the_operator_is_that_of_every_form(call, tmp_path):
    code, _, _ = call("--no-peers", "--kv-cache-dtype", "int8", "--json", str(tmp_path / "found.json"))
    assert code == 0
    names = [row["name"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]]
    assert names == ["penstock none:int8-kv, bfloat16", "penstock int8:int8-kv", "penstock int4:int8-kv"]


def test_llama_cpp_stands_beside_us_and_a_failure_of_it_is_told(call, tmp_path, monkeypatch, tiny):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setattr("penstock.app.find_model", lambda config: replace(open_model(tiny), path=model))
    # reads the base logits by itself, so that the perplexity it tells is the file's
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
    assert [row["name"] for row in found["rows"]] == ["penstock int8", *llama_perplexity.DEFAULT_PEERS]
    assert found["rows"][1]["kl_mean"] == 0.002699
    assert found["rows"][1]["reference_perplexity"] == pytest.approx(found["rows"][0]["reference_perplexity"], rel=1e-3)
    assert "by llama.cpp" in out.splitlines()[-1]
    assert sorted(path.name for path in (tmp_path / "peers").iterdir()) == ["llama.cpp", "models"]  # the base is gone
    program(tmp_path / "peers", "llama-perplexity", "sys.exit('no memory')")
    status, out, _ = call("--quantization", "int8", "--peer", "llama.cpp")
    assert status == 0
    assert "no memory" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--quantization", "file"), "quantization"),
        (("--quantization", "none", "--dtype", "float32", "--linear-kernels", "onednn"), "linear_kernels"),
        (("--tokens", "63"), "tokens"),
        (("--context", "513"), "context"),
        (("--peer", "llama.cpp"), "peer"),
        (("--peer", "nonsense"), "peer"),
        (("--no-peers", "--install"), "no_peers"),
    ],
)
def test_mistakes_are_exit_code_2_and_name_the_option(call, arguments, says):
    code, _, err = call(*arguments)
    assert code == 2
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


def test_help_loads_no_torch_and_offers_no_option_that_would_do_nothing():
    code = "import sys; sys.argv = ['penstock', 'bench', 'quality', '--help']\nimport penstock.cli\n"
    code += "try:\n    penstock.cli.main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--quantization", "--tokens", "--context", "--text", "--peer", "--json", "--dtype", "--threads"):
        assert option in done.stdout
    for option in ("--record", "--kv-cache-memory", "--max-num-seqs"):
        assert option not in done.stdout
