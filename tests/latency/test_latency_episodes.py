"""Whatever happens, the parts sum to the wall time, and the record of it gives the same parts."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from latency_harness import BETWEEN, parts_of, timed

from penstock.contract.measurements import PARTS
from penstock.latency.recorded import lives_of

RECORDED = 1e-6
"""Seconds; a record's instants are microseconds."""

EPISODES = [
    {"depth": 1},
    {"depth": 2},
    {"depth": 1, "num_blocks": 18},
    {"depth": 2, "num_blocks": 18},
    {"depth": 2, "num_blocks": 24, "policy": "fair", "step_target_ms": 4},
    {"depth": 1, "policy": "priority", "prefix_caching": False, "num_blocks": 20},
]


@pytest.mark.parametrize("options", EPISODES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_parts_sum_to_the_wall_time_and_are_found_again_in_the_record(tmp_path, options, seed):
    draw, path = random.Random(seed), tmp_path / "run.trace"
    harness = timed(record=path, max_num_seqs=3, **options)
    for step in draw.sample(range(60), 2 * (seed % 2)):
        harness.runner.crash_at(step)
    submitted: list[str] = []
    for _ in range(400):
        if len(submitted) < 14 and draw.random() < 0.2:
            prompt = "".join(draw.choice("abc") for _ in range(draw.randint(1, 40)))
            submitted.append(harness.submit(prompt, n=draw.choice((1, 1, 2)), max_tokens=draw.randint(1, 16)))
            if draw.random() < 0.2:
                harness.runner.let_wait(f"{submitted[-1]}/0", draw.randint(1, 3))
        harness.clock.advance(draw.choice((0.0, BETWEEN)))
        if harness.engine.has_work:
            harness.step()
        if submitted and draw.random() < 0.02:
            harness.collect(harness.engine.abort(draw.choice(submitted)))
    while harness.engine.has_work:
        harness.step()
    told = {one: parts_of(harness, one) for one in submitted}
    harness.engine.close()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for one in draw.sample(submitted, 4):
        parts = told[one]
        lives = lives_of(one, lines)
        assert lives.parts.behind == parts.behind
        for name in PARTS:
            assert getattr(lives.parts, name) == pytest.approx(getattr(parts, name), abs=RECORDED * len(lines)), name
        for life in lives.all:
            assert life.ended is not None
            assert life.tiles[0].began == pytest.approx(life.arrived)
            assert life.tiles[-1].ended == pytest.approx(life.ended, abs=RECORDED)
            for tile, following in pairwise(life.tiles):
                assert tile.ended == pytest.approx(following.began, abs=1e-7)
    for name in ("queue", "prompt", "decode", "engine"):
        assert any(getattr(parts, name) for parts in told.values())
