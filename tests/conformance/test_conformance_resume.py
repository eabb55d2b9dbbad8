"""Streams of the default model that are cut and resumed: both parts together are the stream that was not cut."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import pytest
from conformance_harness import ASK_WEATHER, NAMED, PARIS, PATIENCE, WEATHER
from resuming import CHAT, COMPLETIONS, MESSAGES, RESPONSES, blocks, cut, id_of, resume, told

pytestmark = pytest.mark.model

HOT = {"temperature": 1.3, "max_tokens": 10}
FLAT = {key: value for key, value in WEATHER["function"].items() if key != "strict"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"messages": PARIS, "temperature": 0, "max_tokens": 9}),
    "no seed": (CHAT, {"messages": PARIS, **HOT, "stream_options": {"include_usage": True}}),
    "seed, choices, scores": (CHAT, {"messages": PARIS, **HOT, "n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2}),
    "tool": (CHAT, {"messages": ASK_WEATHER, **HOT, "max_tokens": 40, "tools": [WEATHER], "tool_choice": NAMED}),
    "form": (COMPLETIONS, {"prompt": "Yes?", **HOT, "structured_outputs": {"regex": "(yes|no)(, (yes|no)){4}"}}),
    "stop, prompts, echo": (
        COMPLETIONS,
        {"prompt": ["Once upon", "The sea"], **HOT, "stop": [" the", "zzz"], "echo": True, "logprobs": 1, "n": 2},
    ),
    "responses": (RESPONSES, {"input": "Two words 🌊", "temperature": 1.3, "max_output_tokens": 10}),
    "messages": (MESSAGES, {"messages": ASK_WEATHER, **HOT, "max_tokens": 40, "tool_choice": {"type": "any"}}),
}


TYPICAL = ("no seed", "form", "responses")
VARIANTS = [case if case in TYPICAL else pytest.param(case, marks=pytest.mark.deep) for case in CASES]


@pytest.mark.parametrize("case", VARIANTS)
def test_a_resumed_stream_says_what_it_would_have_said(default_server, case):
    path, fields = CASES[case]
    body = fields | {"stream": True}
    with httpx.Client(base_url=default_server.url, timeout=PATIENCE) as http:
        if path == MESSAGES:
            tool = {"name": FLAT["name"], "input_schema": FLAT["parameters"]}
            body |= {"tools": [tool], "model": http.get("/v1/models").json()["data"][0]["id"]}
        whole = http.post(path, json=body)
        assert whole.status_code == 200, whole.text
        events = blocks(whole.content)
        for count in random.Random(case).sample(range(1, len(events)), 2):
            rest = resume(http, path, body, id_of(events[count - 1]))
            assert rest.status_code == 200, rest.text
            assert said(path, b"".join(events[:count]) + rest.content) == said(path, whole.content)
        begun = cut(http, path, body, 2)
        rest = resume(http, path, body, id_of(blocks(begun)[-1]))
        again = resume(http, path, body, id_of(blocks(begun)[0]))
        assert said(path, begun + rest.content) == said(path, blocks(begun)[0] + again.content)


def said(path: str, wire: bytes) -> list[object]:
    """What a stream says, less the token counts that depend on the cache and so differ between runs of one request."""
    wire = re.sub(rb'"(cached_tokens|cache_read_input_tokens|input_tokens)":\d+', rb'"\1":0', wire)
    return json.loads(json.dumps(told(path, wire)))
