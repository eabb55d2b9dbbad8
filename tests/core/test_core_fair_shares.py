"""The policy `fair`: the order of waiting sequences follows what their tenants were given, whatever others send."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from core_harness import Harness, config, request

from penstock.core.fair_shares import GENERATED_WEIGHT, FairQueue

PROMPT, GENERATED = 6, 6


def tenant_of(seq_id: str) -> str:
    return seq_id.partition("-")[0]


def sent(tenant: str, number: int, share: float = 1.0, prompt: int = PROMPT, **options):
    first = random.Random(f"{tenant} {number}")
    tokens = tuple(first.randrange(11) for _ in range(prompt))
    return request(f"{tenant}-{number}", tokens, GENERATED, tenant=tenant, share=share, **options)


def fair(**options) -> Harness:
    return Harness(config(num_blocks=64, policy="fair", prefix_caching=False, **{"max_num_seqs": 2, **options}))


def admitted(harness: Harness, count: int) -> list[str]:
    """The tenants of the first `count` sequences to be admitted, in order."""
    order: list[str] = []
    while len(order) < count:
        plan = harness.plan()
        order += [tenant_of(admit.seq_id) for admit in plan.admits]
        harness.commit()
    return order[:count]


def test_who_floods_is_followed_at_once_by_who_does_not():
    harness = fair()
    for number in range(20):
        harness.submit(sent("flood", number, arrival=0.0))
    harness.step()
    harness.submit(sent("calm", 0, arrival=9.0))
    order = admitted(harness, 2)
    assert order[0] == "calm"
    harness.drain()


def test_first_come_first_served_has_it_wait_for_all_of_them():
    harness = Harness(config(num_blocks=64, policy="fcfs", prefix_caching=False, max_num_seqs=2))
    for number in range(20):
        harness.submit(sent("flood", number, arrival=0.0))
    harness.submit(sent("calm", 0, arrival=9.0))
    assert admitted(harness, 21)[-1] == "calm"


def test_two_that_flood_take_turns():
    harness = fair(max_num_seqs=1)
    for number in range(10):
        harness.submit(sent("one", number, arrival=0.0))
    for number in range(10):
        harness.submit(sent("other", number, arrival=1.0))
    assert Counter(admitted(harness, 10)) == {"one": 5, "other": 5}
    harness.drain()


def test_who_has_twice_the_share_gets_twice_as_much():
    harness = fair(max_num_seqs=1)
    for number in range(20):
        harness.submit(sent("one", number, share=2.0))
        harness.submit(sent("other", number))
    assert Counter(admitted(harness, 15)) == {"one": 10, "other": 5}
    harness.drain()


def test_nobody_saves_up_while_it_asks_for_nothing():
    harness = fair(max_num_seqs=1)
    for number in range(12):
        harness.submit(sent("busy", number))
    admitted(harness, 6)
    for number in range(6):
        harness.submit(sent("idle", number))
    assert Counter(admitted(harness, 6)) == {"busy": 3, "idle": 3}
    harness.drain()


def test_one_tenant_is_served_in_order_of_arrival():
    harness = fair(max_num_seqs=1)
    for number in range(5):
        harness.submit(sent("only", number, arrival=float(5 - number)))
    order = []
    while len(order) < 5:
        order += [admit.seq_id for admit in harness.plan().admits]
        harness.commit()
    assert order == [f"only-{number}" for number in (4, 3, 2, 1, 0)]


def test_what_is_cached_costs_nothing_and_what_is_computed_again_is_counted_once():
    harness = Harness(config(num_blocks=64, policy="fair", max_num_seqs=2))
    prompt = tuple(range(10))
    harness.submit(request("a-0", prompt, 2, tenant="a"))
    harness.drain()
    queue = harness.scheduler._waiting
    assert queue._counters == {"a": 10 + GENERATED_WEIGHT}  # the last token is never computed
    harness.submit(request("b-0", prompt, 2, tenant="b"))
    harness.drain()
    assert queue._counters["b"] == 10 + GENERATED_WEIGHT + 2 + GENERATED_WEIGHT, "8 of 10 were cached"
    harness.submit(request("c-0", prompt[::-1], 6, tenant="c"))
    harness.step()
    harness.step()
    before = queue._counters["c"]
    harness.drop()
    harness.step()
    assert queue._counters["c"] == before + GENERATED_WEIGHT, "one is new, all others computed again"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(8))
def test_tenants_that_always_wait_differ_by_no_more_than_the_papers_bound(seed):
    """Theorem 4.4 of the paper: 2 max(longest prompt, tokens that run at once), counted with its weights."""
    chance, harness = random.Random(seed), fair(max_num_seqs=4)
    counts = Counter({"one": 0, "other": 0, "third": 0})
    for _ in range(300):
        for tenant in counts:
            while sum(tenant_of(seq_id) == tenant for seq_id in harness.live) < 6:
                harness.submit(sent(tenant, counts[tenant], prompt=chance.randint(1, 14)))
                counts[tenant] += 1
        harness.step()
        counters = harness.scheduler._waiting._counters.values()
        assert max(counters) - min(counters) <= 2 * max(14, GENERATED_WEIGHT * 4 * (14 + GENERATED))
    harness.drain()


def test_tenants_are_forgotten_that_have_no_debt():
    harness = fair()
    for number in range(300):
        harness.submit(sent(f"name{number}", 0))
        harness.drain()
    assert len(harness.scheduler._waiting._counters) <= 66


def test_a_queue_says_who_is_next_while_some_are_taken():
    queue = FairQueue()
    assert list(queue.in_order()) == []
    assert len(queue) == 0
