"""Workloads: every published format, clear errors for bad lines, and what is drawn."""

from __future__ import annotations

import gzip
import math
import statistics

import pytest
from core_harness import request
from foresight_days import record_day

from penstock.contract.errors import SetupError
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.foresight.workloads import DRAWN, read_workload

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 23:59:59.500000+00:00,2162,5
2024-05-13 00:00:01+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1500, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1100, "output_length": 26, "hash_ids": [0, 1, 9]}
"""
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 4, "type": "text",'
    ' "turn": 1, "hash_ids": [5, 6, 8]}\n'
    '{"chat_id": 9, "parent_chat_id": 7, "timestamp": 62.5, "input_length": 40, "output_length": 8, "type": "text",'
    ' "turn": 2, "hash_ids": [5, 6, 11]}\n'
)
OWN = '{"offset": 2.5, "prompt_tokens": 9, "output_tokens": 3}\n'


def read(tmp_path, text: str):
    file = tmp_path / "trace"
    file.write_text(text)
    return read_workload(file)


def sizes(workload) -> list[tuple[float, int, int]]:
    arrivals = workload.arrivals(100_000)
    return [(round(a.at, 3), len(a.request.prompt), a.request.stop.max_tokens) for a in arrivals]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE_2023, [(0.0, 4808, 10), (0.052, 110, 27)]),
        (AZURE_2024, [(0.0, 2162, 5), (1.5, 2399, 6)]),
        (MOONCAKE, [(0.0, 1500, 52), (3.052, 1100, 26)]),
        (BAILIAN, [(0.0, 33, 4), (1.386, 40, 8)]),
        (OWN, [(0.0, 9, 3)]),
    ],
)
def test_every_format_is_read_by_its_first_line(tmp_path, text, expected):
    assert sizes(read(tmp_path, text)) == expected


@pytest.mark.parametrize(("text", "shared"), [(MOONCAKE, 1024), (BAILIAN, 32), (AZURE_2024, 0)])
def test_prompts_share_what_their_hashes_share_and_nothing_else(tmp_path, text, shared):
    one, other = (arrival.request.prompt for arrival in read(tmp_path, text).arrivals(100_000))
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


def test_a_record_is_a_workload_of_its_own_requests(tmp_path):
    requests = [request("0/0", range(9), 3), request("1/0", range(5), 2, arrival=1.5)]
    config = SchedulerConfig(64, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    workload = read(tmp_path, "".join(record_day(config, requests)))
    assert sizes(workload) == [(0.0, 9, 3), (1.5, 5, 2)]
    assert next(workload.arrivals(64)).request.prompt == tuple(range(9))
    assert [each.at for each in workload.arrivals(64, speed=3.0)] == [0.0, 0.5]


def test_compressed_traces_are_read_too(tmp_path):
    file = tmp_path / "trace.gz"
    file.write_bytes(gzip.compress(AZURE_2023.encode()))
    assert len(read_workload(file, most=1)) == 1


def test_lengths_are_cut_to_the_context_and_times_scaled(tmp_path):
    arrivals = list(read(tmp_path, MOONCAKE).arrivals(1120, speed=2.0))
    assert [len(each.request.prompt) for each in arrivals] == [1119, 1100]
    assert [each.request.stop.max_tokens for each in arrivals] == [1, 20]
    assert arrivals[1].at == 1.526


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "it holds no requests"),
        ("TIMESTAMP,Tokens\n", "line 1: the columns of an Azure trace are"),
        (AZURE_2023 + "yesterday,1,2\n", "line 4: not a time and two numbers of tokens"),
        (AZURE_2023 + "2023-11-16 18:17:05,-1,2\n", "line 4: -1 and 2 tokens"),
        ("no trace\n", "line 1: neither a record"),
        ("[]\n", "line 1: not an object"),
        (OWN + '{"offset": 1, "prompt_tokens": "9", "output_tokens": 3}\n', "line 2: prompt_tokens: not a number"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 3}\n', "line 3: output_length: not a number of tokens: None"),
        (MOONCAKE.replace("[0, 1, 2]", "[0.5]"), "line 1: hash_ids"),
        (OWN.replace("2.5", "1e999"), "line 1: its time is not finite"),
    ],
)
def test_bad_lines_are_refused_by_file_and_line(tmp_path, text, message):
    with pytest.raises(SetupError, match="trace: ") as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_drawn_workloads_have_their_rate_their_lengths_and_the_same_requests_at_any_rate():
    drawn = DRAWN["chat"]
    slow, fast = drawn.draw("", 1.0, 2000, 3), drawn.draw("", 10.0, 2000, 3)
    assert slow.rate == pytest.approx(1.0, rel=0.1)
    assert fast.rate == pytest.approx(10.0, rel=0.1)
    assert statistics.median(size.prompt_tokens for size in slow.sizes) == pytest.approx(drawn.prompt, rel=0.1)
    spread = statistics.stdev(math.log(size.output_tokens) for size in slow.sizes)
    assert spread == pytest.approx(drawn.output_sigma, rel=0.1)
    assert [size.prompt_tokens for size in slow.sizes] == [size.prompt_tokens for size in fast.sizes]


def test_prompts_of_the_shared_workload_begin_alike():
    arrivals = list(DRAWN["shared"].draw("", 1.0, 40, 0).arrivals(4096))
    beginnings = {arrival.request.prompt[:512] for arrival in arrivals}
    assert len(beginnings) == 8
    assert len({arrival.request.prompt[512:] for arrival in arrivals}) == 40
