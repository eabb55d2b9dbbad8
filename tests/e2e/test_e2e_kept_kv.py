"""KV blocks that outlive their process: answers are the same to the bit, and prompts are read, not computed."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from served import ALONE, PATIENCE, listening_url, start, wait_until

from needs import COMPILED
from penstock import LLM, SamplingParams, computing
from penstock.cli import serve
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.kernels import native
from penstock.store import folders
from penstock.store.folders import block_files
from penstock.weights.locate import default_cache_dir

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

PROMPT = [random.Random(1).randrange(100, 40_000) for _ in range(400)]
BLOCKS = len(PROMPT) // 16
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=4, logprobs=2)


def kept(root: Path) -> list[Path]:
    return sorted(Path(entry.path) for folder in folders(root) for entry in block_files(folder.path))


def answer(root: Path, blocks: int = BLOCKS, prompt: list[int] = PROMPT, **options):
    """An engine's answer, and how much of the prompt was cached; at least this many blocks must end up in files."""
    options = {"kv_cache_memory": "64MiB", "kv_store": str(root), **options}
    with LLM(**options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], SEEDED, use_tqdm=False)
    if options["kv_store"] != "off":
        assert len(kept(root)) >= blocks, "what was to be saved is, when the engine is closed"
    (choice,) = output.outputs
    return (tuple(choice.token_ids), choice.cumulative_logprob, choice.logprobs), output.num_cached_tokens


def test_the_next_process_reads_what_the_last_computed(tmp_path):
    alone, _ = answer(tmp_path, kv_store="off")
    assert not kept(tmp_path)
    first, cached = answer(tmp_path)
    assert (first, cached) == (alone, 0)
    assert len(kept(tmp_path)) == (len(PROMPT) + 24 - 1) // 16
    second, cached = answer(tmp_path)
    assert (second, cached) == (alone, 384)


def test_damage_anywhere_changes_no_answer(tmp_path):
    alone, _ = answer(tmp_path)
    rng = random.Random(2)
    for path in kept(tmp_path):
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
        path.write_bytes(content)
    assert answer(tmp_path) == (alone, 0)
    for path in kept(tmp_path)[::3]:
        path.unlink()
    assert answer(tmp_path)[0] == alone


@pytest.mark.deep
def test_another_form_is_another_contract(tmp_path):
    answer(tmp_path)
    before = kept(tmp_path)
    _, cached = answer(tmp_path, 2 * len(before), kv_cache_dtype="int8")
    assert cached == 0
    _, cached = answer(tmp_path, 0, block_size=8)
    assert cached == 0
    assert len(list(folders(tmp_path))) == 3
    assert len({folder.facts["model"] for folder in folders(tmp_path)}) == 1


@contextmanager
def server(
    root: Path | None, *arguments: str, killed: bool, said: list[str] | None = None, **environment: str
) -> Iterator[str]:
    """The URL of a server whose store is in `root`, or in its default folder; `said` gets its start report."""
    command = ["serve", "--port", "0", ALONE, *arguments]
    command += ["--kv-store", str(root)] if root is not None else []
    with start(*command, "--kv-cache-memory", "64MiB", **environment) as process:
        try:
            yield listening_url(process, time.monotonic(), said)
        finally:
            process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
            process.wait(PATIENCE)


def ask(url: str, **body: object) -> tuple[object, int]:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.9, "seed": 4, "logprobs": 2, **body}
    said = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE).json()
    return said["choices"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.fixture
def cache_dir(tmp_path) -> Path:
    """A user's cache directory of its own, with the models of the real one."""
    made, real = tmp_path / "cache", default_cache_dir(os.environ)
    made.mkdir()
    for each in real.iterdir():
        if each.name != "kv-blocks":
            (made / each.name).symlink_to(each)
    return made


def own(cache_dir: Path, **more: str) -> dict[str, str]:
    return {"PENSTOCK_CACHE": str(cache_dir), "PENSTOCK_KV_STORE": "", **more}


def test_servers_keep_blocks_by_default_and_say_so_and_outlive_a_kill(cache_dir):
    """Neither of the two servers was told to."""
    said: list[str] = []
    root = cache_dir / "kv-blocks"
    with server(None, killed=True, said=said, **own(cache_dir)) as url:
        (line,) = [line for line in said if line.startswith("kept KV")]
        assert re.search(rf"0 tokens of this model in {root}; at most [\d.]+ [MG]iB of the disk \(--kv-store off", line)
        assert root.stat().st_mode & 0o777 == 0o700
        choices, cached = ask(url)
        assert cached == 0
        wait_until(lambda: len(kept(root)) >= BLOCKS)
    said.clear()
    with server(None, killed=False, said=said, **own(cache_dir)) as url:
        assert any(f"{16 * BLOCKS} tokens of this model in {root}" in line for line in said)
        assert ask(url) == (choices, 384)
        assert metric(url, "vllm:external_prefix_cache_hits_total") == 384
        assert metric(url, "vllm:prefix_cache_hits_total") == 0
        assert ask(url) == (choices, 384)
        assert metric(url, "vllm:external_prefix_cache_hits_total") == 384
        assert metric(url, "vllm:prefix_cache_hits_total") == 384
        assert metric(url, "penstock:kv_store_bytes") >= 0
    assert len(kept(root)) == BLOCKS


@pytest.mark.deep
def test_two_servers_at_a_time_share_one_prefill(tmp_path):
    with server(tmp_path, killed=True) as url:
        choices, _ = ask(url)
        wait_until(lambda: len(kept(tmp_path)) >= BLOCKS)
        with server(tmp_path, killed=True) as other:
            assert ask(other) == (choices, 384)


@pytest.mark.deep
def test_a_server_that_ends_in_order_writes_what_it_computed_last(tmp_path):
    """It is told to end as soon as the answer is there, when hardly anything was written."""
    prompt = [random.Random(3).randrange(100, 40_000) for _ in range(2000)]
    with server(tmp_path, killed=False) as url:
        choices, _ = ask(url, prompt=prompt)
        meanwhile = len(kept(tmp_path))
    assert meanwhile < 125
    assert len(kept(tmp_path)) == 125, "each block of the prompt; the answer fills none"
    with server(tmp_path, killed=True) as url:
        assert ask(url, prompt=prompt) == (choices, 1984)


@pytest.mark.deep
def test_tenants_do_not_find_what_others_computed(tmp_path):
    with server(tmp_path, killed=True) as url:
        choices, _ = ask(url, cache_salt="one")
        wait_until(lambda: len(kept(tmp_path)) >= BLOCKS)
    with server(tmp_path, killed=False) as url:
        assert ask(url, cache_salt="two") == (choices, 0)
        assert ask(url, cache_salt="one") == (choices, 384)


@pytest.mark.deep
def test_a_stored_response_is_continued_after_a_kill_and_its_conversation_is_read(tmp_path):
    """The journal has the text, the store has what was computed of it: the next turn computes only its own tokens."""
    journal, root = tmp_path / "journal", tmp_path / "kept"
    asked = {"temperature": 0, "max_output_tokens": 24}
    story = " ".join(f"The keeper of lighthouse {number} wrote a letter." for number in range(40))
    with server(root, "--journal", str(journal), killed=True) as url:
        first = httpx.post(f"{url}/v1/responses", json={"input": story, **asked}, timeout=PATIENCE).json()
        used = first["usage"]
        assert used["input_tokens_details"]["cached_tokens"] == 0
        wait_until(lambda: len(kept(root)) >= (used["total_tokens"] - 1) // 16)
        turn = {"input": "Who wrote?", "previous_response_id": first["id"], **asked}
        unbroken = httpx.post(f"{url}/v1/responses", json=turn, timeout=PATIENCE).json()
    with server(root, "--journal", str(journal), killed=False) as url:
        second = httpx.post(f"{url}/v1/responses", json=turn, timeout=PATIENCE).json()
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= used["input_tokens"] // 16 * 16, (
            "all of the first prompt, and of its answer what is rendered alike"
        )
        assert second["usage"]["input_tokens"] - cached < 64, "what is new is all that is computed"
        assert metric(url, "vllm:external_prefix_cache_hits_total") == cached
    assert second["output"][0]["content"] == unbroken["output"][0]["content"]
    assert second["usage"]["output_tokens"] == unbroken["usage"]["output_tokens"]


@pytest.fixture(params=["option", "environment", "file"])
def told_off(request, tmp_path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment with which a server keeps nothing."""
    options = tmp_path / "options.yaml"
    options.write_text("kv-store: 'off'\n")
    arguments = {"option": ["--kv-store", "off"], "environment": [], "file": ["--config", str(options)]}[request.param]
    return arguments, {"PENSTOCK_KV_STORE": "off" if request.param == "environment" else ""}


class NotStarted(Exception):
    """The engine would now be started."""


def engines_folder(monkeypatch, arguments: list[str], environment: dict[str, str]) -> str:
    """The option as `penstock serve` hands it to the engine, which is not started here."""
    given: list[str] = []

    def start_computing(config: EngineConfig, *_: object, **__: object) -> None:
        given.append(config.kv_store)
        raise NotStarted

    monkeypatch.setattr(computing, "start_computing", start_computing)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotStarted):
        serve.command.main(arguments, standalone_mode=False)
    return given[0]


def test_it_is_ended_by_an_option_the_environment_or_a_file(told_off, monkeypatch):
    """A test above shows that such an engine keeps nothing, the next one that such a server keeps nothing."""
    assert engines_folder(monkeypatch, *told_off) == "off"
    assert engines_folder(monkeypatch, [], {"PENSTOCK_KV_STORE": ""}) == "auto"


@pytest.mark.deep
def test_a_server_that_is_told_so_keeps_nothing(cache_dir, told_off):
    arguments, environment = told_off
    said: list[str] = []
    with server(None, *arguments, killed=False, said=said, **own(cache_dir) | environment) as url:
        ask(url)
    assert not (cache_dir / "kv-blocks").exists()
    assert not any(line.startswith("kept KV") for line in said)


@pytest.mark.deep
def test_where_nothing_can_be_kept_a_server_serves_and_says_so_once(cache_dir):
    (cache_dir / "kv-blocks").write_text("no folder")
    said: list[str] = []
    with server(None, killed=False, said=said, **own(cache_dir)) as url:
        assert ask(url)[1] == 0
    assert sum("kv-blocks" in line for line in said) == 1


def test_a_folder_that_was_named_and_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="kv_store"):
        LLM(kv_store=str(tmp_path / "file"), kv_cache_memory="64MiB")


def test_the_library_keeps_nothing_unless_asked(cache_dir, monkeypatch):
    for name, value in own(cache_dir).items():
        monkeypatch.setenv(name, value)
    with LLM(kv_cache_memory="64MiB") as llm:
        llm.generate([{"prompt_token_ids": PROMPT}], SEEDED, use_tqdm=False)
    assert not (cache_dir / "kv-blocks").exists()
