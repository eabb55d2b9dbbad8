"""The router's parts: the index of holders against a plain one, the ring, and the mean stay against what it counts."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.routing.holders import Holders
from penstock.routing.load import Replica
from penstock.routing.ring import Ring
from penstock.routing.stay import Stay


def replicas(count: int) -> list[Replica]:
    return [Replica(f"r{each}", 1000.0) for each in range(count)]


@given(st.integers(0, 2**32))
def test_beginnings_are_found_to_within_a_sixteenth(seed: int):
    rng = random.Random(seed)
    fleet = replicas(6)
    holders = Holders(16)
    sent: list[tuple[Replica, list[bytes]]] = []
    for _ in range(20):
        beginning = rng.choice(sent)[1] if sent and rng.random() < 0.7 else []
        keys = beginning[: rng.randint(0, len(beginning))] + [rng.randbytes(8) for _ in range(rng.randint(0, 200))]
        truth = {each: max((common(keys, known) for who, known in sent if who is each), default=0) for each in fleet}
        found = holders.lengths(keys, len(fleet), random.Random(0))
        assert list(found.values()) == sorted(found.values(), reverse=True)
        for each, length in truth.items():
            assert length * 15 / 16 <= holders.held(each, keys) <= length
            assert found.get(each, 0) == holders.held(each, keys)
        who = rng.choice(fleet)
        holders.add(who, keys)
        sent.append((who, keys))


def common(one: list[bytes], other: list[bytes]) -> int:
    same = [first == second for first, second in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def test_a_prompt_of_a_million_tokens_takes_few_looks():
    holders = Holders(4)
    keys = [number.to_bytes(4) for number in range(65_536)]
    [one] = replicas(1)
    holders.add(one, keys)
    assert len(holders) < 250
    assert holders.lengths(keys, 1, random.Random(0)) == {one: 65_536}


def test_what_was_not_used_for_longest_is_forgotten_and_the_end_before_the_beginning():
    holders = Holders(4)
    [one] = replicas(1)
    first, second = [b"a%d" % each for each in range(20)], [b"b%d" % each for each in range(20)]
    holders.add(one, first)
    holders.add(one, second)
    holders.keep(30)
    assert len(holders) == 30
    assert holders.held(one, second) == 20
    assert holders.held(one, first) == 10


def test_the_newest_holders_of_a_key_are_kept():
    holders = Holders(3)
    fleet = replicas(5)
    for each in fleet:
        holders.add(each, [b"key"])
    assert set(holders.lengths([b"key"], 9, random.Random(0))) == set(fleet[2:])
    fleet[4].alive = False
    assert set(holders.lengths([b"key"], 9, random.Random(0))) == set(fleet[2:4])


def test_each_replica_has_about_its_share_of_the_ring():
    fleet = replicas(20)
    ring = Ring(fleet)
    firsts = Counter(ring.after(b"%d" % number, 1)[0].name for number in range(20_000))
    assert len(firsts) == 20
    assert max(firsts.values()) < 1.6 * 1000
    assert min(firsts.values()) > 0.5 * 1000


def test_a_ring_names_each_of_the_able_once():
    fleet = replicas(9)
    ring = Ring(fleet)
    assert set(ring.after(b"key", 99)) == set(fleet)
    assert set(ring.after(b"key", 99, fleet[3:5])) == set(fleet[3:5])
    assert len(ring.after(b"key", 3)) == 3
    assert Ring().after(b"key", 3) == []


def test_the_mean_stay_is_that_of_the_requests():
    rng = random.Random(3)
    stay = Stay(99.0)
    events = []
    for _ in range(20_000):
        began = rng.uniform(0, 4000)
        lasts = rng.uniform(1.0, 5.0)
        events += [(began, True), (began + lasts, False)]
    for when, begins in sorted(events):
        if begins:
            stay.began(when)
        else:
            stay.ended(when)
    assert 2.8 < stay.seconds < 3.2
