"""What a load test sends and when."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import pairwise

import pytest

from penstock.bench.workload import Arrivals, Call, Lengths, make_calls, read_trace
from penstock.contract.errors import ConfigError


def calls(count=20, arrivals=None, prompts=None, outputs=None, shared=0, seed=0):
    sizes = (prompts or Lengths(3, 9), outputs or Lengths(1, 5))
    return make_calls(count, arrivals or Arrivals(), *sizes, shared, vocab_size=50, seed=seed)


def test_without_a_rate_all_come_at_once_and_with_one_at_equal_gaps():
    assert list(Arrivals().offsets(3, random.Random(0))) == [0, 0, 0]
    assert list(Arrivals(4.0).offsets(3, random.Random(0))) == [0, 0.25, 0.5]


def test_poisson_arrivals_are_seeded_and_have_exponential_gaps():
    offsets = list(Arrivals(8.0, poisson=True).offsets(20_001, random.Random(5)))
    assert offsets == list(Arrivals(8.0, poisson=True).offsets(20_001, random.Random(5)))
    gaps = [after - before for before, after in pairwise(offsets)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.03)  # equal gaps would have 0
    for share in (0.1, 0.5, 0.9):  # the exponential's distribution function at its quantiles
        assert sum(gap < -math.log(1 - share) / 8 for gap in gaps) / len(gaps) == pytest.approx(share, abs=0.015)


def test_the_same_seed_makes_the_same_calls_and_the_rate_changes_only_the_times():
    assert calls(seed=1) == calls(seed=1) != calls(seed=2)
    paced = calls(seed=1, arrivals=Arrivals(5.0, poisson=True))
    assert [(each.prompt, each.output_tokens) for each in paced] == [
        (each.prompt, each.output_tokens) for each in calls(seed=1)
    ]
    assert len({each.offset for each in paced}) == 20


def test_lengths_fill_their_range_and_prompts_share_exactly_the_prefix():
    many = calls(count=300, shared=12)
    assert {len(each.prompt) for each in many} == set(range(15, 22))
    assert {each.output_tokens for each in many} == {1, 2, 3, 4, 5}
    assert len({each.prompt[:12] for each in many}) == 1
    assert len({each.prompt[12:15] for each in many}) > 200
    assert all(0 <= token < 50 for each in many for token in each.prompt)


def test_lengths_are_a_number_or_a_range():
    assert Lengths.parse("x", "128") == Lengths(128, 128)
    assert Lengths.parse("x", "1:9") == Lengths(1, 9)


@pytest.mark.parametrize("text", ["", "0", "9:1", "a", "1:2:3", "-1", "1.5", "٣", "9" * 10])
def test_other_lengths_are_refused_by_the_options_name(text):
    with pytest.raises(ConfigError, match="new_tokens"):
        Lengths.parse("new_tokens", text)


@pytest.mark.parametrize("rate", [-1.0, math.inf, math.nan])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(ConfigError, match="rate"):
        Arrivals(rate)


def test_poisson_needs_a_rate():
    with pytest.raises(ConfigError, match="poisson"):
        Arrivals(poisson=True)


def test_a_trace_gives_times_and_sizes_in_order(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"offset": 1.5, "prompt_tokens": 4, "output_tokens": 2}\n\n'
        '{"offset": 0, "prompt_tokens": 3, "output_tokens": 9}\n'
    )
    read = read_trace(trace, shared_prefix=2, vocab_size=50, seed=0)
    assert [(each.offset, len(each.prompt), each.output_tokens) for each in read] == [(0, 5, 9), (1.5, 6, 2)]
    assert all(isinstance(each, Call) for each in read)
    assert read[0].prompt[:2] == read[1].prompt[:2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "object of offset"),
        ('{"offset": 0, "prompt_tokens": 1}', "object of offset"),
        ('{"offset": 0, "prompt_tokens": 1, "output_tokens": 1, "x": 1}', "nothing else"),
        ('{"offset": -1, "prompt_tokens": 1, "output_tokens": 1}', "offset"),
        ('{"offset": NaN, "prompt_tokens": 1, "output_tokens": 1}', "offset"),
        ('{"offset": true, "prompt_tokens": 1, "output_tokens": 1}', "offset"),
        ('{"offset": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"offset": 0, "prompt_tokens": 1, "output_tokens": 1.0}', "output_tokens"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line, said):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"offset": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2.*{said}"):
        read_trace(trace, 0, 50, 0)


def test_a_trace_that_is_missing_or_empty_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing", 0, 50, 0)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty", 0, 50, 0)


def test_several_prefixes_are_shared_by_several_calls_each():
    many = make_calls(60, Arrivals(), Lengths(3, 9), Lengths(1, 5), 12, vocab_size=50, seed=0, prefixes=3)
    beginnings = [each.prompt[:12] for each in many]
    assert len(set(beginnings)) == 3
    assert all(beginnings.count(each) > 5 for each in set(beginnings))
    assert len({each.prompt[12:] for each in many}) == 60


def hashed(**changes) -> str:
    line = {"chat_id": 7, "timestamp": 0.5, "input_length": 40, "output_length": 3, "hash_ids": [11, 12, 13]}
    return json.dumps(line | changes)


def test_prompts_of_a_hashed_trace_begin_alike_where_their_hashes_do(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([hashed(), hashed(timestamp=2, hash_ids=[11, 12, 99]), hashed(hash_ids=[5])]))
    first, other, later = read_trace(path, 0, vocab_size=1000, seed=0, speed=2.0)
    assert [call.offset for call in (first, other, later)] == [0.25, 0.25, 1.0]
    assert {len(call.prompt) for call in (first, other, later)} == {40}
    assert first.prompt[:32] == later.prompt[:32]
    assert first.prompt[32:] != later.prompt[32:]
    assert first.prompt[:16] != other.prompt[:16]
    assert first.output_tokens == 3
    assert read_trace(path, 0, vocab_size=1000, seed=1)[0].prompt != first.prompt


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"hash_ids": "x"}, "hash_ids"), ({"hash_ids": [1.5]}, "hash_ids"), ({"timestamp": -1}, "timestamp"),
     ({"input_length": 0}, "input_length"), ({"output_length": True}, "output_length")],
)  # fmt: skip
def test_a_broken_line_of_a_hashed_trace_names_its_key(tmp_path, changes, said):
    path = tmp_path / "trace.jsonl"
    path.write_text(hashed(**changes))
    with pytest.raises(ConfigError, match=f"trace.jsonl:1: {said}"):
        read_trace(path, 0, vocab_size=1000, seed=0)
