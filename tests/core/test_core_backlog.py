"""The backlog that is estimated for a newcomer, against how long it then waits."""

from __future__ import annotations

import pytest
from core_harness import request
from test_core_chunk_limit import LARGE, QUICK, SLOW, Timed, cost

from penstock.core.backlog import Backlog


def begins(timed: Timed, seq_id: str) -> float:
    """Seconds until a sequence is admitted."""
    began = timed.time
    for _ in range(2000):
        before = timed.time
        if any(admit.seq_id == seq_id for admit in timed.step().admits):
            return before - began
    raise AssertionError(f"{seq_id} was not admitted")


def timed(parts=SLOW, target=100, streams=4, **options) -> Timed:
    """A `Timed` that has read a prompt beside streams before."""
    one = Timed(cost(*parts, noise=0.1), target=target, **options)
    one.stream(streams)
    one.read()
    return one


def test_an_empty_scheduler_has_none():
    one = Timed(cost(*SLOW), target=100)
    assert one.scheduler.backlog(request("new", range(5000))) == (0.0, 0)
    one.read()
    while one.scheduler.has_work:
        one.step()
    assert one.scheduler.backlog(request("new", range(5000))) == (0.0, 0)


@pytest.mark.parametrize("parts", [SLOW, QUICK, LARGE])
@pytest.mark.parametrize("target", [0, 100])
@pytest.mark.parametrize("streams", [1, 6])
def test_the_time_until_a_prompt_is_begun_is_foreseen(parts, target, streams):
    one = timed(parts, target, streams)
    for number in range(3):
        one.scheduler.submit(request(f"before {number}", [number] * 2000, max_tokens=2))
    for _ in range(3):
        one.step()
    new = request("new", [9] * 1000)
    foreseen = one.scheduler.backlog(new)
    assert foreseen.ends == 0
    one.scheduler.submit(new)
    assert begins(one, "new") == pytest.approx(foreseen.seconds, rel=0.3)


def test_what_is_cached_is_read_already():
    one = timed(max_num_seqs=5)
    one.scheduler.submit(request("first", [7] * 2000, max_tokens=1))
    while one.chunks(one.step()) or one.scheduler.num_waiting:
        pass
    one.scheduler.submit(request("running", range(20), max_tokens=100))
    one.step()
    one.scheduler.submit(request("again", [7] * 2000, max_tokens=1))
    again = one.scheduler.backlog(request("new", range(10))).seconds
    one.scheduler.submit(request("other", [8] * 2000, max_tokens=1))
    assert one.scheduler.backlog(request("new", range(10))).seconds > 20 * again > 0


def test_slots_that_are_lacking_are_ends():
    one = Timed(cost(*SLOW), target=100, max_num_seqs=4)
    one.stream(4)
    assert one.scheduler.backlog(request("new", range(100))).ends == 1
    one.scheduler.submit(request("before", range(100)))
    assert one.scheduler.backlog(request("new", range(100))).ends == 2


def test_blocks_that_are_lacking_are_ends():
    one = Timed(cost(*SLOW), target=100, num_blocks=64, max_model_len=512)
    for number in range(2):
        one.scheduler.submit(request(f"{number}", [number] * 400, max_tokens=50))
    while one.chunks(one.step()) or one.scheduler.num_waiting:
        pass
    assert one.scheduler.backlog(request("short", range(100))).ends == 0
    assert one.scheduler.backlog(request("long", range(400))).ends == 1
    one.scheduler.submit(request("before", range(400)))
    assert one.scheduler.backlog(request("long", range(400))).ends == 2


def test_who_comes_first_by_priority_waits_for_nobody_behind():
    one = timed(policy="priority")
    one.scheduler.submit(request("patient", [5] * 3000, priority=9))
    urgent, late = request("urgent", [6] * 10, priority=1), request("late", [6] * 10, priority=10)
    assert one.scheduler.backlog(urgent) == Backlog(0.0, 0)
    assert one.scheduler.backlog(late).seconds > 1


def test_a_tenant_with_a_long_queue_is_not_before_another():
    one = timed(policy="fair")
    for number in range(6):
        one.scheduler.submit(request(f"heavy {number}", [number] * 2000, tenant="heavy"))
    heavy, light = (one.scheduler.backlog(request("new", range(10), tenant=of)).seconds for of in ("heavy", "light"))
    assert heavy > 5 * light > 0
