"""Quality: the arithmetic of divergences, what is scored, the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quality_harness import TOKENS, opened, random_logits, scored
from tiny_checkpoints import reference_logits
from torch.distributions import Categorical, kl_divergence

from penstock.bench import quality
from penstock.bench.variants import VARIANTS, variant_name, with_variant
from penstock.cli import main
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.exec.divergence import divergence
from penstock.kernels import native
from penstock.models import gguf_dialect
from penstock.text import open_text
from penstock.weights.files import open_model

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
    """A tokenizer of one token a character; if `begins`, texts begin with BOS, 1."""
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
    text = open_text(open_model(default_model, gguf_dialect).text)
    chunks = quality.cut(text, quality.CORPUS.read_text(encoding="utf-8"), 512)
    assert len(chunks.tokens) * 512 >= 20_000


# ---- models


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 256), (3, 7)])
def test_a_scorer_predicts_what_transformers_does_at_every_position(tiny, block_size, chunk):
    scorer = opened(tiny, 40, block_size=block_size, max_num_batched_tokens=chunk).scorer
    for seed in (1, 2):  # a second text must not see the first
        tokens = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        logits = scorer.logits(scorer.hidden(tokens))
        torch.testing.assert_close(logits, reference_logits(tiny, tokens), atol=1e-4, rtol=1e-4)


def test_the_second_half_of_each_chunk_is_scored_from_what_precedes_it_there(tiny):
    _, scores = scored(tiny, TOKENS)
    expected = []
    for start in (0, 20, 40):
        chunk = TOKENS[start : start + 20]
        logits = reference_logits(tiny, chunk)[10:-1]
        expected += torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[11:]), reduction="none").tolist()
    assert scores.reference_nll == pytest.approx(expected, abs=1e-4)
    assert len(scores.kl) == len(expected) == 27


def test_float32_does_not_diverge_from_itself_and_coarser_formats_diverge_more(tiny):
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


def test_variants_are_all_that_can_be_had_and_others_are_refused_by_name(tiny, monkeypatch):
    files = open_model(tiny, gguf_dialect)

    def named(*wanted: str, **options: str) -> list[str]:
        return [variant_name(each) for each in quality.possible_variants(EngineConfig(**options), files, wanted)]

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


def test_the_name_of_a_variant_says_weights_and_kv_cache_and_leaves_the_rest():
    given = EngineConfig(model="m", threads=3, quantization="int4")
    for name in VARIANTS:
        config = with_variant(given, name)
        assert variant_name(config) == name
        assert replace(config, quantization="int4", kv_cache_dtype="auto") == given
    assert variant_name(with_variant(given, "none:int8-kv"), plain="bf16") == "bf16:int8-kv"
    assert variant_name(with_variant(given, "file"), plain="bf16") == "file"
    with pytest.raises(ConfigError, match="quantization"):
        with_variant(given, "int9:int8-kv")


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_predictions_over_an_int8_kv_cache_are_made_of_the_rounded_keys_and_values(tiny, weights):
    form = {"dtype": "bfloat16", "quantization": weights}
    _, plain = scored(tiny, TOKENS, **form)
    # if a chunk saw some keys unrounded, the result would depend on how the text is cut into chunks
    rounded = [
        scored(tiny, TOKENS, **form, kv_cache_dtype="int8", max_num_batched_tokens=chunk)[1] for chunk in (1, 7, 256)
    ]
    assert rounded[0] == rounded[1] == rounded[2]
    assert all(a != b for a, b in zip(plain.kl, rounded[0].kl, strict=True))
    assert all(a != b for a, b in zip(plain.nll, rounded[0].nll, strict=True))
    assert np.mean(rounded[0].kl) < 3 * np.mean(plain.kl)  # yet not far away


def test_a_context_that_the_model_has_not_is_refused(tiny):
    with pytest.raises(ConfigError, match="context: 513 is above the model's context, 512"):
        opened(tiny, 513)


# ---- the command


@pytest.fixture
def call(monkeypatch, capsys, text_file, tiny):
    def call(*arguments: str) -> tuple[int, str, str]:
        fixed = ["--threads", "1", "--text", str(text_file), "--context", "64"]
        monkeypatch.setattr(sys, "argv", ["penstock", "bench", "quality", str(tiny), *fixed, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return call


def test_the_command_reports_every_variant_as_table_and_json(call, tmp_path):
    code, out, err = call("--json", str(tmp_path / "found.json"))
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["penstock none, bfloat16", "penstock int8", "penstock int4"]
    assert (found["kind"], found["context"], found["chunks"], found["text"]) == ("quality", 64, 8, "text.txt")
    assert all(row["positions"] == 8 * 31 for row in found["rows"])
    lines = out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == [row["name"] for row in found["rows"]]


def test_variants_over_an_int8_kv_cache_have_rows_of_their_own(call, tmp_path):
    forms = ("int8", "int8:int8-kv", "none:int8-kv")
    options = [part for form in forms for part in ("--quantization", form)]
    code, _, err = call(*options, "--json", str(tmp_path / "found.json"))
    assert (code, err) == (0, "")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "penstock int8", "penstock int8:int8-kv", "penstock none:int8-kv, bfloat16"
    ]  # fmt: skip
    assert rows[0]["weight_bytes"] == rows[1]["weight_bytes"]
    assert rows[0]["reference_perplexity"] == rows[1]["reference_perplexity"]  # float32 keeps its keys and values
    assert all(rows[0][figure] != rows[1][figure] for figure in ("kl_mean", "perplexity", "log_ratio"))


def test_the_kv_cache_of_the_operator_is_that_of_every_variant(call, tmp_path):
    code, _, _ = call("--kv-cache-dtype", "int8", "--json", str(tmp_path / "found.json"))
    assert code == 0
    names = [row["name"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]]
    assert names == ["penstock none:int8-kv, bfloat16", "penstock int8:int8-kv", "penstock int4:int8-kv"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--quantization", "file"), "quantization"),
        (("--tokens", "63"), "tokens"),
        (("--context", "513"), "context"),
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
    for option in ("--quantization", "--tokens", "--context", "--text", "--json", "--dtype", "--threads"):
        assert option in done.stdout
    for option in ("--record", "--kv-cache-memory", "--max-num-seqs", "--peer", "--install"):
        assert option not in done.stdout
