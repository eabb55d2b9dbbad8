"""`penstock verify` finds every planted bug, in its default sizes, whatever the seed.

`PENSTOCK_PLANT_SEEDS=20 make test-deep ARGS="tests/verify/test_verify_plants.py"` tries each with 20 seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import verify_plants
from tiny_checkpoints import BYTE_VOCABULARY, write_byte_tokenizer
from verify_plants import BUGS

from needs import COMPILED
from penstock.kernels import native

SEEDS = int(os.environ.get("PENSTOCK_PLANT_SEEDS", "3"))

pytestmark = pytest.mark.skipif(
    not native.available(), reason=f"{COMPILED}; torch's kernels make no promise that a bug breaks"
)


WINDOW = 21


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """A tiny random model whose vocabulary has every byte, so that grammars can be followed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return write_byte_model(tmp_path_factory.mktemp("plants") / "byte-llama", LlamaConfig, LlamaForCausalLM)


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory):
    """The same with a window in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    directory = tmp_path_factory.mktemp("plants") / "byte-mistral"
    return write_byte_model(directory, MistralConfig, MistralForCausalLM, sliding_window=WINDOW)


@pytest.fixture(scope="session")
def stateful_model(tmp_path_factory):
    """One whose first layer is a short convolution."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    directory, layers = tmp_path_factory.mktemp("plants") / "byte-lfm2", ["conv", "full_attention"]
    return write_byte_model(directory, Lfm2Config, Lfm2ForCausalLM, layer_types=layers, block_multiple_of=8)


def write_byte_model(directory: Path, config_class, model_class, **settings) -> Path:
    import torch

    torch.manual_seed(3)
    config = config_class(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        intermediate_size=88,
        vocab_size=BYTE_VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    model_class(config).save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


def verified(bug: str, model: Path, folder: Path, seeds: int, first: int = 0) -> list[dict]:
    """What `penstock verify` says of a model with a bug planted, one dictionary a seed."""
    program = [sys.executable, verify_plants.__file__, bug, str(first), str(seeds), "--", str(model)]
    quicker = ["--fail-fast", "--threads", "1"]  # neither changes what is drawn
    done = subprocess.run([*program, *quicker], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(bug: str, said: list[dict]) -> None:
    assert all(each["effects"] for each in said), f"{bug} never took effect: {said}"
    missed = [each["seed"] for each in said if each["code"] != 1 or not each["first"]]
    assert not missed, f"{bug} was not found with the seeds {missed}: {said}"
    for each in said:  # by a token, or by an invariant of core or runner that stopped the schedule
        verdict = "not exact: " if each["first"].startswith("first mismatch: ") else "trace of schedule"
        assert each["last"].startswith(verdict), each


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS)
def test_verify_finds_a_planted_bug_with_every_seed(bug, tmp_path, request):
    model = "windowed_model" if BUGS[bug].windowed else "stateful_model" if BUGS[bug].stateful else "byte_model"
    said = verified(bug, request.getfixturevalue(model), tmp_path, SEEDS)
    assert len(said) == SEEDS
    check(bug, said)


@pytest.mark.deep
@pytest.mark.model
@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if not (bug.windowed or bug.stateful)])
def test_verify_finds_a_planted_bug_in_the_default_model(bug, default_model, tmp_path):
    check(bug, verified(bug, default_model, tmp_path, seeds=1))


@pytest.mark.deep
@pytest.mark.parametrize("model", ["byte_model", "windowed_model", "stateful_model"])
def test_verify_finds_nothing_where_nothing_is_planted(model, tmp_path, request):
    for each in verified("none", request.getfixturevalue(model), tmp_path, SEEDS):
        assert (each["code"], each["first"]) == (0, ""), each
        assert each["last"].startswith("exact: 0 mismatching tokens of "), each


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_every_bug_still_has_its_place(bug):
    """Checked in everyday runs too, so that a moved function takes its bug along before the deep tests are run."""
    place = verify_plants.place_of(bug)
    assert callable(getattr(*place))


def test_a_bug_that_lost_its_place_is_an_error():
    lost = replace(BUGS["attention-one-too-far"], place="penstock.exec.batch:SlotTables.no_such_method")
    with pytest.raises(AssertionError, match=r"SlotTables\.no_such_method is not there any more"):
        verify_plants.plant(lost)
