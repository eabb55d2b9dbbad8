"""The router's choice: the replica with the prefix, unless others are freer; replicas that come or go move little."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.block_keys import KeyChain, root_key
from penstock.routing import ReplicaLoad, Router

RATE = 1000.0
BLOCK = 16


def keys_of(tokens: list[int], salt: str = "") -> list[bytes]:
    """The keys that an engine would give to the blocks of a prompt."""
    chain = KeyChain(root_key(b"model", salt), BLOCK)
    chain.follow(tokens)
    return chain.keys


def load(backlog: float = 0.0, running: int = 0, waiting: int = 0, **other: float) -> ReplicaLoad:
    known = {"slots": 16, "free_blocks": 1000, "total_blocks": 1000, "tokens_per_second": RATE}
    return ReplicaLoad(backlog_seconds=backlog, running=running, waiting=waiting, **(known | other))


def fleet(count: int, seed: int = 0) -> Router:
    """A router of so many replicas, all idle."""
    router = Router(seed=seed)
    router.set_replicas([f"r{each}" for each in range(count)])
    return all_report(router, 0.0)


def all_report(router: Router, now: float, said: ReplicaLoad | None = None) -> Router:
    """Every replica reports the same load: idle, unless `said` gives another."""
    for name in router.rank([], 1, now):
        router.report(name, said or load(), now)
    return router


def prompts(count: int, blocks: int, seed: int = 0) -> list[list[bytes]]:
    """Prompts that have nothing in common."""
    rng = random.Random(seed)
    return [keys_of([rng.randrange(50_000) for _ in range(blocks * BLOCK)]) for _ in range(count)]


def serve(router: Router, keys: list[bytes], now: float) -> str:
    """Send a prompt to the best replica, which answers it before anything else happens."""
    tokens = len(keys) * BLOCK + 1
    name = router.rank(keys, tokens, now)[0]
    router.sent(name, keys, tokens, now)
    router.ended(name, tokens, now)
    return name


@pytest.mark.parametrize("count", [1, 2, 3, 16, 300])
def test_a_conversation_stays_where_it_began(count: int):
    router = fleet(count)
    rng = random.Random(1)
    tokens = {each: [each] * BLOCK for each in range(12)}
    where: dict[int, str] = {}
    for turn in range(8):
        for each, said in tokens.items():
            said += [rng.randrange(50_000) for _ in range(rng.randrange(100, 700))]
            name = serve(router, keys_of(said), now := turn * 60.0 + each)
            assert where.setdefault(each, name) == name, f"turn {turn}"
            all_report(router, now)


def test_whoever_holds_the_longest_beginning_is_first():
    router = fleet(8)
    shared, one, other, new = prompts(4, 64)
    router.sent("r1", shared, 1024, 0.0)
    router.sent("r2", shared[:32] + one, 1536, 0.0)
    router.sent("r3", shared[:32] + other, 1536, 0.0)
    assert router.rank(shared[:32] + other, 1536, 100.0)[0] == "r3"
    assert router.rank(shared[:32] + one + new, 2560, 100.0)[0] == "r2"
    assert router.rank(shared + new, 2048, 100.0)[0] == "r1"


def test_tenants_with_the_same_text_do_not_meet():
    router = fleet(50)
    tokens = list(range(1024))
    router.sent("r7", keys_of(tokens, "one"), 1024, 0.0)
    assert router.rank(keys_of(tokens, "one"), 1024, 50.0)[0] == "r7"
    firsts = {router.rank(keys_of(tokens, f"another {each}"), 1024, 50.0)[0] for each in range(20)}
    assert len(firsts) > 5


@pytest.mark.parametrize("count", [2, 16, 300])
def test_a_hot_replica_is_left(count: int):
    router = fleet(count)
    [keys] = prompts(1, 64)
    router.sent("r0", keys, 1024, 0.0)
    router.ended("r0", 1024, 1.0)
    all_report(router, 10.0)
    router.report("r0", load(0.5), 10.0)
    assert router.rank(keys, 1024, 10.0)[0] == "r0", "half a second of waiting is less than reading again"
    router.report("r0", load(30.0, 16, 40), 11.0)
    assert router.rank(keys, 1024, 11.0)[0] != "r0"
    assert router.rank(keys, 1024, 11.0)[-1] == "r0", "it is the last that should be tried"
    router.report("r0", load(), 12.0)
    assert router.rank(keys, 1024, 12.0)[0] == "r0", "and the first again when it is free"


@pytest.mark.parametrize("count", [2, 16, 300])
def test_nobody_goes_elsewhere_to_read_for_longer_than_the_wait(count: int):
    router = fleet(count)
    [keys] = prompts(1, 64)
    router.sent("r0", keys, 1024, 0.0)
    router.ended("r0", 1024, 1.0)
    all_report(router, 10.0)
    router.report("r0", load(0.9), 10.0)
    assert router.rank(keys, 1024, 10.0)[0] == "r0", "to read it takes 1.024 s, and others would have to wait for that"


@pytest.mark.parametrize(("running", "best"), [(2, "r0"), (14, "r1")])
def test_a_holder_that_writes_many_answers_is_left_by_who_has_much_to_read(running: int, best: str):
    router = fleet(2)
    beginning, own = prompts(2, 64)
    router.sent("r0", beginning, 1024, 0.0)
    router.ended("r0", 1024, 1.0)
    all_report(router, 10.0)
    router.report("r0", load(0.0, running), 10.0)
    keys = beginning + own[:32]
    assert router.rank(keys, 1536, 10.0)[0] == best, "half a second of reading holds up every answer beside it"
    assert router.rank(beginning, 1024, 10.0)[0] == "r0", "what it holds it need not read"


def test_one_idle_replica_among_many_busy_ones_takes_no_conversation_away():
    router = fleet(400)
    [keys] = prompts(1, 64)
    router.sent("r0", keys, 1024, 0.0)
    all_report(router, 10.0, load(3.0, 8))
    router.report("r399", load(), 10.0)
    assert router.rank(keys, 1024, 10.0)[0] == "r0"


def test_what_was_sent_counts_before_it_is_reported():
    router = fleet(4)
    where = Counter()
    for keys in prompts(40, 128):
        name = router.rank(keys, 2048, 0.0)[0]
        router.sent(name, keys, 2048, 0.0)
        where[name] += 1
    assert max(where.values()) <= 11, "without one report, forty prompts at once are spread evenly"


def test_a_hot_beginning_spreads_over_the_fleet():
    router = fleet(6)
    [shared] = prompts(1, 100)
    where = Counter()
    for number, own in enumerate(prompts(600, 10)):
        now = number * 0.01  # each takes at least 0.16 s, and the whole fleet can read 37 of them a second
        name = router.rank(shared + own, 1760, now)[0]
        router.sent(name, shared + own, 1760, now)
        where[name] += 1
    assert len(where) == 6
    assert min(where.values()) >= 60, "nobody starves beside six times as many requests as one could serve"


def test_full_slots_and_full_memory_are_seen():
    router = fleet(2)
    [keys] = prompts(1, 64)
    router.report("r0", load(0.0, 16, 3), 0.0)
    assert router.rank([], 10, 0.0) == ("r1", "r0")
    router.report("r0", load(0.0, 8, free_blocks=8), 1.0)
    router.report("r1", load(0.0, 8, free_blocks=900), 1.0)
    assert router.rank(keys, 1024, 1.0)[0] == "r1"


def test_quicker_replicas_get_more():
    router = fleet(2)
    where = Counter()
    for number, keys in enumerate(prompts(400, 16)):
        if number % 10 == 0:
            router.report("r0", load(tokens_per_second=4000.0), number / 4)
            router.report("r1", load(tokens_per_second=1000.0), number / 4)
        name = router.rank(keys, 256, number / 4)[0]
        router.sent(name, keys, 256, number / 4)
        router.ended(name, 256, number / 4 + 0.2)
        where[name] += 1
    assert where["r0"] > 2 * where["r1"]


def test_a_replica_that_fell_silent_comes_last_until_it_reports():
    router = fleet(3)
    [keys] = prompts(1, 64)
    router.sent("r0", keys, 1024, 0.0)
    for now in range(1, 21):
        for name in ("r1", "r2"):
            router.report(name, load(5.0, 10), float(now))
    assert router.rank(keys, 1024, 20.0)[-1] == "r0"
    router.report("r0", load(), 21.0)
    assert router.rank(keys, 1024, 21.0)[0] == "r0"
    assert set(router.rank(keys, 1024, 500.0)) == {"r0", "r1", "r2"}, "all silent: none is worse than others"


def test_a_lost_replica_holds_nothing_when_it_comes_back():
    router = fleet(30)
    [keys] = prompts(1, 64)
    fresh = router.rank(keys, 1024, 0.0)[0]
    other = next(each for each in ("r0", "r1") if each != fresh)
    router.sent(other, keys, 1024, 0.0)
    router.ended(other, 1024, 0.1)
    assert router.rank(keys, 1024, 50.0)[0] == other
    router.lost(other)
    assert other not in router.rank(keys, 1024, 50.0)
    router.set_replicas([f"r{each}" for each in range(30)])
    all_report(router, 50.0)
    assert router.rank(keys, 1024, 50.0)[0] == fresh


def test_only_who_is_asked_for_is_ranked():
    router = fleet(40)
    [keys] = prompts(1, 64)
    router.sent("r5", keys, 1024, 0.0)
    assert router.rank(keys, 1024, 9.0, ["r9", "r5", "r9", "nobody"]) == ("r5", "r9", "nobody")
    assert router.rank(keys, 1024, 9.0, ["nobody"]) == ("nobody",)
    assert router.rank(keys, 1024, 9.0, []) == ()
    assert Router().rank(keys, 1024, 9.0) == ()


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_replica_that_leaves_moves_only_what_it_had(count: int, seed: int):
    router, without = fleet(count), fleet(count, seed=1)
    gone = f"r{seed % count}"
    without.set_replicas([f"r{each}" for each in range(count) if f"r{each}" != gone])
    for keys in prompts(30, 2, seed):
        before, after = router.rank(keys, 33, 4.0)[0], without.rank(keys, 33, 4.0)[0]
        assert after == before or before == gone


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_replica_that_joins_takes_a_fair_share_and_moves_nothing_else(count: int, seed: int):
    router, grown = fleet(count), fleet(count, seed=1)
    grown.set_replicas([*(f"r{each}" for each in range(count)), "new"])
    all_report(grown, 0.0)
    moved = 0
    for keys in prompts(60, 1, seed):
        before, after = router.rank(keys, 17, 4.0)[0], grown.rank(keys, 17, 4.0)[0]
        assert after in (before, "new")
        moved += after == "new"
    assert moved <= 60 * (1.6 / (count + 1)) + 10


def test_conversations_stay_when_a_replica_joins():
    router = fleet(4)
    known = prompts(50, 32)
    where = [serve(router, keys, number * 2.0) for number, keys in enumerate(known)]
    router.set_replicas(["r0", "r1", "r2", "r3", "new"])
    all_report(router, 200.0)
    assert [router.rank(keys, 513, 200.0)[0] for keys in known] == where


def test_equal_calls_give_equal_answers():
    def answers() -> list[tuple[str, ...]]:
        router = fleet(20, seed=5)
        found = []
        for number, keys in enumerate(prompts(50, 8)):
            found.append(router.rank(keys, 130, number / 10))
            router.sent(found[-1][0], keys, 130, number / 10)
        return found

    assert answers() == answers()


def test_replicas_that_have_not_read_are_expected_to_be_as_fast_as_those_that_have():
    """Two have read, slowly: a replica that holds nothing is expected to take as long to read everything again."""
    router = Router(silence=math.inf)
    router.set_replicas([f"r{each}" for each in range(16)])
    slow, unknown = load(tokens_per_second=50.0), load(tokens_per_second=0.0)
    for number in range(16):
        router.report(f"r{number}", slow if number in {3, 7} else unknown, 0.0)
    (keys,) = prompts(1, 32)
    router.sent("r3", keys, 513, 1.0)  # ten seconds of reading, which r3 has done by the next turn
    for number in range(16):
        router.report(f"r{number}", slow if number == 3 else unknown, 14.0)
    router.report("r3", load(backlog=4.0, tokens_per_second=50.0), 14.0)
    longer = [*keys, *prompts(1, 2, seed=5)[0]]
    assert router.rank(longer, 545, 14.0)[0] == "r3", "four seconds of waiting, and ten of reading elsewhere"
