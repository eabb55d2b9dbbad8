"""The definitions of TTFT, TPOT, ITL, E2E, throughput and goodput, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from penstock.bench.latency import Latency, latency_table, parse_goals, request_record, serve_summary
from penstock.bench.serving import Outcome
from penstock.contract.errors import ConfigError


def outcome(sent=1.0, content=(1.5, 1.75, 2.5), ended=3.0, tokens=5, **others) -> Outcome:
    fields = {"due": sent, "prompt_tokens": 10, "counted": True} | others
    return Outcome(sent=sent, content=content, ended=ended, output_tokens=tokens, **fields)


def test_the_latencies_of_one_request():
    # 5 tokens in 3 events: 4 gaps of tokens in the second between first and last content, 2 gaps between events
    assert Latency.of(outcome(due=0.5)) == Latency(ttft=500.0, tpot=250.0, e2e=2000.0, itl=(250.0, 750.0))


def test_one_token_has_no_time_per_token_and_breaks_no_bound_on_it():
    latency = Latency.of(outcome(content=(1.5,), tokens=1))
    assert math.isnan(latency.tpot)
    assert latency.itl == ()
    assert latency.meets({"tpot": 0.001})
    assert request_record(outcome(content=(1.5,), tokens=1))["tpot_ms"] is None


def test_a_bound_is_met_when_it_is_reached():
    latency = Latency.of(outcome())
    assert latency.meets({"ttft": 500, "tpot": 250, "e2e": 2000})
    assert not latency.meets({"ttft": 499.9, "tpot": 250})
    assert latency.meets({})


def test_throughput_and_goodput_count_what_was_answered():
    slow = outcome(sent=2.0, content=(4.0, 5.0), ended=5.0, tokens=3)
    broken = outcome(sent=0.5, content=(), ended=4.5, tokens=0, error="HTTP 429: busy", due=0.25)
    summary = serve_summary([outcome(), slow, broken], {"ttft": 600.0})
    assert summary["duration_s"] == 4.5
    assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 1, {"HTTP 429: busy": 1})
    assert summary["requests_per_s"] == 2 / 4.5
    assert summary["output_tok_s"] == 8 / 4.5
    assert summary["total_tok_s"] == 28 / 4.5
    assert summary["goodput"] == {"goals_ms": {"ttft": 600.0}, "met": 1, "requests_per_s": 1 / 4.5}
    assert summary["ttft_ms"]["p50"] == pytest.approx((500 + 2000) / 2)
    assert summary["itl_ms"]["mean"] == pytest.approx((250 + 750 + 1000) / 3)
    assert summary["send_delay_ms"]["mean"] == pytest.approx(250 / 3)
    assert summary["tokens_counted_by"] == "server"
    json.dumps(summary)


def test_a_test_in_which_everything_failed_has_figures_all_the_same():
    summary = serve_summary([outcome(content=(), tokens=0, error="no connection")], {})
    assert summary["output_tok_s"] == 0
    assert summary["ttft_ms"] == {}
    assert "goodput" not in summary
    table = latency_table(summary)
    assert "1 x no connection" in table
    assert [line.split() for line in table.splitlines() if line.startswith("TTFT")] == [["TTFT", *"-----"]]


def test_the_table_shows_each_figure():
    table = latency_table(serve_summary([outcome(counted=False)], {"tpot": 250.0}))
    assert "TTFT             500.00     500.00     500.00     500.00" in table
    assert "(1 with tpot <= 250 ms)" in table
    assert "counted by   events" in table


def test_a_request_is_recorded_with_its_latencies_or_its_error():
    assert request_record(outcome()) == {
        "due_s": 1.0, "sent_s": 1.0, "ended_s": 3.0, "prompt_tokens": 10, "output_tokens": 5,
        "cached_prompt_tokens": None, "ttft_ms": 500.0, "tpot_ms": 250.0, "e2e_ms": 2000.0,
    }  # fmt: skip
    assert request_record(outcome(content=(), error="x"))["error"] == "x"


def test_goals_are_read_from_one_word_or_several():
    assert parse_goals(["ttft:200", "tpot:50"]) == parse_goals(["ttft:200 tpot:50"]) == {"ttft": 200.0, "tpot": 50.0}
    assert parse_goals(["e2el:5000.5"]) == {"e2e": 5000.5}
    assert parse_goals([]) == {}


@pytest.mark.parametrize("words", [["ttft"], ["ttft:"], ["itl:5"], ["ttft:-1"], ["ttft:x"], ["ttft:1", "ttft:2"], [""]])
def test_other_goals_are_refused(words):
    with pytest.raises(ConfigError, match="goodput"):
        parse_goals(words)


def test_prompt_tokens_from_the_prefix_cache_are_counted_where_the_server_tells():
    told = [replace(outcome(), cached_tokens=cached) for cached in (4, 8, None)]
    summary = serve_summary(told, {})
    assert summary["cached_prompt_tokens"] == 12
    assert "prefix cache        12 prompt tokens, 40% of all" in latency_table(summary)
    silent = serve_summary([outcome()], {})
    assert silent["cached_prompt_tokens"] is None
    assert "prefix cache" not in latency_table(silent)
