"""Two installations in turns: both see the same prompts, and none sees one twice."""

from __future__ import annotations

from typing import Any

import turns


class Noting:
    """A worker that notes what it is asked for; each run takes a second longer than the last run of any worker."""

    seconds = 0.0

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def run(self, load: dict[str, Any]) -> dict[str, float]:
        self.seeds.append(load["seed"])
        Noting.seconds += 1
        return {"prefill_s": Noting.seconds, "decode_s": Noting.seconds, "decoded": 1, "peak_mib": 1.0}


def test_both_have_the_same_prompts_which_are_new_each_time_and_a_steady_drift_cancels_out():
    workers = {side: Noting() for side in turns.SIDES}
    row = turns.rates(workers, turns.Load(streams=2, prompt_tokens=3, new_tokens=4), rounds=3)
    assert workers["old"].seeds == workers["new"].seeds == sorted(set(workers["old"].seeds))
    assert len(workers["old"].seeds) == 8
    for phase in ("prefill", "decode"):
        assert row["new_over_old"][phase] == {"median": 1.0, "lowest": 1.0, "highest": 1.0}
