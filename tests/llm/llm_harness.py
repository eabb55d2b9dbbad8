"""What the tests that step an engine by hand share."""

from __future__ import annotations

from penstock import SamplingParams

OPTIONS = {"dtype": "float32", "threads": 1, "kv_cache_memory": 1_000_000}
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
