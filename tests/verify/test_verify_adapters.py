"""`penstock verify` with adapters: proved as it is, and not proved where a bug is planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock.contract.config import EngineConfig
from penstock.core import block_keys, invariants, scheduler
from penstock.exec.adapters import AdapterSlots
from penstock.kernels import native
from penstock.loading import find_model, load_model
from penstock.verify import SMALL, open_target, verify

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)
BUDGET = replace(SMALL, requests=9, schedules=4)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "model").mkdir()
    model = write_lettered(folder / "model", "llama", "wide_heads_untied", intermediate_size=96)
    modules = linear_modules(load_with_adapters(model).program)
    paths = [write_adapter(folder / name, modules, rank) for name, rank in (("poet", 4), ("clerk", 7))]
    lora = tuple(f"{path.name}={path}" for path in paths)
    return EngineConfig(model=str(model), dtype="float32", threads=2, lora=lora)


def report_of(config: EngineConfig):
    loaded = load_model(config, find_model(config), lambda line: None)
    with open_target(loaded, config) as target:
        assert [name for name, _ in target.adapters] == ["poet", "clerk"]
        return verify(target, BUDGET, config)


def test_answers_of_adapters_are_proved(config):
    report = report_of(config)
    assert report.proved, report.table()


def one_token_too_early(self, rows, adapted=AdapterSlots.adapted):
    """The first adapter begins one token too early, in a row without an adapter."""
    groups = adapted(self, rows)
    return [group._replace(first=max(0, group.first - (not at))) for at, group in enumerate(groups)]


def the_first_adapter_for_all(self, rows, adapted=AdapterSlots.adapted):
    groups = adapted(self, rows)
    return [group._replace(adapter=groups[0].adapter) for group in groups]


@pytest.mark.parametrize("plant", [one_token_too_early, the_first_adapter_for_all])
def test_rows_that_get_anothers_adapter_are_found(config, plant, monkeypatch):
    monkeypatch.setattr(AdapterSlots, "adapted", plant)
    assert not report_of(config).exact


def test_blocks_that_adapters_share_are_found(config, monkeypatch):
    for room in (scheduler, invariants):
        monkeypatch.setattr(room, "root_key", lambda root, salt, adapter: block_keys.root_key(root, salt))
    assert not report_of(config).exact
