"""What enters and leaves the prefix cache is reported once, in order. `Harness.check` holds random episodes to it."""

from __future__ import annotations

from core_harness import Harness, config, request

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared
from penstock.core import CacheLog
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.scheduler import Scheduler
from penstock.sim import FakeRunner

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def keys(tokens, salt=""):
    chain = KeyChain(root_key(b"", salt), 4)
    chain.follow(tokens)
    return tuple(chain.keys)


class Heard(Harness):
    """A harness that remembers what was reported."""

    def __init__(self, cfg=None) -> None:
        super().__init__(cfg or config())
        self.told = []
        hear = self.mirror.hear

        def remember(events):
            self.told += events
            hear(events)

        self.mirror.hear = remember

    def run(self, *requests):
        """What was reported while these were answered."""
        before = len(self.told)
        for each in requests:
            self.submit(each)
        while self.scheduler.has_work:
            self.step()
        return self.told[before:]


def test_a_prompt_enters_with_its_tokens():
    told = Heard().run(request("a", PROMPT, max_tokens=1))
    assert told == [BlocksStored(keys(PROMPT), None, PROMPT[:8], "")]


def test_what_was_there_is_not_told_again_and_what_follows_names_it():
    harness = Heard()
    harness.run(request("a", PROMPT, max_tokens=1))
    longer = (*PROMPT[:8], 10, 9, 8, 7, 1)
    told = harness.run(request("b", longer, max_tokens=1))
    assert told == [BlocksStored(keys(longer)[2:], keys(longer)[1], longer[8:12], "")]


def test_blocks_of_one_chunk_are_told_together():
    harness = Heard(config(max_num_batched_tokens=64))
    prompt = tuple(range(10)) * 4
    (told,) = harness.run(request("a", prompt, max_tokens=1))
    assert told == BlocksStored(keys(prompt), None, prompt, "")


def test_generated_tokens_enter_too():
    harness = Heard()
    told = harness.run(request("a", PROMPT, max_tokens=12))
    tokens = (*PROMPT, *harness.tokens["a"])
    assert tuple(key for event in told for key in event.keys) == keys(tokens[:20])
    assert [event.parent for event in told] == [None, *keys(tokens)[1 : len(told)]]


def test_a_salt_is_told_and_makes_other_keys():
    harness = Heard()
    harness.run(request("a", PROMPT, max_tokens=1))
    told = harness.run(request("b", PROMPT, max_tokens=1, cache_salt="s"))
    assert told == [BlocksStored(keys(PROMPT, "s"), None, PROMPT[:8], "s")]


def test_an_adapter_is_told_and_makes_other_keys():
    harness = Heard()
    harness.runner.adapters = {"poet": ""}
    harness.run(request("a", PROMPT, max_tokens=1))
    (told,) = harness.run(request("b", PROMPT, max_tokens=1, adapter="poet", adapter_digest="d"))
    assert (told.adapter, told.parent, told.tokens) == ("poet", None, PROMPT[:8])
    assert not {*told.keys} & {*keys(PROMPT)}


def test_what_two_compute_at_once_is_told_once():
    cfg = config()
    scheduler, runner = Scheduler(cfg, CacheLog()), FakeRunner(cfg, 11)
    scheduler.submit(request("a", PROMPT, max_tokens=1))
    scheduler.submit(request("b", PROMPT, max_tokens=1))
    events = []
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))
        events += scheduler.take_cache_events()
    assert events == [BlocksStored(keys(PROMPT), None, PROMPT[:8], "")]


def test_what_makes_room_leaves_tail_first():
    harness = Heard(config(4))
    harness.run(request("a", PROMPT, max_tokens=1))
    other = (9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5)
    told = harness.run(request("b", other, max_tokens=1))
    assert [key for event in told if isinstance(event, BlocksRemoved) for key in event.keys] == [
        *reversed(keys(PROMPT))
    ]
    assert harness.mirror.keys == set(keys(other))


def test_a_reset_is_told_and_what_ran_meanwhile_is_not():
    harness = Heard()
    harness.submit(request("a", PROMPT, max_tokens=12))
    harness.step()
    harness.reset()
    assert harness.told[-1] == CacheCleared()
    while harness.scheduler.has_work:
        harness.step()
    assert harness.told[-1] == CacheCleared(), "what it computes goes on from KV that was forgotten"


def test_removals_in_a_row_are_one_event_and_stay_in_order():
    log = CacheLog()
    log.removed(b"a")
    log.removed(b"b")
    log.cleared()
    log.removed(b"c")
    assert log.take() == (BlocksRemoved((b"a", b"b")), CacheCleared(), BlocksRemoved((b"c",)))
    assert log.take() == ()


def test_a_gap_makes_two_events():
    chain = KeyChain(root_key(b"", ""), 2)
    tokens = list(range(8))
    chain.follow(tokens)
    log = CacheLog()
    log.stored(chain, [0, 2, 3], tokens, "")
    assert log.take() == (
        BlocksStored((chain.keys[0],), None, (0, 1), ""),
        BlocksStored(tuple(chain.keys[2:]), chain.keys[1], (4, 5, 6, 7), ""),
    )


def test_nothing_is_noted_for_nobody():
    cfg = config()
    scheduler, runner = Scheduler(cfg), FakeRunner(cfg, 11)
    scheduler.submit(request("a", PROMPT, max_tokens=1))
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))
    assert scheduler.take_cache_events() == ()


def test_without_a_prefix_cache_there_is_nothing_to_tell():
    harness = Heard(config(prefix_caching=False))
    assert harness.run(request("a", PROMPT, max_tokens=4)) == []
