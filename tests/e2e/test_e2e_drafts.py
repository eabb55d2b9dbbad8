"""Drafts with the default model on the default kernels: not one bit of an answer changes, and steps are saved."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.contract.config import EngineConfig
from penstock.contract.events import Finished, Generated, SeqEvent
from penstock.contract.plan import Draft
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.loading import LoadedModel, find_model, load_model
from penstock.sampling import SamplingParams

pytestmark = pytest.mark.model

NEW = 41
CONFIG = SchedulerConfig(
    96, block_size=16, max_num_seqs=6, max_num_batched_tokens=128, max_model_len=256, weigh_drafts=False
)
KINDS = [
    {"temperature": 0, "logprobs": 3},
    {"seed": 5, "logprobs": 2},
    {"seed": 6, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "logprobs": 0},
    {"seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 1},
    {"seed": 8, "min_p": 0.05, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
]

Events = dict[str, list[SeqEvent]]


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> LoadedModel:
    config = EngineConfig(model=str(default_model), threads=2)
    return load_model(config, find_model(config), lambda line: None)


def requests(vocab_size: int) -> list[SequenceRequest]:
    words = random.Random(3)
    made = []
    for number, fields in enumerate(KINDS):
        prompt = tuple(words.randrange(vocab_size) for _ in range(7 + 6 * number))
        spec = SamplingParams(**fields).spec()
        made.append(SequenceRequest(f"r{number}", prompt, number % 2, spec, StopRules(max_tokens=NEW)))
    return made


def drafts_for(scheduler: Scheduler, coming: dict[str, Sequence[int]], right: float, count: int) -> Iterator[Draft]:
    """`count` of the tokens that come next in each sequence, each of them right with probability `right`."""
    for one in scheduler.draftable():
        whole = coming[one.seq_id]
        tokens = whole[len(one.tokens) : len(one.tokens) + min(count, one.most)]
        luck = random.Random(len(one.tokens))
        yield Draft(one.seq_id, tuple(t if luck.random() < right else t + 1 for t in tokens))


def serve(loaded: LoadedModel, asked: list[SequenceRequest], drafting=None) -> tuple[Events, int]:
    """Run all to their end; returns events by id, and the number of steps."""
    kv = loaded.kv_store(CONFIG.num_blocks, CONFIG.block_size)
    kv.fill_with_nan()
    runner = loaded.runner(kv, CONFIG.max_num_seqs, CONFIG.max_model_len)
    scheduler, steps = Scheduler(CONFIG), 0
    events: Events = {request.id: [] for request in asked}
    for request in asked:
        scheduler.submit(request)
    while scheduler.has_work:
        drafts = () if drafting is None else tuple(drafts_for(scheduler, *drafting))
        plan = scheduler.plan(drafts)
        for event in scheduler.commit(plan, runner.run(plan)):
            events[event.seq_id].append(event)
        steps += 1
    return events, steps


def bits(events: Events) -> dict[str, list[tuple[object, ...]]]:
    """Every event, with its numbers as bits."""
    return {name: [_bits(each) for each in of if isinstance(each, Generated | Finished)] for name, of in events.items()}


def _bits(event: Generated | Finished) -> tuple[object, ...]:
    if isinstance(event, Finished):
        return (event,)
    top = [(token, struct.pack("<d", logprob)) for token, logprob in event.top]
    return event.token, struct.pack("<d", event.logprob), event.rank, top


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> tuple[Events, int]:
    return serve(loaded, requests(loaded.shape.vocab_size))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("right", "count"), [(0.0, 3), (0.5, 3), (1.0, 1), (1.0, 3), (1.0, 7)])
def test_no_bit_differs_and_steps_are_as_many_as_drafts_promise(loaded, plain, right, count):
    asked = requests(loaded.shape.vocab_size)
    coming = {r.id: (*r.prompt, *(e.token for e in plain[0][r.id] if isinstance(e, Generated))) for r in asked}
    events, steps = serve(loaded, asked, (coming, right, count))
    assert bits(events) == bits(plain[0])
    if right == 0.0:
        assert steps == plain[1]
    elif right == 1.0:
        first = plain[1] - (NEW - 1)  # steps until every sequence has its first token
        assert steps <= first + -(-(NEW - 1) // (count + 1))
    else:
        assert plain[1] / 3 < steps < plain[1]
