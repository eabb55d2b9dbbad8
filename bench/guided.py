"""Measures what a form costs: how much longer constrained answers take than free answers of the same length.

    python bench/guided.py [MODEL] [--streams 16] [--rounds 6] [--json FILE]

All streams ask for a form at once, in turns with free answers of the same length; first and last tokens count too. The
first answer, which compiles the form, does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock import LLM, SamplingParams
from penstock.bench.machine import load_average, provenance
from penstock.contract.config import DEFAULT_MODEL

TEXT = {"type": "string", "minLength": 600}
RECORD = {
    "street": {"type": "string", "minLength": 5, "maxLength": 60},
    "city": {"type": "string", "minLength": 3, "maxLength": 40},
    "email": {"type": "string", "format": "email"},
    "kind": {"enum": ["home", "work", "other"]},
    "tags": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 4, "maxItems": 12},
}
SENTENCES = [
    "The quick brown fox jumps over the lazy dog while the sun sets slowly behind the hills, and nobody looks at it.",
    "All that glitters is not gold, and all who wander through these valleys are not lost, as an old song has it.",
    "It was the best of times and the worst of times, as somebody wrote long ago in a book that everybody knows.",
    "In the beginning there was a plan, and behind the plan there was another plan, which nobody had read to its end.",
]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": properties, "required": list(properties)}}


FORMS: dict[str, dict[str, Any]] = {
    "a string of at least 600 characters in JSON": _object({"text": TEXT}),
    "a record with an address, an email, an enum and tags": _object(RECORD),
    "a choice of four long sentences": {"choice": SENTENCES},
    "`([A-Z][a-z]+( [a-z]+)*\\. ?){3,30}`": {"regex": r"([A-Z][a-z]+( [a-z]+)*\. ?){3,30}"},
    "`([A-Z][a-z ]{3,40}\\. ){3,20}`": {"regex": r"([A-Z][a-z ]{3,40}\. ){3,20}"},
}
MOST_TOKENS = 96


def answers(llm: LLM, streams: int, **options: Any) -> tuple[float, int]:
    """Seconds until each stream has its answer, and the tokens of all answers together."""
    params = SamplingParams(temperature=0.8, seed=1, **options)
    began = time.perf_counter()
    outputs = llm.generate([f"Write {number} items:" for number in range(streams)], params, use_tqdm=False)
    return time.perf_counter() - began, sum(len(each.outputs[0].token_ids) for each in outputs)


def more_time(llm: LLM, streams: int, form: dict[str, Any]) -> float:
    """How much longer a token takes in the form, as a share of the time of a token of a free answer."""
    seconds, tokens = answers(llm, streams, structured_outputs=form, max_tokens=MOST_TOKENS)
    free_seconds, free_tokens = answers(llm, streams, max_tokens=max(1, tokens // streams), ignore_eos=True)
    return (seconds / tokens) / (free_seconds / free_tokens) - 1


def main() -> None:
    """Measure, print medians and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--streams", type=int, default=16, help="answers at once (default: 16)")
    parser.add_argument("--rounds", type=int, default=6, help="of each form (default: 6)")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    head = {"kind": "guided", **provenance(), "model": options.model, "streams": options.streams}
    llm = LLM(options.model, max_num_seqs=options.streams)
    found: dict[str, list[float]] = {}
    for name, form in tqdm(FORMS.items(), desc="Forms", disable=None):
        more_time(llm, options.streams, form)
        found[name] = sorted(more_time(llm, options.streams, form) for _ in range(options.rounds))
    for name, shares in found.items():
        print(f"{name}: {statistics.median(shares):.0%} more ({shares[0]:.0%} to {shares[-1]:.0%})")
    if options.json is not None:
        record = head | {"max_tokens": MOST_TOKENS, "more": found, "load_average_after": load_average()}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
