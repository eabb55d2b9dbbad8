"""What goes over the wire: framing to the byte, order of chunks, and streams that say what plain answers say."""

from __future__ import annotations

import json
import math
import threading

import httpx
import pytest
from scripted_engine import Until, Wait, always, delta, failed, finished, length, stop
from sse_reader import read_events

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, PromptTokens, TokenPiece


def chunks_of(response) -> list[dict]:
    events = read_events(response.content)
    assert events[-1].data == "[DONE]"
    return [json.loads(event.data) for event in events[:-1]]


def without_head(chunk: dict) -> dict:
    return {key: value for key, value in chunk.items() if key not in ("id", "created")}


def test_a_chat_stream_is_exact_to_the_byte(served):
    response = served.chat(stream=True)
    chunks = chunks_of(response)
    head = chunks[0]["id"], chunks[0]["created"]
    after = [f"\nid: {head[0]}:{place}\n\n" for place in ("0.0", "1.3", "2.5", "2.5e", "end")]
    prefix = (
        f'data: {{"id":"{head[0]}","created":{head[1]},"model":"acme/tiny-1","system_fingerprint":null,'
        '"object":"chat.completion.chunk","choices":[{"index":0,"delta":'
    )
    assert response.content.decode() == (
        prefix
        + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        + after[0]
        + prefix
        + '{"content":"Hel"},"logprobs":null,"finish_reason":null}]}'
        + after[1]
        + prefix
        + '{"content":"lo"},"logprobs":null,"finish_reason":null}]}'
        + after[2]
        + prefix
        + '{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
        + after[3]
        + "data: [DONE]"
        + after[4]
    )
    assert head[0].startswith("chatcmpl-")


def test_a_completion_stream_has_text_pieces_and_no_role(served):
    served.engine.script = always(delta("Hel"), delta("lo"), length(), finished())
    chunks = [without_head(chunk) for chunk in chunks_of(served.complete(stream=True))]
    common = {"model": "acme/tiny-1", "system_fingerprint": None, "object": "text_completion"}
    choice = {"index": 0, "logprobs": None}
    assert chunks == [
        {**common, "choices": [{**choice, "text": "Hel", "finish_reason": None}]},
        {**common, "choices": [{**choice, "text": "lo", "finish_reason": None}]},
        {**common, "choices": [{**choice, "text": "", "finish_reason": "length", "stop_reason": None}]},
    ]


def test_stream_headers_are_those_of_an_event_stream(served):
    headers = served.chat(stream=True).headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


def test_the_role_comes_with_the_first_token_and_not_before(served):
    go = threading.Event()
    served.engine.script = always(Until(go), delta("x"), stop(), finished())
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    answered = threading.Event()
    lines: list[bytes] = []

    def read() -> None:
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            answered.set()
            lines.extend(response.iter_bytes())

    thread = threading.Thread(target=read)
    thread.start()
    served.engine.wait_until(lambda: bool(served.engine.live))
    assert not answered.wait(0.15), "not even the status line may come before the first output"
    go.set()
    thread.join(5)
    assert [e["choices"][0]["delta"] for e in map(json.loads, (e.data for e in read_events(b"".join(lines))[:-1]))] == [
        {"role": "assistant", "content": ""},
        {"content": "x"},
        {},
    ]


def test_choices_interleave_by_index_and_each_has_its_own_end(served):
    served.engine.script = always(
        delta("a0", 0), delta("b0", 1), delta("b1", 1), length(1), delta("a1", 0), stop(0, "X"), finished(5, 4)
    )
    chunks = chunks_of(served.chat(stream=True, n=2))
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": "a0"}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "b0"}, None),
        (1, {"content": "b1"}, None),
        (1, {}, "length"),
        (0, {"content": "a1"}, None),
        (0, {}, "stop"),
    ]
    whole = served.chat(n=2).json()["choices"]
    assert [(c["message"]["content"], c["finish_reason"], c["stop_reason"]) for c in whole] == [
        ("a0a1", "stop", "X"),
        ("b0b1", "length", None),
    ]


@pytest.mark.parametrize("by", ["END", 42, None])
def test_stop_reason_is_the_string_or_the_id_that_stopped_it(served, by):
    served.engine.script = always(delta("x"), stop(0, by), finished())
    assert chunks_of(served.chat(stream=True))[-1]["choices"][0]["stop_reason"] == by
    assert served.chat().json()["choices"][0]["stop_reason"] == by
    assert served.complete().json()["choices"][0]["stop_reason"] == by


def test_usage_comes_once_at_the_end_and_is_null_before(served):
    served.engine.script = always(delta("x"), stop(), finished(11, 3, 8))
    chunks = chunks_of(served.chat(stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert served.chat().json()["usage"] == chunks[-1]["usage"]


@pytest.mark.parametrize("way", ["chat", "complete"])
def test_every_chunk_holds_the_tokens_so_far_where_that_is_asked_for(served, way):
    prompt = PromptTokens("abc", (TokenPiece(1, b"a", math.nan), TokenPiece(2, b"bc", math.nan)))
    served.engine.script = always(prompt, delta("Q"), delta("Z"), stop(), finished(2, 2, 0))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(getattr(served, way)(stream=True, stream_options=options))
    assert served.engine.requests[-1].running_usage
    told = [chunk["usage"] for chunk in chunks if "Q" in str(chunk["choices"]) or "Z" in str(chunk["choices"])]
    assert [usage["prompt_tokens"] for usage in told] == [2, 2]
    assert [usage["completion_tokens"] for usage in told] == [1, 2]
    assert [usage["total_tokens"] for usage in told] == [3, 4]
    assert "abc" not in str(chunks)
    assert last["usage"]["completion_tokens"] == 2


def test_without_include_usage_no_chunk_speaks_of_it(served):
    assert all("usage" not in chunk for chunk in chunks_of(served.chat(stream=True)))
    assert all(
        "usage" not in chunk for chunk in chunks_of(served.chat(stream=True, stream_options={"include_usage": False}))
    )


def test_usage_comes_although_every_choice_ended_long_before(served):
    served.engine.script = always(stop(0), stop(1), finished(3, 0))
    chunks = chunks_of(served.complete(stream=True, n=2, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


def test_a_failure_on_the_way_is_one_error_event_then_done(served):
    served.engine.script = always(delta("Hel"), failed())
    events = read_events(served.chat(stream=True, stream_options={"include_usage": True}).content)
    assert [event.data for event in events[-2:]] == [
        '{"error":{"message":"The logits are not finite.","type":"server_error","param":null,"code":"internal_error"}}',
        "[DONE]",
    ]
    assert json.loads(events[-3].data)["usage"]["completion_tokens"] == 1


def test_a_stream_that_stops_without_an_end_is_an_error_and_never_looks_complete(served):
    served.engine.script = always(delta("Hel"), stop())
    events = read_events(served.chat(stream=True).content)
    assert "error" in json.loads(events[-2].data)
    assert served.chat().status_code == 500


def test_an_unforeseen_error_on_the_way_tells_nothing_of_its_message(served):
    served.engine.script = always(delta("Hel"), ValueError("secret prompt"))
    content = served.chat(stream=True).text
    assert "secret" not in content
    assert '"internal_error"' in content


def test_a_choice_that_failed_fails_the_answer(served):
    served.engine.script = always(delta("x"), ChoiceFinished(0, FinishReason.ERROR), finished())
    assert served.chat().status_code == 500
    assert '"internal_error"' in served.chat(stream=True).text


def test_an_abort_is_said_as_the_finish_reason(served):
    served.engine.script = always(delta("x"), ChoiceFinished(0, FinishReason.ABORT), finished())
    assert served.chat().json()["choices"][0]["finish_reason"] == "abort"


TRICKY = ["Hé", "", "\n\n", "data: [DONE]\n\n", "\r", "\u2028", "🦙", '"\\', "\x00\x1b", "</s>"]


@pytest.mark.parametrize("endpoint", ["chat", "complete", "generate"])
def test_stream_and_plain_answer_have_the_same_text(served, endpoint):
    served.engine.script = always(*(delta(text) for text in TRICKY), stop(), finished())
    streamed = getattr(served, endpoint)(stream=True)
    plain = getattr(served, endpoint)().json()
    if endpoint == "generate":
        assert streamed.content.decode() == plain["text"] == "".join(TRICKY)
        return
    choices = [chunk["choices"][0] for chunk in chunks_of(streamed)]
    text = "".join(c["delta"].get("content", "") if endpoint == "chat" else c["text"] for c in choices)
    whole = plain["choices"][0]
    assert text == (whole["message"]["content"] if endpoint == "chat" else whole["text"]) == "".join(TRICKY)


def test_a_delta_without_text_is_no_chunk(served):
    served.engine.script = always(delta("", raw=b"\xf0\x9f"), delta("🦙", raw=b"\xa6\x99"), stop(), finished())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(served.chat(stream=True))]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "🦙"}, {}]


SPLIT = (
    delta("a", token=1, logprob=-0.25),
    delta("", token=2, logprob=-1.5, raw=b"\xf0\x9f", start=1),
    ChoiceDelta(0, "🦙b", (TokenPiece(3, b"\xa6\x99", float("-inf"), start=1), TokenPiece(4, b"b", 0.0, start=2))),
    stop(),
    finished(5, 4),
)


def test_chat_logprobs_hold_every_token_streamed_or_not(served):
    served.engine.script = always(*SPLIT)
    expected = [
        {"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0, 0x9F], "top_logprobs": []},
        {"token": "\ufffd\ufffd", "logprob": -9999.0, "bytes": [0xA6, 0x99], "top_logprobs": []},
        {"token": "b", "logprob": 0.0, "bytes": [98], "top_logprobs": []},
    ]
    assert served.chat(logprobs=True).json()["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    chunks = chunks_of(served.chat(logprobs=True, top_logprobs=0, stream=True))
    pieces = [c["choices"][0]["logprobs"] for c in chunks]
    assert [token for piece in pieces if piece for token in piece["content"]] == expected
    assert served.request.sampling.has("logprobs")


def test_completion_logprobs_count_characters_streamed_or_not(served):
    served.engine.script = always(*SPLIT)
    expected = {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": [-0.25, -1.5, -9999.0, 0.0],
        "tokens": ["a", "\ufffd", "\ufffd\ufffd", "b"],
    }
    whole = served.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert whole == expected | {"top_logprobs": None}
    pieces = [c["choices"][0]["logprobs"] for c in chunks_of(served.complete(logprobs=0, stream=True))]
    for key, values in expected.items():
        assert [value for piece in pieces if piece for value in piece[key]] == values


TOPPED = (
    ChoiceDelta(0, "a", (TokenPiece(1, b"a", -0.5, (TokenPiece(1, b"a", -0.5), TokenPiece(2, b"b", -1.5))),)),
    ChoiceDelta(0, "c", (TokenPiece(3, b"c", -4.0, (TokenPiece(1, b"a", -0.25), TokenPiece(9, b"a", -2.0))),)),
    stop(),
    finished(5, 2),
)


def test_chat_alternatives_are_written_with_their_bytes_streamed_or_not(served):
    served.engine.script = always(*TOPPED)
    content = served.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [[(top["token"], top["logprob"], top["bytes"]) for top in token["top_logprobs"]] for token in content] == [
        [("a", -0.5, [97]), ("b", -1.5, [98])],
        [("a", -0.25, [97]), ("a", -2.0, [97])],
    ]
    pieces = [c["choices"][0]["logprobs"] for c in chunks_of(served.chat(logprobs=True, top_logprobs=2, stream=True))]
    assert [token for piece in pieces if piece for token in piece["content"]] == content
    assert served.request.sampling.get("logprobs", 0) == 2


def test_completion_alternatives_are_objects_that_hold_the_chosen_token_too(served):
    served.engine.script = always(*TOPPED)
    whole = served.complete(logprobs=2).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert whole == [{"a": -0.5, "b": -1.5}, {"a": -0.25, "c": -4.0}]
    pieces = [c["choices"][0]["logprobs"] for c in chunks_of(served.complete(logprobs=2, stream=True))]
    assert [top for piece in pieces if piece for top in piece["top_logprobs"]] == whole


ECHOED = (
    PromptTokens(
        "Hi",
        (TokenPiece(5, b"H", float("nan")), TokenPiece(6, b"i", -2.0, (TokenPiece(7, b"o", -1.0),), start=1)),
    ),
    ChoiceDelta(0, "a", (TokenPiece(1, b"a", -0.5, (TokenPiece(1, b"a", -0.5),)),)),
    ChoiceDelta(1, "b", (TokenPiece(2, b"b", -0.75, (TokenPiece(1, b"a", -0.5),)),)),
    stop(0),
    stop(1),
    finished(2, 2),
)


def test_echo_begins_every_choice_with_the_prompt_and_its_first_token_has_no_logprob(served):
    served.engine.script = always(*ECHOED)
    choices = served.complete(echo=True, logprobs=1, n=2).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hia", "Hib"]
    assert choices[1]["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -2.0, -0.75],
        "tokens": ["H", "i", "b"],
        "top_logprobs": [None, {"o": -1.0, "i": -2.0}, {"a": -0.5, "b": -0.75}],
    }
    assert served.request.echo
    assert served.request.sampling.get("prompt_logprobs", -1) == 1
    chunks = chunks_of(served.complete(echo=True, n=2, stream=True))
    for index in (0, 1):
        texts = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(texts) == choices[index]["text"]
    assert not served.request.sampling.has("prompt_logprobs")


SCORED = (
    PromptTokens(
        "Hi",
        (
            TokenPiece(5, b"H", float("nan")),
            TokenPiece(6, b"i", -2.0, (TokenPiece(7, b"o", -1.0, (), 1), TokenPiece(6, b"i", -2.0, (), 2)), 2),
            TokenPiece(9, b"\xff", float("-inf"), (TokenPiece(7, b"o", -0.5, (), 1),), 100),
        ),
    ),
    ChoiceDelta(0, "a", (TokenPiece(1, b"a", -0.5, (), 1),)),
    ChoiceDelta(1, "b", (TokenPiece(2, b"b", -0.75, (), 2),)),
)
SCORES = [
    None,
    {
        "6": {"logprob": -2.0, "rank": 2, "decoded_token": "i"},
        "7": {"logprob": -1.0, "rank": 1, "decoded_token": "o"},
    },
    {
        "9": {"logprob": -9999.0, "rank": 100, "decoded_token": "\ufffd"},
        "7": {"logprob": -0.5, "rank": 1, "decoded_token": "o"},
    },
]


def test_prompt_logprobs_have_vllms_shape_and_stand_beside_the_text_of_each_choice(served):
    served.engine.script = always(*SCORED, stop(0), stop(1), finished(3, 2))
    choices = served.complete(prompt_logprobs=2, n=2).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [SCORES, SCORES]
    assert [choice["text"] for choice in choices] == ["a", "b"]  # no echo
    assert choices[0]["logprobs"] is None
    assert served.request.sampling.get("prompt_logprobs", -1) == 2
    assert "prompt_logprobs" not in served.complete(n=2).json()["choices"][0]


def test_prompt_logprobs_belong_to_their_prompt(served):
    def script(request):
        scored = PromptTokens(request.prompt.text, (TokenPiece(5, b"H", float("nan")),) * ord(request.prompt.text))
        return (scored, delta("x", 0), delta("y", 1), stop(1), stop(0), finished())

    served.engine.script = script
    answer = served.complete(prompt=["\x01", "\x02", "\x03"], prompt_logprobs=0, n=2).json()
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [1, 1, 2, 2, 3, 3]


def test_chat_and_generate_tell_the_scores_of_their_only_prompt_once(served):
    served.engine.script = always(*SCORED[:2], stop(0), finished(3, 1))
    for answer in (served.chat(prompt_logprobs=2).json(), served.generate(prompt_logprobs=2).json()):
        assert answer["prompt_logprobs"] == SCORES
    for refused in (served.chat(prompt_logprobs=1, stream=True), served.generate(prompt_logprobs=1, stream=True)):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_echo_and_prompt_logprobs_each_have_as_many_alternatives_as_they_asked_for(served):
    served.engine.script = always(*SCORED[:2], stop(0), finished(3, 1))
    [choice] = served.complete(prompt_logprobs=2, echo=True, logprobs=1).json()["choices"]
    assert served.request.sampling.get("prompt_logprobs", -1) == 2
    assert choice["prompt_logprobs"] == SCORES
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"o": -1.0, "i": -2.0}]
    [choice] = served.complete(prompt_logprobs=0, echo=True, logprobs=2).json()["choices"]
    assert served.request.sampling.get("prompt_logprobs", -1) == 2
    assert [list(entry or {}) for entry in choice["prompt_logprobs"]] == [[], ["6"], ["9"]]


def test_without_logprobs_there_are_none(served):
    assert served.chat().json()["choices"][0]["logprobs"] is None
    assert served.complete().json()["choices"][0]["logprobs"] is None
    assert not served.request.sampling.has("logprobs")


def test_several_prompts_are_numbered_through_and_their_usage_is_summed(served):
    def script(request):
        mark = request.prompt.text
        return (delta(mark + "0", 0), delta(mark + "1", 1), stop(1), stop(0), finished(3, 2, 1))

    served.engine.script = script
    answer = served.complete(prompt=["a", "b", "c"], n=2).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(["a0", "a1", "b0", "b1", "c0", "c1"]))
    assert answer["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 6,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks_of(served.complete(prompt=["a", "b", "c"], n=2, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_prompts_that_all_have_output_take_turns(served):
    served.engine.script = lambda request: (*(delta(request.prompt.text) for _ in range(20)), stop(), finished())
    order = [c["choices"][0]["index"] for c in chunks_of(served.complete(prompt=["a", "b"], stream=True))]
    for prefix in range(1, len(order)):
        assert abs(order[:prefix].count(0) - order[:prefix].count(1)) <= 2


def test_one_prompt_that_fails_aborts_the_others(served):
    served.engine.script = lambda request: (failed(),) if request.prompt.text == "b" else (delta("x"), Wait())
    assert served.complete(prompt=["a", "b", "c"]).status_code == 500
    assert sorted(served.engine.left) == sorted(
        request.id for request in served.engine.requests if request.prompt.text != "b"
    )


def test_generate_answers_in_three_fields(served):
    served.engine.script = always(delta("Hi"), length(), finished(4, 1, 2))
    assert served.generate().json() == {
        "text": "Hi",
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 1,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_generate_streams_plain_text_and_a_failure_cuts_the_connection(served):
    served.engine.script = always(delta("Hé"), delta("llo"), stop(), finished())
    response = served.generate(stream=True)
    assert (response.headers["content-type"], response.text) == ("text/plain; charset=utf-8", "Héllo")
    served.engine.script = always(delta("Hel"), failed())
    with pytest.raises(httpx.RemoteProtocolError):
        served.generate(stream=True)


def test_an_empty_answer_is_an_answer(served):
    served.engine.script = always(stop(), finished(5, 0))
    assert served.chat().json()["choices"][0]["message"]["content"] == ""
    assert served.generate(stream=True).text == ""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(served.chat(stream=True))]
    assert deltas == [{"role": "assistant", "content": ""}, {}]
