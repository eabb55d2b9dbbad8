"""The engine passes on what enters and leaves its prefix cache: after each step, and at once when all is forgotten."""

from __future__ import annotations

import pytest
from engine_harness import build

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, EventCounts


class Sink:
    """Counts every second batch as dropped, like a publisher that is behind."""

    def __init__(self) -> None:
        self.batches = []

    @property
    def counts(self) -> EventCounts:
        return EventCounts(-(-len(self.batches) // 2), len(self.batches) // 2)

    def publish(self, events) -> None:
        assert events
        self.batches.append(tuple(events))


@pytest.fixture
def sink():
    return Sink()


def keys_in(harness, sink):
    """The keys that are cached by what the batches say, which must be the keys that are."""
    known = set()
    for batch in sink.batches:
        for event in batch:
            match event:
                case BlocksStored(keys):
                    known.update(keys)
                case BlocksRemoved(keys):
                    known.difference_update(keys)
                case CacheCleared():
                    known.clear()
    assert known == harness.engine.scheduler._pool._index.keys()
    return known


def test_each_step_that_changes_the_cache_is_one_batch(sink):
    harness = build(cache_events=sink)
    harness.submit("abcdefgh", max_tokens=1)
    harness.run()
    ((event,),) = sink.batches
    assert event.tokens == harness.text.tokenizer.encode("abcdefgh")
    harness.submit("abcdefgh", max_tokens=1)
    harness.run()
    assert len(keys_in(harness, sink)) == 2


def test_a_reset_is_passed_on_at_once(sink):
    harness = build(cache_events=sink)
    harness.submit("abcdefgh", max_tokens=1)
    harness.run()
    harness.engine.reset_prefix_cache()
    assert sink.batches[-1] == (CacheCleared(),)
    assert keys_in(harness, sink) == set()


def test_what_made_room_is_passed_on_even_if_the_step_fails(sink):
    harness = build(cache_events=sink, num_blocks=4)
    harness.submit("abcdefgh", max_tokens=1)
    harness.run()
    harness.runner.crash_at(1)
    harness.submit("ponmlkjihgfed", max_tokens=1)
    harness.step()
    assert isinstance(sink.batches[-1][-1], BlocksRemoved)
    keys_in(harness, sink)
    harness.run()
    assert len(keys_in(harness, sink)) == 3


def test_a_lost_runner_has_forgotten_everything(sink):
    harness = build(cache_events=sink)
    harness.submit("abcdefgh", max_tokens=1)
    harness.run()
    harness.submit("ijklmnop", max_tokens=1)
    harness.runner.crash_at(1)
    harness.runner.lose()
    harness.step()
    assert sink.batches[-1] == (CacheCleared(),)
    harness.run()
    assert len(keys_in(harness, sink)) == 2


def test_batches_are_counted(sink):
    harness = build(cache_events=sink)
    assert (harness.engine.measurements().events_published, harness.engine.measurements().events_dropped) == (0, 0)
    for prompt in ("abcdefgh", "ijklmnop", "qrstuvwx"):
        harness.submit(prompt, max_tokens=1)
        harness.run()
    measured = harness.engine.measurements()
    assert (measured.events_published, measured.events_dropped) == (2, 1)
