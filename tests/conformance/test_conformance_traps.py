"""Eighteen places where engines of this kind have been seen to go wrong, with one test each.

Most ask the default command. Tests that depend on what is scheduled, and when, ask a real server and the real engine
around a fake runner, which computes a step when the test lets it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from conformance_harness import (
    ASK_WEATHER,
    MODEL,
    NAMED,
    PARIS,
    PATIENCE,
    WEATHER,
    Gate,
    GatedServer,
    gated,
    joined_chat,
    joined_text,
    wait_until,
    whole_chat,
    whole_text,
)
from engine_harness import build, finishes_of, terminal_of
from sse_reader import read_events
from tiny_checkpoints import load_model, write_checkpoint

from penstock.contract.events import Generated
from penstock.contract.model import GgufVocabulary
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.engine.choice import Choice
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import TorchRunner
from penstock.sampling import SamplingParams
from penstock.text import open_text

COUNTING = "Count: one, two, three, four,"
SHRUG = "🤷"  # four bytes, of which the default model's tokenizer makes three tokens


@pytest.fixture(scope="module")
def client(default_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=default_server.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client):
    def request(**fields):
        return client.chat.completions.create(**{"model": MODEL, "temperature": 0, **fields})

    return request


@pytest.fixture(scope="module")
def complete(client):
    def request(**fields):
        return client.completions.create(**{"model": MODEL, "temperature": 0, **fields})

    return request


def send(server: GatedServer, path: str, **body: Any) -> socket.socket:
    """A request on a connection of its own, which can be watched and cut."""
    url, content = httpx.URL(server.url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection = socket.create_connection((url.host, url.port), timeout=PATIENCE)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def has_come(connection: socket.socket, seconds: float) -> bytes:
    """The part of an answer that can be read within this many seconds."""
    connection.settimeout(seconds)
    try:
        return connection.recv(65536)
    except TimeoutError:
        return b""


def test_trap_01_the_role_does_not_come_before_the_first_token():
    """Otherwise the time to the first piece would say nothing about how long the prompt took."""
    with gated(max_num_batched_tokens=16) as server:
        turns = [{"role": "user", "content": "a" * 40}]
        with send(
            server, "/v1/chat/completions", messages=turns, max_tokens=2, stream=True, ignore_eos=True
        ) as reading:
            server.gate.allow(2)
            wait_until(lambda: len(server.gate.plans) == 3)  # two chunks are computed, the prompt's last one is not
            assert has_come(reading, 0.3) == b""
            server.gate.allow(1)
            first = has_come(reading, PATIENCE)
            while b'"role":"assistant"' not in first:
                first += has_come(reading, PATIENCE)
            server.gate.open()
            assert server.loop.health().generated_tokens >= 1


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_trap_02_the_first_token_of_an_echoed_prompt_has_no_log_probability(complete, stream):
    asked = {"prompt": "The capital of France is", "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    found = joined_text(complete(**asked, stream=True)) if stream else whole_text(complete(**asked))
    for choice in found:
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
        assert all(2 <= len(tops) <= 3 for tops in choice["logprobs"]["top_logprobs"][1:])
        assert len(choice["logprobs"]["tokens"]) == 5 + 3


@pytest.mark.model
def test_trap_03_choices_interleave_by_index_and_each_has_its_own_end(chat):
    asked = {"messages": PARIS, "n": 3, "temperature": 1.3, "seed": 5, "max_tokens": 20}
    chunks = [chunk.choices[0] for chunk in chat(**asked, stream=True)]
    order = [choice.index for choice in chunks]
    assert [order.count(index) > 2 for index in range(3)] == [True] * 3
    assert order != sorted(order)
    for index in range(3):
        mine = [choice for choice in chunks if choice.index == index]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [bool(choice.finish_reason) for choice in mine] == [False] * (len(mine) - 1) + [True]
    assert len({choice["content"] for choice in whole_chat(chat(**asked))}) == 3


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_trap_04_a_stop_in_text_held_back_cuts_tokens_and_log_probabilities_too(complete, stream):
    asked = {"prompt": COUNTING, "max_tokens": 24, "logprobs": 1}
    [free] = whole_text(complete(**asked))
    at, stop = _across_tokens(free["text"].decode(), free["logprobs"]["text_offset"])
    asked |= {"stop": [stop, f"{stop} and more"]}
    [cut] = joined_text(complete(**asked, stream=True)) if stream else whole_text(complete(**asked))
    assert cut["text"] == free["text"][:at]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = [index for index, offset in enumerate(free["logprobs"]["text_offset"]) if offset < at]
    for name, values in cut["logprobs"].items():
        assert values == free["logprobs"][name][: len(kept)], name


def _across_tokens(text, offsets):
    """A string that begins inside one token, ends inside another and does not occur earlier: its place and its text."""
    for first, middle, last in zip(offsets[2:], offsets[3:], offsets[4:], strict=False):
        stop = text[first + 1 : last + 1]
        if middle - first > 1 and last > middle and text.index(stop) == first + 1:
            return first + 1, stop
    raise AssertionError(f"no such string in {text!r}")


def test_trap_05_usage_comes_although_every_choice_has_ended_or_the_answer_fails():
    asked = {"prompt": "hello", "n": 2, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    with gated() as server:
        server.gate.open()
        events = read_events(server.post("/v1/completions", **asked, ignore_eos=True).content)
        *chunks, last, done = [event.data for event in events]
        ends = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks]
        assert [end for end in ends if end] == ["length", "length"]
        assert (json.loads(last)["choices"], json.loads(last)["usage"]["completion_tokens"]) == ([], 6)
        assert done == "[DONE]"
    with gated() as server, send(server, "/v1/completions", **asked | {"max_tokens": 9}, ignore_eos=True) as reading:
        wait_until(lambda: bool(server.gate.plans))
        server.harness.runner.fail_sequence(_when_decoding(server), "the logits are not finite")
        server.gate.open()
        wire = b""
        while piece := has_come(reading, PATIENCE):
            wire += piece
        assert b"data: [DONE]" in wire
        usage, error = (line for line in wire.split(b"\n") if b'"usage":{' in line or b'"error"' in line)
        assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] >= 2
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"


def _when_decoding(server: GatedServer) -> str:
    """Let both choices draw a token or two; returns the id of the second."""
    server.gate.allow(3)
    wait_until(lambda: len(server.gate.plans) == 4)
    return [admit.seq_id for plan in server.gate.plans for admit in plan.admits][1]


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_trap_06_a_named_tools_answer_ends_with_stop_and_a_chosen_ones_with_tool_calls(chat, stream):
    call = r'\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{2,6}", "unit": "[CF]"\}\}'
    ends = {}
    for name, fields in {
        "named": {"tool_choice": NAMED},
        "required": {"tool_choice": "required", "parallel_tool_calls": False},
        "auto": {
            "tool_choice": "auto",
            "extra_body": {"structured_outputs": {"regex": call}},
        },  # as if it had chosen to
        "auto without": {"tool_choice": "auto", "extra_body": {"structured_outputs": {"choice": ["Sunny."]}}},
    }.items():
        asked = {"messages": ASK_WEATHER, "tools": [WEATHER], "max_tokens": 60, **fields}
        [answer] = joined_chat(chat(**asked, stream=True)) if stream else whole_chat(chat(**asked))
        assert [called for called, _ in answer["calls"]] == ["get_weather"] * (name != "auto without")
        ends[name] = answer["finish_reason"]
    assert ends == {"named": "stop", "required": "tool_calls", "auto": "tool_calls", "auto without": "stop"}


@pytest.mark.model
def test_trap_07_embeddings_come_in_base64_as_the_client_asks_when_nobody_tells_it_otherwise(client):
    raw = client.embeddings.with_raw_response.create(model=MODEL, input="The sea")
    assert json.loads(raw.http_request.content)["encoding_format"] == "base64"
    assert isinstance(raw.http_response.json()["data"][0]["embedding"], str)
    assert all(isinstance(value, float) for value in raw.parse().data[0].embedding)


def test_trap_08_a_chat_of_no_tokens_is_refused_and_a_prompt_one_below_the_limit_gets_one():
    with gated(max_model_len=32, num_blocks=8) as server:
        server.gate.open()

        def request(length: int, **fields: Any) -> httpx.Response:
            return server.post("/v1/completions", prompt="a" * length, ignore_eos=True, **fields)

        full = request(31, max_tokens=9).json()
        assert (full["usage"]["completion_tokens"], full["choices"][0]["finish_reason"]) == (1, "length")
        assert request(30, max_tokens=None).json()["usage"]["completion_tokens"] == 2
        over = request(32, max_tokens=1)
        assert (over.status_code, over.json()["error"]["code"]) == (400, "context_length_exceeded")
        none = server.post("/v1/chat/completions", max_tokens=0, messages=[{"role": "user", "content": "hello"}])
        assert (none.status_code, none.json()["error"]["param"]) == (400, "max_tokens")
        scored = server.post("/v1/completions", max_tokens=0, prompt="hello").json()
        assert (scored["choices"][0]["text"], scored["usage"]["completion_tokens"]) == ("", 0)


@pytest.mark.model
async def test_trap_09_a_seed_holds_beside_requests_that_have_none(default_server, chat):
    asked = {"model": MODEL, "messages": PARIS, "temperature": 1.5, "seed": 77, "max_tokens": 16}
    alone = whole_chat(chat(**asked))
    unseeded = {**asked, "seed": None}
    async with openai.AsyncOpenAI(base_url=default_server.url + "/v1", api_key="none", timeout=240) as clients:
        requests = [unseeded] * 4 + [asked] + [unseeded] * 4
        answers = await asyncio.gather(*[clients.chat.completions.create(**each) for each in requests])
    found = [whole_chat(answer) for answer in answers]
    assert found[4] == alone
    assert len({each[0]["content"] for each in found}) > 4  # the others draw afresh


@pytest.mark.model
def test_trap_10_what_contradicts_a_grammar_is_refused_and_a_bias_bends_to_it(complete):
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    for field in ({"min_tokens": 3}, {"ignore_eos": True}, {"allowed_token_ids": [28]}, {"bad_words": ["yes"]}):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(prompt="Yes or no:", max_tokens=8, extra_body=form | field)
        assert caught.value.param == next(iter(field))
    ids = {}
    for word in ("yes", "no"):
        [choice] = complete(
            prompt="Say", max_tokens=8, logprobs=0, extra_body={"structured_outputs": {"choice": [word]}}
        ).choices
        ids[word] = choice.logprobs.tokens[0]
    assert ids["yes"] != ids["no"]
    end = "0"  # the end of sequence, without which no answer ends
    for bias in ({"28": 100}, {end: -100}, {end: 100}, {"28": 100, "29": 100, end: -100}):
        [choice] = complete(prompt="Yes or no:", max_tokens=8, logit_bias=bias, extra_body=form).choices
        assert choice.text in ("yes", "no")
        assert choice.finish_reason == "stop"


def test_trap_11_after_a_preemption_what_was_generated_still_counts_as_output(tmp_path):
    model = load_model(write_checkpoint(tmp_path, "llama", "wide_heads_untied"))
    params = SamplingParams(
        temperature=0.9, seed=3, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=40
    )
    roomy, never = _generate(model, params, num_blocks=200)
    cramped, often = _generate(model, params, num_blocks=16)
    assert (never, often > 0) == (0, True)
    assert cramped == roomy
    unpenalised, _ = _generate(model, SamplingParams(temperature=0.9, seed=3, max_tokens=40), num_blocks=200)
    assert unpenalised != roomy


def _generate(model: Any, params: SamplingParams, num_blocks: int) -> tuple[dict[str, list[int]], int]:
    """Run four prompts together; returns the tokens of each, and the number of preemptions."""
    import torch

    class Still:
        def now(self) -> float:
            return 0.0

    config = SchedulerConfig(num_blocks, 4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    kv = KVStore(model.program.caches, num_blocks, 4, torch.float32, torch.device("cpu"))
    runner, scheduler = TorchRunner(model, kv, 4, 64, Still(), model.backend), Scheduler(config)
    tokens: dict[str, list[int]] = {}
    for index in range(4):
        prompt = tuple(range(3 + index, 11 + index))
        rules = StopRules(max_tokens=params.max_tokens or 0)
        scheduler.submit(SequenceRequest(str(index), prompt, sampling=params.spec(), stop=rules, choice=index))
    while scheduler.has_work:
        plan = scheduler.plan()
        for event in scheduler.commit(plan, runner.run(plan)):
            if isinstance(event, Generated):
                tokens.setdefault(event.seq_id, []).append(event.token)
    return tokens, scheduler.stats.preemptions


@pytest.mark.model
def test_trap_12_a_prompt_that_is_cached_whole_still_computes_its_last_token(default_server, complete):
    prompt = [300 + index for index in range(32)]  # two full blocks
    asked = {"prompt": prompt, "max_tokens": 6, "logprobs": 2}
    before = len(default_server.plans())
    first, again = complete(**asked), complete(**asked)
    assert whole_text(first) == whole_text(again)
    assert again.usage.prompt_tokens_details.cached_tokens == 16
    admits = [admit for plan in default_server.plans()[before:] for admit in plan["admits"]]
    assert [len(admit["tokens"]) for admit in admits] == [32, 32]
    assert [admit["computed"] for admit in admits] == [0, 16]


def test_trap_13_cached_tokens_are_counted_once_whatever_preemptions_find():
    harness = build(num_blocks=20, max_num_batched_tokens=16)
    prompt = "abcdefghijklmnopqrstuvwx"
    harness.submit(prompt, max_tokens=1)
    harness.run()
    harness.submit("zyxwvutsrq", max_tokens=60, seed=1)
    again = harness.submit(prompt, max_tokens=44, seed=2)
    harness.run()
    health, measured = harness.engine.health(), harness.engine.measurements()
    assert health.preemptions > 0
    assert terminal_of(harness.outputs[again]).usage.cached_tokens == 20
    assert measured.cached_tokens == 20
    assert measured.prompt_tokens == 24 + 10 + 24
    assert measured.hit_tokens > 20  # what the recomputation found is reported here only


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_trap_14_a_client_that_leaves_the_queue_is_never_admitted(path, stream):
    with (
        gated(max_num_seqs=1) as server,
        send(server, "/v1/completions", prompt="first", max_tokens=90, ignore_eos=True),
    ):
        wait_until(lambda: bool(server.gate.plans))
        prompt = (
            {"prompt": "later"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "later"}]}
        )
        leaving = send(server, path, **prompt, stream=stream)
        server.step_until(lambda: server.loop.health().waiting == 1, most=20)
        leaving.close()
        wait_until(lambda: len(server.loop.aborted) == 1)
        server.step_until(lambda: server.loop.health().waiting == 0, most=3)
        admitted = [admit.seq_id for plan in server.gate.plans for admit in plan.admits]
        assert len(admitted) == 1
        assert not admitted[0].startswith(server.loop.aborted[0])


@pytest.mark.parametrize("stream", [False, True])
def test_trap_14_a_client_that_leaves_in_its_prompt_has_no_more_of_it_computed(stream):
    with gated(max_num_batched_tokens=16) as server:
        leaving = send(server, "/v1/completions", prompt="a" * 100, stream=stream)
        server.gate.allow(2)
        wait_until(lambda: len(server.gate.plans) == 3)
        leaving.close()
        wait_until(lambda: len(server.loop.aborted) == 1)
        server.gate.allow(1)
        wait_until(lambda: server.loop.health().running == 0)
        assert sum(plan.num_tokens for plan in server.gate.plans) == 48
        assert server.loop.health().free_blocks == server.loop.health().total_blocks
        server.gate.open()
        assert server.post("/v1/completions", prompt="next", max_tokens=1).status_code == 200


@pytest.mark.model
def test_trap_15_text_is_whole_where_the_prompt_ends_and_the_answer_begins(complete, default_server):
    [choice] = complete(prompt="The capital of France is", max_tokens=2).choices
    assert choice.text.startswith(" Paris")  # a completion keeps the space that the model wrote
    emoji = SHRUG + " 👩🏽‍🚀"
    forced = {"prompt": "Say", "max_tokens": 40, "extra_body": {"structured_outputs": {"choice": [emoji]}}}
    pieces = [chunk.choices[0].text for chunk in complete(**forced, stream=True)]
    assert "".join(pieces) == emoji == complete(**forced).choices[0].text
    assert not any("\ufffd" in piece for piece in pieces)
    ids = httpx.post(default_server.url + "/tokenize", json={"prompt": "So " + SHRUG}).json()["tokens"]
    last = {"prompt": ids[:-1], "max_tokens": 1, "extra_body": {"allowed_token_ids": ids[-1:]}}
    assert complete(**last).choices[0].text == SHRUG  # the prompt began the character, the answer completes it
    assert complete(**last, echo=True).choices[0].text == "So " + SHRUG
    assert [chunk.choices[0].text for chunk in complete(**last, stream=True)] == [SHRUG, ""]


def test_trap_15_byte_tokens_and_sentencepieces_spaces_are_whole_there_too():
    size = 256
    vocabulary = GgufVocabulary(
        file="bytes.gguf",
        model="llama",
        pre="",
        tokens=("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(size)), "▁", "▁so", "a"),
        token_types=(2, 3, 3, *[6] * size, 1, 1, 1),
        merges=(),
        scores=tuple(-float(index) for index in range(size + 6)),
        bos=1,
        eos=2,
        unknown=0,
        add_bos=True,
        add_space_prefix=True,
        chat_template="",
    )
    tokenizer = open_text(vocabulary).tokenizer
    so, spelled = 3 + size + 1, [3 + byte for byte in SHRUG.encode()]

    def written(prompt: list[int], tokens: list[int]) -> list[str]:
        choice = Choice(0, StopRules(max_tokens=9), tokenizer, prompt=prompt)
        return [choice.push(token, 0.0).text for token in tokens] + [choice.finish().text]

    assert written([1, so], [so, so]) == [" so", " so", ""]
    for cut in range(5):
        pieces = written([1, so, *spelled[:cut]], [*spelled[cut:], so])
        assert "".join(pieces) == (SHRUG if cut < 4 else "") + " so"
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(written([1, so, *spelled[:2]], [so])) == "\ufffd so"  # it never was a character


@pytest.mark.model
def test_trap_16_a_bias_is_keyed_by_token_ids_as_strings(chat, complete):
    comma = "28"
    assert complete(prompt="Hello", max_tokens=3, logit_bias={comma: 100}).choices[0].text == ",,,"
    assert chat(messages=PARIS, max_tokens=3, logit_bias={comma: 100}).choices[0].message.content == ",,,"
    assert "," not in complete(prompt=COUNTING, max_tokens=6, logit_bias={comma: -100}).choices[0].text
    for wrong in ({"one": 1}, {"-1": 1}, {"1.0": 1}, {"999999": 1}, {comma: 101}, {comma: "1"}):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(prompt="Hello", max_tokens=1, logit_bias=wrong)
        assert caught.value.param.split(".")[0] == "logit_bias"


@pytest.mark.model
@pytest.mark.parametrize("stream", [{}, {"stream": False}])
def test_trap_17_stream_options_without_a_stream_are_refused(chat, complete, stream):
    options = {"stream_options": {"include_usage": True}}
    for request in (
        lambda: chat(messages=PARIS, **stream, **options),
        lambda: complete(prompt="Hi", **stream, **options),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            request()
        assert caught.value.param == "stream_options"


def test_trap_18_a_head_that_cannot_fit_neither_blocks_smaller_ones_for_ever_nor_is_passed_for_ever():
    gates: list[Gate] = []
    harness = build(
        around=lambda runner: gates.append(Gate(runner)) or gates[0],
        num_blocks=16,
        max_num_seqs=8,
        max_bypasses=3,
        max_num_batched_tokens=32,
    )
    gates[0].open()
    harness.submit("abcdefghijkl", max_tokens=30, seed=1)  # goes on for a while, and leaves no room for the head
    harness.step()
    head = harness.submit("z" * 52, max_tokens=8, seed=2)
    for count in range(200):
        if finishes_of(harness.outputs[head]):
            break
        harness.submit("ab", max_tokens=3, seed=3 + count)  # a small one more in every step
        harness.step()
    assert finishes_of(harness.outputs[head]), "the head was passed for ever"
    admitted = [admit.seq_id.split("/")[0] for plan in gates[0].plans for admit in plan.admits]
    assert admitted.index(head) == 1 + 3  # the one that runs, and then as many as may pass the head
    harness.run()
