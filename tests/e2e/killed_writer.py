"""Processes that answer prompts and keep blocks until they are killed: `killed_writer.py MODEL FOLDER`.

Each line on standard input forks one from this process, which has imported everything; the number on it seeds the order
of the prompts. It prints its process id and then each answer, as JSON lines; this process prints when it is dead.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import penstock.building  # noqa: F401 - which brings torch in, before the first fork
from penstock import LLM, SamplingParams

PROMPTS = 24
REST = 0.1
"""Seconds after an answer in which blocks are written: beside a load that never rests most are dropped."""
OPTIONS = {"kv_cache_memory": "2MiB", "max_num_seqs": 4}
SAMPLING = SamplingParams(max_tokens=12, temperature=0.9, seed=4, logprobs=1, ignore_eos=True)


def prompt(number: int) -> list[int]:
    """A prompt that shares a prefix with others."""
    stem, tail = random.Random(number % 5), random.Random(100 + number)
    return [stem.randrange(3, 90) for _ in range(64)] + [tail.randrange(3, 90) for _ in range(40 + number)]


def answer(llm: LLM, number: int) -> tuple[list, int]:
    """Tokens and their log probabilities, and how many tokens of the prompt were cached."""
    (output,) = llm.generate([{"prompt_token_ids": prompt(number)}], SAMPLING, use_tqdm=False)
    (choice,) = output.outputs
    return [list(choice.token_ids), choice.cumulative_logprob], output.num_cached_tokens


def say(*what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())  # whole or not at all


def live(model: str, folder: str, seed: int) -> None:
    rng = random.Random(seed)
    with LLM(model, kv_store=folder, **OPTIONS) as llm:
        say("begun", os.getpid())
        while True:
            number = rng.randrange(PROMPTS)
            said, cached = answer(llm, number)
            say(number, said, cached)
            time.sleep(REST)


def main() -> None:
    model, folder = sys.argv[1:]
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                live(model, folder, int(line))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("dead", status)


if __name__ == "__main__":
    main()
