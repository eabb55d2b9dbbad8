"""Ranks in processes of their own: exact under every schedule, and in float32 the greedy tokens of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.kernels import native
from penstock.loading import LoadedModel, find_model
from penstock.rank_loading import load_on_ranks
from penstock.verify import SMALL, Target, open_target, verify
from penstock.verify.run import run_alone

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

BUDGET = replace(SMALL, requests=9, schedules=4)
GREEDY = SamplingSpec((("temperature", 0),))
FAMILIES = {
    "llama": "wide_heads_untied",
    "qwen3": "wide_heads_tied",
    "gemma2": "wide_heads_tied_small_window",
    "mixtral": "wide_heads_tied_unused_experts",
    "gpt_oss": "wide_heads_unused_experts_small_window",
    "lfm2": "wide_heads_tied_four_taps",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("divided")
    for family in FAMILIES:
        (folder / family).mkdir()
    return {family: str(write_lettered(folder / family, family, FAMILIES[family])) for family in FAMILIES}


def config_of(model: str, ranks: int = 2, **options) -> EngineConfig:
    return EngineConfig(model=model, **{"threads": 1, "tensor_parallel": ranks, "dtype": "float32", **options})


@contextmanager
def opened(config: EngineConfig) -> Iterator[tuple[LoadedModel, Target]]:
    loaded = load_on_ranks(config, find_model(config), lambda line: None)
    with open_target(loaded, config) as target:
        yield loaded, target


def greedy(target: Target, count: int = 40) -> list[tuple[int, ...]]:
    """The answers to three prompts."""
    prompts = [tuple((11 * at + start) % target.vocab_size for at in range(20)) for start in (3, 5, 8)]
    stop = StopRules(max_tokens=count)
    requests = [SequenceRequest(str(index), prompt, sampling=GREEDY, stop=stop) for index, prompt in enumerate(prompts)]
    return [run_alone(target, request).tokens for request in requests]


@pytest.mark.deep  # each takes 20 s where ranks share a processor; test_models_dividing compares without processes
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_exact_and_answer_in_float32_what_one_process_does(models, family):
    with opened(config_of(models[family], ranks=1)) as (_, alone):
        want = greedy(alone)
    with opened(config_of(models[family])) as (loaded, target):
        assert greedy(target) == want
        report = verify(target, BUDGET, config_of(models[family]))
        assert report.exact, report.table()
        pids = loaded.ranks.pids
    assert len({token for tokens in want for token in tokens}) > 3
    assert [pid for pid in pids if is_there(pid)] == []


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}),
        ("lfm2", {"dtype": "bfloat16", "quantization": "int4"}),
        ("mixtral", {"dtype": "bfloat16", "quantization": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_two_ranks_are_exact_in_narrower_forms(models, family, options):
    config = config_of(models[family], **options)
    with opened(config) as (_, target):
        report = verify(target, BUDGET, config)
        assert report.exact, report.table()


@pytest.mark.deep
def test_a_sum_in_another_order_would_be_found(models, monkeypatch):
    """A rank that adds up the parts of a long step in another order, as a reduction that depends on the shape would."""
    from penstock.nn import divided

    def summed(group, part):
        parts = group.gather(part)
        return parts.flip(0).sum(0) + (1e-3 if len(part) == 1 else 0.0)

    config = config_of(models["llama"])
    monkeypatch.setattr(divided, "all_reduced", summed)  # in this process, and so in rank 0 alone
    with opened(config) as (_, target):
        assert not verify(target, BUDGET, config).exact


def test_the_end_of_one_rank_is_the_end_of_all(models):
    with opened(config_of(models["llama"], ranks=2)) as (loaded, target):
        greedy(target, 2)
        os.kill(loaded.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(EngineFault):
            greedy(target, 2)
        with pytest.raises(EngineFault, match="SIGKILL"):
            greedy(target, 2)
        assert [pid for pid in loaded.ranks.pids if is_there(pid)] == []


@pytest.mark.parametrize(
    ("options", "option", "message"),
    [
        ({"draft_model": "any"}, "draft_model", "several ranks take no draft model so far"),
        ({"lora": ("a=b",)}, "lora", "several ranks take no adapters so far"),
        ({"lora_dir": "folder"}, "lora_dir", "several ranks take no adapters so far"),
        ({"tensor_parallel": 3}, "tensor_parallel", "3 ranks cannot share 2 key heads"),
        ({"kv_cache_memory": 1 << 50}, "model", "processes of other ranks 192.0 MiB"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_its_name(models, options, option, message):
    config = config_of(models["llama"], **options)
    with pytest.raises(ConfigError, match=message) as refused:
        load_on_ranks(config, find_model(config), lambda line: None)
    assert refused.value.option == option


def test_ranks_are_no_part_of_a_process_that_is_to_compute_alone():
    with pytest.raises(ConfigError, match="tensor_parallel asks for several") as refused:
        EngineConfig(tensor_parallel=2, runner="in-process")
    assert refused.value.option == "runner"


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
