"""Processes that keep blocks are killed while they write: whatever the next one finds, its answers are the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import killed_writer
import pytest
from tiny_checkpoints import VARIANTS, write_lettered

from needs import COMPILED
from penstock import LLM
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

KILLS = 200


@pytest.mark.deep
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_200_kills_while_writing_change_no_answer(family, tmp_path):
    """With a model that carries state, and one that does not."""
    model = write_lettered(tmp_path / "model", family, next(iter(VARIANTS[family])))
    with LLM(str(model), **killed_writer.OPTIONS) as llm:
        right = [killed_writer.answer(llm, number)[0] for number in range(killed_writer.PROMPTS)]
    rng, answers, cached, wrong = random.Random(KILLS), 0, 0, []
    with subprocess.Popen(
        [sys.executable, str(Path(killed_writer.__file__)), str(model), str(tmp_path / "kept")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        for seed in range(KILLS):
            writer.stdin.write(b"%d\n" % seed)
            writer.stdin.flush()
            (begun, pid) = json.loads(writer.stdout.readline())
            assert begun == "begun", "no process ends by itself"
            to_come = rng.randrange(12)  # answers before it is killed: a slow machine gets as far as a quick one
            while True:
                if to_come == 0:
                    time.sleep(rng.uniform(0.0, 0.1))
                    os.kill(pid, signal.SIGKILL)
                number, said, *of_cache = json.loads(writer.stdout.readline())
                if number == "dead":
                    assert said == signal.SIGKILL
                    break
                to_come -= 1
                answers += 1
                cached += of_cache[0] > 0
                wrong += [(seed, number)] if said != right[number] else []
        writer.stdin.close()
    assert wrong == []
    assert answers > KILLS / 2
    assert cached > answers / 4, "most were read, from what processes left that were killed"
