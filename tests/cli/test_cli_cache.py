"""`penstock cache` lists, measures and clears what is kept in files, and verifies blocks by computing them again."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from served import wait_until
from store_harness import fill, open_store

from needs import COMPILED
from penstock import LLM, SamplingParams
from penstock.cli import penstock
from penstock.contract.plan import Save
from penstock.kernels import native
from penstock.store import BlockStore, folders
from penstock.store.folders import block_files


def run(*arguments: object):
    return CliRunner().invoke(penstock, ["cache", *map(str, arguments)])


def test_what_is_kept_is_listed_measured_and_cleared(tmp_path):
    fill(open_store(tmp_path), range(3))
    fill(open_store(tmp_path, isa="other"), range(2))
    names = [folder.path.name for folder in folders(tmp_path)]
    listed = run("list", "--kv-store", tmp_path).output
    assert "3 blocks, 12 tokens" in listed
    assert "2 blocks, 8 tokens" in listed
    assert all(name in listed for name in names)
    assert "in 5 blocks" in run("size", "--kv-store", tmp_path).output
    refused = run("clear", "--kv-store", tmp_path)
    assert refused.exit_code != 0, "nobody was asked"
    assert run("clear", "nowhere", "--yes", "--kv-store", tmp_path).exit_code != 0
    one = next(folder for folder in folders(tmp_path) if folder.facts["isa"] == "other")
    assert "2 blocks deleted" in run("clear", one.path.name, "--yes", "--kv-store", tmp_path).output
    assert "3 blocks deleted" in run("clear", "--yes", "--kv-store", tmp_path).output
    assert run("list", "--kv-store", tmp_path).output == ""


def test_a_store_that_is_off_has_nothing_to_show():
    assert run("list", "--kv-store", "off").exit_code != 0


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_verify_computes_blocks_again_and_finds_the_one_that_is_wrong(tmp_path):
    prompt = list(range(100, 200))
    with LLM(kv_store=str(tmp_path), kv_cache_memory="64MiB") as llm:
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
        wait_until(lambda: sum(folder.size()[0] for folder in folders(tmp_path)) >= 6)
    said = run("verify", "--kv-store", tmp_path, "--blocks", 9)
    assert said.exit_code == 0, said.output
    assert "6 blocks are what was computed again, 0 are not" in said.output
    (folder,) = folders(tmp_path)
    store = BlockStore(folder)
    keys = [bytes.fromhex(entry.name) for entry in block_files(folder.path)]
    blocks = {origin.before: (origin, body) for origin, body in (store.origin(key) for key in keys)}
    wrong, body = blocks[2]
    store.remove(wrong.key)
    store.write(Save(0, *wrong), bytes([body[0] ^ 1]) + body[1:])
    store.remove(blocks[4][0].key)
    said = run("verify", "--kv-store", tmp_path, "--blocks", 9)
    assert said.exit_code == 1
    assert wrong.key.hex() in said.output
    assert "3 blocks are what was computed again, 1 are not" in said.output
    assert "of 1 the blocks before them are gone" in said.output
