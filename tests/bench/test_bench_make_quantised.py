"""GGUF files of a checkpoint: transformers reads the same model from both, and the quantiser is called."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import gguf
import pytest
import torch
from peer_programs import program

import make_quantised
import make_random_checkpoint
from peers.write_gguf import write_gguf
from penstock.models import gguf_dialect
from penstock.text.gguf_tokenizer import read_gguf
from penstock.weights.files import open_model

SIZES = ["--hidden", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--inner", "96", "--vocabulary", "300"]
EXPERTS = ["--experts", "12", "--experts-per-token", "2", "--expert-inner", "32", "--set", "norm_topk_prob=true"]
FAMILIES = {"llama": [], "qwen3_moe": ["--head-dim", "128", *EXPERTS]}
TOKEN_IDS = torch.tensor([[(7 * i + 3) % 300 for i in range(24)]])


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    """A directory of a small random model; not to be changed."""
    directory = tmp_path_factory.mktemp("checkpoints") / request.param
    options = ["--family", request.param, *SIZES, *FAMILIES[request.param]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_random_checkpoint.py", str(directory), *options])
        make_random_checkpoint.main()
    return directory


@pytest.fixture(scope="module")
def file(checkpoint, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("files") / "model.gguf"
    write_gguf(checkpoint, target)
    return target


def logits(directory: Path, **where) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, **where)
    config.update({"moe_intermediate_size": 32} if config.model_type == "qwen3_moe" else {})  # left at its default
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32, **where)
    with torch.no_grad():
        return model.eval()(TOKEN_IDS).logits


def test_the_file_holds_the_model_that_transformers_reads_from_the_checkpoint(checkpoint, file):
    wanted = logits(checkpoint)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits(file.parent, gguf_file=file.name), wanted, atol=1e-5, rtol=0)


def test_matrices_are_bfloat16_and_what_the_quantiser_leaves_alone_is_float32(file):
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(file).tensors}
    left = {name for name in kinds if "norm" in name or "ffn_gate_inp" in name}
    assert {name for name, kind in kinds.items() if kind == "F32"} == left
    assert {kinds[name] for name in kinds.keys() - left} == {"BF16"}


def test_text_becomes_the_tokens_of_the_checkpoint(checkpoint, file):
    from transformers import AutoTokenizer

    tokenizer = read_gguf(open_model(file, gguf_dialect).text).backend
    for text in ("Hello, world", "ÿÿ é 漢字\n", "</s>"):
        ids = AutoTokenizer.from_pretrained(checkpoint).encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.get_vocab_size() == 300


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "gpt2 is not written as GGUF"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope of type yarn"),
        ({"vocab_size": 258}, "must have a row for a merge"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(checkpoint, tmp_path, change, said):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def run_script(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["make_quantised.py", *map(str, arguments)])
    make_quantised.main()


def test_each_format_is_made_once_from_one_conversion_and_never_half(checkpoint, tmp_path, monkeypatch):
    bench = tmp_path / "peers" / "llama.cpp" / "bin"
    log = tmp_path / "log"
    code = f"print(*sys.argv[1:], file=open({str(log)!r}, 'a')); pathlib.Path(sys.argv[-2]).write_text('made')"
    quantiser = program(bench / "llama-quantize", code)
    options = [checkpoint, tmp_path / "made", "--peers-dir", tmp_path / "peers"]
    run_script(monkeypatch, *options, "--format", "Q6_K", "--format", "MXFP4", "--format", "TQ2_0_IN_3")
    run_script(monkeypatch, *options, "--format", "Q6_K")
    name = checkpoint.name
    kinds = ("BF16", "Q6_K", "MXFP4", "TQ2_0_IN_3")
    plain, q6, mxfp4, tq2 = (str(tmp_path / "made" / f"{name}-{kind}") for kind in kinds)
    types, some = "--tensor-type attn_=mxfp4 --tensor-type ffn_=mxfp4", r"--tensor-type blk\.1[0-2]\.ffn_=tq2_0"
    calls = [f"{plain}.gguf {q6}.partial Q6_K", f"{types} {plain}.gguf {mxfp4}.partial MXFP4_MOE"]
    assert log.read_text().splitlines() == [*calls, f"{some} {plain}.gguf {tq2}.partial Q8_0"]
    program(quantiser, "pathlib.Path(sys.argv[-2]).write_text('half'); sys.exit('no room')")
    with pytest.raises(SystemExit, match="no room"):
        run_script(monkeypatch, *options, "--format", "Q4_K_M")
    assert {each.name for each in (tmp_path / "made").glob("*.gguf")} == {f"{name}-{kind}.gguf" for kind in kinds}


def test_without_the_quantiser_it_says_what_to_install(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"not installed.*--install --peer llama\.cpp"):
        run_script(monkeypatch, checkpoint, tmp_path / "made", "--peers-dir", tmp_path)
    assert not (tmp_path / "made").exists()
