"""The reader that the other tests trust, against the examples of the standard."""

import pytest
from sse_reader import Event, read_events


@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n"])
def test_every_line_ending_of_the_standard_is_one(ending: str):
    text = ending.join(["data: a", "data: b", "", "data:c", "", ""])
    assert read_events(text.encode()) == [Event("a\nb"), Event("c")]


def test_comments_and_a_leading_bom_say_nothing():
    assert read_events(b"\xef\xbb\xbf: hi\n\ndata: x\n: in between\n\n") == [Event("x")]


def test_the_example_of_yhoo():
    assert read_events(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [Event("YHOO\n+2\n10")]


def test_names_without_values_and_one_space_only():
    assert read_events(b"data\n\ndata\ndata\n\ndata:  two\n\n") == [Event(""), Event("\n"), Event(" two")]


def test_an_event_without_its_blank_line_is_lost():
    assert read_events(b"data: whole\n\ndata: cut\n") == [Event("whole")]


def test_event_and_id_belong_to_the_next_dispatch():
    assert read_events(b"event: e\nid: 1\ndata: x\n\ndata: y\n\n") == [Event("x", "e", "1"), Event("y", "message", "1")]
