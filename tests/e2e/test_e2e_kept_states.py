"""Models that carry recurrent state: the next process reads blocks and states, and answers are the same to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_checkpoints import VARIANTS, write_lettered

from needs import COMPILED
from penstock import LLM, SamplingParams
from penstock.cli import penstock
from penstock.contract.plan import Save
from penstock.core.restoring import Restoring
from penstock.kernels import native
from penstock.store import BlockStore, clear, folders
from penstock.store.folders import block_files

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

PROMPT = [random.Random(1).randrange(3, 90) for _ in range(200)]
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=4, logprobs=2, ignore_eos=True)
OPTIONS = {"kv_cache_memory": "8MiB", "max_num_seqs": 4, "state_checkpoint_interval": 64}


@pytest.fixture(scope="module", params=["lfm2", "granitemoehybrid", "qwen3_5_text"])
def model(request, tmp_path_factory) -> Path:
    return write_lettered(tmp_path_factory.mktemp("model"), request.param, next(iter(VARIANTS[request.param])))


def answers(model: Path, root: Path | str, *prompts: list[int]):
    """What a new engine answers to each prompt, one after the other, and how much of the prompt was cached."""
    found = []
    with LLM(str(model), kv_store=str(root), **OPTIONS) as llm:
        for prompt in prompts:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], SEEDED, use_tqdm=False)
            (choice,) = output.outputs
            said = tuple(choice.token_ids), choice.cumulative_logprob, choice.logprobs
            found.append((said, output.num_cached_tokens))
    return found


@pytest.fixture(autouse=True)
def _read(monkeypatch):
    """Read whatever is stored: with models this small, reading often takes longer than computing it again."""
    monkeypatch.setattr(Restoring, "_is_worth_it", lambda self, start, count: True)


def parts(root: Path) -> dict[str, BlockStore]:
    return {folder.facts.get("holds", "blocks"): BlockStore(folder) for folder in folders(root)}


def test_the_next_process_goes_on_from_stored_states(model, tmp_path):
    ((first, cached),) = answers(model, "off", PROMPT)
    assert cached == 0
    assert answers(model, tmp_path, PROMPT) == [(first, 0)]
    turn = [*PROMPT, *first[0], 5, 6, 7, 8, 9]
    edited = [*PROMPT[:150], *range(20, 40)]
    (alone_turn, _), (alone_edited, _) = answers(model, "off", turn, edited)
    assert answers(model, tmp_path, PROMPT, turn, edited) == [(first, 192), (alone_turn, 208), (alone_edited, 128)]
    assert answers(model, tmp_path, turn)[0] == (alone_turn, 224)


def test_damage_and_loss_change_no_answer(model, tmp_path):
    ((alone, _),) = answers(model, tmp_path, PROMPT)
    rng = random.Random(2)
    states = parts(tmp_path)["recurrent states"]
    for entry in block_files(states.folder.path):
        path = Path(entry.path)
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
        path.write_bytes(content)
    assert answers(model, tmp_path, PROMPT) == [(alone, 0)]
    assert answers(model, tmp_path, PROMPT) == [(alone, 192)], "they were written again"
    store = parts(tmp_path)["blocks"]
    for entry in list(block_files(store.folder.path))[::4]:
        Path(entry.path).unlink()
    assert answers(model, tmp_path, PROMPT)[0][0] == alone
    clear(tmp_path, states.folder)
    assert answers(model, tmp_path, PROMPT) == [(alone, 0)], "blocks alone are of no use"


def test_verify_computes_states_again_and_finds_the_one_that_is_wrong(model, tmp_path):
    answers(model, tmp_path, PROMPT)
    options = ["--kv-store", str(tmp_path), "--blocks", "99"]

    def verified():
        return CliRunner().invoke(penstock, ["cache", "verify", str(model), *options])

    store = parts(tmp_path)["recurrent states"]
    keys = [bytes.fromhex(entry.name) for entry in block_files(store.folder.path)]
    total = len(keys) + sum(1 for _ in block_files(parts(tmp_path)["blocks"].folder.path))
    said = verified()
    assert said.exit_code == 0, said.output
    assert f"{total} blocks are what was computed again, 0 are not" in said.output
    origin, body = store.origin(keys[0])
    store.remove(keys[0])
    store.write(Save(0, *origin), bytes([body[0] ^ 1]) + body[1:])
    said = verified()
    assert said.exit_code == 1
    assert keys[0].hex() in said.output
