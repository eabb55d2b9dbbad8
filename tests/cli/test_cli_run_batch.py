"""What `penstock run-batch` tells its engine, where that differs from what `penstock serve` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.options import build_configs
from penstock.cli.run_batch import command
from penstock.cli.serve import command as serve
from penstock.contract.config import EngineConfig


def engine_config(tmp_path: Path, *arguments: str) -> EngineConfig:
    source = tmp_path / "batch.jsonl"
    source.touch()
    files = ["-i", str(source), "-o", str(tmp_path / "answers.jsonl")]
    (config,) = build_configs(command.make_context("run-batch", [*files, *arguments]), EngineConfig)
    return config


def test_a_batch_has_no_step_target_since_nobody_waits_for_a_single_token(tmp_path):
    assert engine_config(tmp_path).step_target_ms == 0
    (served,) = build_configs(serve.make_context("serve", []), EngineConfig)
    assert served.step_target_ms == EngineConfig().step_target_ms > 0


@pytest.mark.parametrize("target", [0, 70, EngineConfig().step_target_ms])
def test_a_step_target_that_is_given_counts(tmp_path, target):
    assert engine_config(tmp_path, "--step-target-ms", str(target)).step_target_ms == target


def test_a_step_target_in_the_file_of_options_counts_and_a_flag_wins_over_it(tmp_path):
    options = tmp_path / "options.yaml"
    options.write_text("step-target-ms: 70\n", encoding="utf-8")
    assert engine_config(tmp_path, "--config", str(options)).step_target_ms == 70
    assert engine_config(tmp_path, "--config", str(options), "--step-target-ms", "30").step_target_ms == 30
