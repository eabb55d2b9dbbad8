"""A runner's process with the paged-memory fake runner in it: `fake_program.py MODEL DESCRIPTOR`.

MODEL says what goes wrong: `refuses`, `dies` while it is loaded, `hangs` in step 3, `raises` in step 3, or nothing;
`exits` in step 3; with `poisoned` a prompt that begins with token 31 crashes its step; with `stands still` the second
process hangs while it loads, after it has created the file at the cache directory's path, so that the third does not.
One that `keeps` something takes a while to close, and creates that file then; one that `keeps on` never closes.
The environment says what goes wrong with imports: FAKE_IMPORTS is `end`, `stand still`, or a file: the first process
creates the file, and all others hang.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from penstock.contract.errors import ConfigError
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.model import HuggingFaceText, ModelFacts
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.remote import Connection, serve_orders
from penstock.remote.messages import Order
from penstock.sim import FakeRunner

VOCABULARY = 32
POISON = 31


class Troubled:
    """A fake runner, and what goes wrong."""

    def __init__(self, runner, trouble, kept):
        self._runner = runner
        self._kept = kept
        self._trouble = trouble

    def run(self, plan):
        if self._trouble == "poisoned" and any(admit.tokens[0] == POISON for admit in plan.admits):
            os.abort()
        if plan.step == 3 and self._trouble == "hangs":
            time.sleep(1000)
        if plan.step == 3 and self._trouble == "exits":
            os._exit(7)
        if plan.step == 3 and self._trouble == "raises":
            self._trouble = ""
            raise MemoryError("planted")
        self._runner._step = plan.step  # this process may begin in the middle
        self._runner.start(plan)
        return self._runner.finish()

    def reset(self):
        return self._runner.reset()

    def close(self):
        time.sleep(1000 if self._trouble == "keeps on" else 0.3)
        open(self._kept, "w").close()


class NoProfiler:
    def start(self):
        raise RuntimeError("there is none")


def scheduler_config(config):
    return SchedulerConfig(
        num_blocks=64,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=512,
    )


def build(order, announce, found):
    trouble = order.config.model
    if trouble == "refuses":
        raise ConfigError("kv_cache_memory", "is not enough")
    if trouble == "stands still" and order.like and not os.path.exists(order.cache_dir):
        open(order.cache_dir, "w").close()
        time.sleep(1000)
    announce(f"sizes as {'before' if order.like else 'they come'}, imported by {imported_by}")
    if trouble == "dies" or (trouble == "dies later" and order.like):
        os.abort()
    found(ModelFacts("fake", HuggingFaceText("nowhere"), sampling_defaults=(("top_k", 5),), sampling_origin="a file"))
    config = scheduler_config(order.config)
    memory = order.like or MemoryReport(0, 0, config.num_blocks, config.block_size, config.max_model_len, "float32")
    lasting = trouble == "poisoned"
    runner = Troubled(FakeRunner(config, VOCABULARY), "" if order.like and not lasting else trouble, order.cache_dir)
    kept = "somewhere" if trouble.startswith("keeps") else ""
    return runner, RunnerFacts(order.config, memory, VOCABULARY, 8, None, False, b"", kept)


imported_by = 0


def prepare():
    global imported_by
    imported_by = os.getpid()
    trouble = os.environ.get("FAKE_IMPORTS", "")
    if trouble == "end":
        os._exit(7)
    if trouble == "stand still" or os.path.exists(trouble):
        time.sleep(1000)
    if trouble:
        open(trouble, "w").close()
    return build, NoProfiler()


if __name__ == "__main__":
    serve_orders(Connection(socket.socket(fileno=int(sys.argv[1])), Order), prepare)
