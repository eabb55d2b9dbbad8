"""The compiling process and its limits; caches; what is refused, and how the refusal names it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from grammar_harness import END, VOCABULARY, JudgedHere, allowed, library, schema, written

from penstock import thread_turns
from penstock.contract.errors import InvalidParameter, Overloaded, Unavailable
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar import GrammarLibrary, Vocabulary
from penstock.grammar.library import MOST_WAITING
from penstock.thread_turns import going_first


@pytest.fixture(scope="module")
def lib():
    return library()


@pytest.fixture
def real():
    one = GrammarLibrary(lambda: VOCABULARY)
    yield one
    one.close()


def test_what_is_known_of_grammars_is_bounded_in_bytes_too():
    lib = library()
    lib.keep_within(40_000)
    for bound in range(6):
        lib.matcher(schema(json.dumps({"type": "integer", "minimum": bound, "title": "t" * 3000})), 100)
        assert lib.bytes <= 40_000
    assert 0 < len(lib._verdicts) < 4
    lib.keep_within(0)
    assert lib.bytes == 0
    lib.close()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"anyOf": [{"type": "string", "format": "no-such"}]}, "no-such"),
        ({"type": "string", "mimLength": 3}, "mimLength"),
        ({"$ref": "https://example.com/s"}, "must point inside"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"enum": list(range(1001))}, "1000"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)
def test_what_a_schema_cannot_have_is_refused_by_name(lib, source, named):
    with pytest.raises(InvalidParameter, match=named) as refused:
        lib.check(schema(json.dumps(source)), 1000)
    assert refused.value.param == "structured_outputs"


def test_a_schema_nested_too_deep_is_refused(lib):
    deep: dict = {"type": "null"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidParameter, match="32 levels"):
        lib.check(schema(json.dumps(deep)), 1000)


def test_a_grammar_bomb_ends_its_process_and_nothing_else(real):
    bomb = Grammar(GrammarKind.REGEX, "(a|b|ab)*c(a|b){900}" * 40)
    with pytest.raises(InvalidParameter) as first:
        real.check(bomb, 10_000)
    assert first.value.param == "structured_outputs"
    with pytest.raises(InvalidParameter) as second:  # remembered: no second process
        real.check(bomb, 10_000)
    assert str(first.value) == str(second.value)
    real.check(schema('{"type":"object"}'), 10)


def test_a_document_that_is_not_found_at_once_is_searched_exactly(real):
    grammar = schema('{"type":"string","pattern":"^[a-z]*$","minLength":1100}')
    with pytest.raises(InvalidParameter, match="shortest document found takes") as refused:
        real.check(grammar, 100)
    need = int(refused.value.message.split("takes ")[1].split()[0])
    text, tokens = written(real, grammar, need, seed=1)
    assert tokens == need
    assert len(text) >= 1102


def test_a_killed_process_is_replaced(real):
    real.check(schema('{"type":"object"}'), 10)
    [before] = real._worker.pids
    os.kill(before, signal.SIGKILL)
    real.check(schema('{"type":"array"}'), 10)
    assert before not in real._worker.pids


def test_the_cache_of_compiled_grammars_is_bounded_in_bytes():
    lib = library()
    lib._cache_bytes = 200_000
    for bound in range(20):
        lib.matcher(schema(json.dumps({"type": "integer", "minimum": bound})), 100)
        assert lib.cached_bytes <= 200_000
    assert lib.cached_bytes == sum(kept.size for kept in lib._compiled.values())
    assert len(lib._compiled) < 4  # of 20, at 64 KiB or more each


@pytest.mark.parametrize(
    ("kind", "source", "answers"),
    [
        (GrammarKind.CHOICE, '["yes","no","ma\\"ybe"]', {b"yes", b"no", b'ma"ybe'}),
        (GrammarKind.REGEX, "(ab|c){2}", {b"abab", b"abc", b"cab", b"cc"}),
        (GrammarKind.GRAMMAR, 'start: "a" | "(" start ")"', {b"a", b"(a)", b"((a))", b"(((a)))"}),
        (GrammarKind.GRAMMAR, 'root ::= "a" | "b" root', {b"a", b"ba", b"bba", b"bbba", b"bbbba", b"bbbbba"}),
    ],
)
def test_every_kind_gives_answers_of_its_language_and_more_than_one(lib, kind, source, answers):
    given = {written(lib, Grammar(kind, source), 8, seed)[0] for seed in range(60)}
    assert given <= answers
    assert len(given) > 1


def test_the_end_token_is_allowed_exactly_where_the_answer_may_end(lib):
    matcher = lib.matcher(Grammar(GrammarKind.REGEX, "ab?"), 10)
    assert END not in allowed(matcher.mask())
    assert not matcher.take(END)
    assert matcher.take(ord("a"))
    assert END in allowed(matcher.mask())
    assert matcher.take(ord("b"))
    assert allowed(matcher.mask()) == [END]


@pytest.mark.parametrize(("name", "refused"), [("a", True), ("a\x01", False)])
def test_a_name_cannot_be_written_in_code_points_to_be_another(lib, name, refused):
    source = {"type": "object", "properties": {name: {"type": "integer"}}}
    matcher = lib.matcher(schema(json.dumps(source)), 100)
    for byte in b'{"\\':
        assert matcher.take(byte)
    assert matcher.take(ord("u")) != refused


def test_whitespace_is_bounded(lib):
    matcher = lib.matcher(schema('{"type":"object"}'), 100)
    for byte in b"{ ":
        assert matcher.take(byte)
    assert not set(allowed(matcher.mask())) & {ord(space) for space in " \n\t\r"}


def test_a_matcher_that_is_rebuilt_stands_where_the_old_one_stood(lib):
    grammar = schema('{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"}},"required":["b"]}')
    first, taken = lib.matcher(grammar, 20), []
    while END not in taken:
        again = lib.matcher(grammar, 20)
        assert all(again.take(token) for token in taken)
        assert again.mask() == first.mask()
        assert again.closing() == first.closing()
        choices = allowed(first.mask())
        token = next((one for one in choices[len(taken) :] if again.take(one)), first.closing())
        assert first.take(token)
        taken.append(token)


@pytest.mark.parametrize(
    "grammar",
    [
        schema('{"type":"object","properties":{"a":{"type":"string","minLength":3}},"required":["a"]}'),
        schema('{"type":"array","items":{"enum":["one","two"]},"minItems":70}'),  # an ending that takes long to check
        Grammar(GrammarKind.REGEX, r"([A-Z][a-z]+( [a-z]+)*\. ?){3,30}"),
    ],
)
def test_what_is_taken_at_once_leads_where_it_would_have_led_otherwise(lib, grammar):
    rng, told = random.Random(3), []
    for _ in range(6):
        quick, thorough, token = lib.matcher(grammar, 600), lib.matcher(grammar, 600), -1
        while token != END and len(told) < 2000:
            token = rng.choice([rng.choice(allowed(quick.mask())), quick.closing()])
            before = quick.mask(), quick.closing()
            told.append(quick.take_at_once(token))
            if told[-1] is None:
                assert (quick.mask(), quick.closing()) == before
            taken = quick.take(token) if told[-1] is None else told[-1]
            assert taken == thorough.take(token)
            assert (quick.mask(), quick.closing()) == (thorough.mask(), thorough.closing())
            token = token if taken else -1
    assert {True, None} <= set(told)


def test_a_search_for_an_ending_gives_way_to_a_step(lib, monkeypatch):
    monkeypatch.setattr(thread_turns, "_MOST_SECONDS", 30.0)
    rng, matcher = random.Random(3), lib.matcher(Grammar(GrammarKind.REGEX, r"([A-Z][a-z]+( [a-z]+)*\. ?){3,30}"), 600)
    token = rng.choice(allowed(matcher.mask()))
    while matcher.take_at_once(token) is not None:
        token = rng.choice(allowed(matcher.mask()))
    with ThreadPoolExecutor(1) as threads:
        with going_first():
            taken = threads.submit(matcher.take, token)
            time.sleep(0.1)
            assert not taken.done()
        assert taken.result(30.0)


@pytest.mark.parametrize("source", ['{"$ref": "#/$defs/nope"}', '{"type": "string", "pattern": "("}'])
def test_what_cannot_be_compiled_is_told_without_the_librarys_own_language(lib, source):
    with pytest.raises(InvalidParameter) as refused:
        lib.check(schema(source), 100)
    for internal in ("%llguidance", "x-guidance", "start:", "no_forcing"):
        assert internal not in str(refused.value)


class Waiting(JudgedHere):
    """A compiling process that judges costly grammars only when it is told to."""

    def __init__(self, speller):
        super().__init__(speller)
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)

    def judge(self, grammar, tight=False):
        if grammar.source.startswith("costly"):
            self.begun.release()
            assert self.go_on.wait(60)
        return super().judge(grammar, tight)


@pytest.fixture
def waiting():
    lib = library()
    lib._worker = Waiting(lib._ready())
    yield lib
    lib._worker.go_on.set()


def costly(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"costly{number}")


def test_nobody_waits_for_a_costly_grammar_who_asks_for_what_is_known(waiting):
    known = schema('{"type": "boolean"}')
    waiting.check(known, 50)
    with ThreadPoolExecutor() as threads:
        judged = threads.submit(waiting.check, costly(0), 50)
        assert waiting._worker.begun.acquire(timeout=60)
        waiting.check(known, 50)
        assert allowed(waiting.matcher(known, 50).mask())
        assert not judged.done()
        waiting._worker.go_on.set()
        judged.result(60)


def test_only_so_many_grammars_wait(waiting):
    with ThreadPoolExecutor(MOST_WAITING + 1) as threads:
        judged = [threads.submit(waiting.check, costly(number), 50) for number in range(MOST_WAITING + 1)]
        while waiting._turns.waiting < MOST_WAITING:
            time.sleep(0.01)
        with pytest.raises(Overloaded) as refused:
            waiting.check(costly(99), 50)
        assert refused.value.retry_after > 0
        waiting._worker.go_on.set()
        for each in judged:
            each.result(60)
    waiting.check(costly(99), 50)


def test_what_is_judged_while_another_asks_for_it_is_judged_once(waiting):
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(waiting.check, costly(0), 50) for _ in range(2)]
        while not waiting._turns.waiting:
            time.sleep(0.01)
        waiting._worker.go_on.set()
        for each in both:
            each.result(60)
    assert waiting._worker.begun.acquire(blocking=False)
    assert not waiting._worker.begun.acquire(blocking=False)


@pytest.mark.parametrize("room", [4, 50])
def test_whoever_computes_an_answer_does_not_judge_its_grammar_again(lib, room):
    """It may be another process, and judging would hold up all streams."""
    grammar = schema('{"type":"array","items":{"type":"integer"},"minItems":1}')
    judged = lib.check(grammar, room)
    elsewhere = library()
    elsewhere._worker = Lost()
    here, there = lib.matcher(grammar, room), elsewhere.matcher(judged, room)
    for _ in range(room - 1):
        assert there.mask() == here.mask()
        assert there.closing() == here.closing()
        token = here.closing()
        assert here.take(token)
        assert there.take(token)
        if token == END:
            return
    with pytest.raises(Unavailable):
        elsewhere.matcher(schema("[1]"), room)


def test_whoever_only_checks_compiles_nothing(lib, monkeypatch):
    checking = GrammarLibrary(lambda: VOCABULARY, compiles=False)
    checking._worker = lib._worker
    monkeypatch.setattr(checking, "_ready", None)  # it takes long to build, and holds up every thread
    judged = checking.check(schema('{"type":"null"}'), 10)
    assert judged.size > 0
    assert checking.cached_bytes == 0


def test_what_the_first_matcher_needs_can_be_made_before():
    early, impossible = GrammarLibrary(lambda: VOCABULARY), GrammarLibrary(lambda: Vocabulary((b"a",), (), ()))
    early.prepare()
    early._vocabulary = None
    assert early.matcher(checked(), 10).mask()
    impossible.prepare()


def checked() -> Grammar:
    """A grammar as `check` returns it."""
    return Grammar(GrammarKind.REGEX, "a", ending=(VOCABULARY.tokens.index(b"a"),), size=1)


def test_a_vocabulary_that_cannot_spell_is_refused_and_no_fault_of_the_grammar():
    impossible = GrammarLibrary(lambda: Vocabulary((b"a",), (), ()), compiles=False)
    with pytest.raises(InvalidParameter, match="lacks single characters") as refused:
        impossible.check(schema("true"), 10)
    assert refused.value.code == "unsupported_model"
    impossible.close()


class Lost:
    """A compiling process that cannot be had."""

    def judge(self, *_):
        raise Unavailable("lost")


def test_a_lost_process_is_remembered_of_no_grammar(lib, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lib._worker, "judge", lost)
        with pytest.raises(Unavailable):
            lib.check(schema("true"), 50)
    lib.check(schema("true"), 50)


def lost(*_):
    raise Unavailable("lost")


MANY = {"properties": {f"name{number}": {"type": "string"} for number in range(1000)}, "additionalProperties": False}


@pytest.mark.parametrize(
    "grammar",
    [
        schema(json.dumps({"type": "object", **MANY})),
        Grammar(GrammarKind.REGEX, "((a{0,100}){0,100}){0,100}"),
        Grammar(GrammarKind.GRAMMAR, "root ::= " + " ".join(['"a"?'] * 2000)),
    ],
    ids=["properties", "regex", "gbnf"],
)
def test_a_grammar_that_could_not_be_followed_is_refused_or_followed(real, grammar):
    """These grammars gave answers that failed in the middle, for a reason that was not the grammar's."""
    refusal = refused(real, grammar)
    if refusal is not None:
        assert refusal.code == "grammar_too_complex"
        return
    for seed in range(5):
        written(real, grammar, 4000, seed)


def refused(lib, grammar: Grammar) -> InvalidParameter | None:
    try:
        lib.check(grammar, 4000)
    except InvalidParameter as refusal:
        return refusal
    return None
