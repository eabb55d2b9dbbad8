"""Streaming out: the detokenizer's pieces join to the whole decode, and stop strings do not depend on the pieces."""

from __future__ import annotations

import random

import pytest
import text_vocabularies as vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import InvalidParameter
from penstock.contract.model import HuggingFaceText
from penstock.text import Detokenizer, StopStrings, Tokenizer, open_text


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, HuggingFaceText]:
    return {name: vocabularies.save(name, tmp_path_factory.mktemp(name)) for name in vocabularies.NAMES}


@pytest.fixture(scope="module")
def tokenizers(saved) -> dict[str, Tokenizer]:
    return {name: open_text(files).tokenizer for name, files in saved.items()}


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


# --- detokenizer


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_no_piece_ever_holds_half_a_character_of_a_sound_text(name, tokenizers):
    for text in vocabularies.CORPUS:
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces(tokenizers[name], tokenizers[name].encode(text)))


@pytest.mark.parametrize("name", list(vocabularies.FAMILIES))
def test_joined_pieces_equal_transformers_on_random_ids(name, saved, tokenizers):
    reference = vocabularies.reference(saved[name])
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(tokenizers[name].vocab_size) for _ in range(rng.randrange(16))]
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces(tokenizers[name], ids, skip=skip)) == expected


@pytest.mark.parametrize("name", vocabularies.SENTENCEPIECE)
def test_sentencepiece_pieces_equal_transformers_as_a_continuation(name, saved, tokenizers):
    """As a continuation no dummy space is dropped: what follows `prompt` when both are decoded together."""
    reference = vocabularies.reference(saved[name])
    rng = random.Random(4)
    prompt = reference("Hello")["input_ids"]
    begin = len(reference.decode(prompt, skip_special_tokens=True))
    for _ in range(200):
        ids = [rng.randrange(259, tokenizers[name].vocab_size) for _ in range(rng.randrange(16))]
        expected = reference.decode(prompt + ids, skip_special_tokens=True)[begin:]
        assert "".join(pieces(tokenizers[name], ids)) == expected


@pytest.mark.parametrize("name", vocabularies.NAMES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_joined_pieces_are_the_utf8_decoding_of_the_token_bytes(name, data, tokenizers):
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    shown = [i for i in ids if not tokenizer.is_special(i)]
    whole = b"".join(map(tokenizer.token_bytes, shown)).decode(errors="replace")
    assert "".join(pieces(tokenizer, ids)) == whole
    assert tokenizer.decode(ids) in (whole, whole.removeprefix(" "))


def test_an_emoji_of_four_tokens_appears_whole_with_its_last(tokenizers):
    ids = [3 + byte for byte in "😀".encode()]
    assert pieces(tokenizers["llama"], ids) == ["", "", "", "😀", ""]


def test_an_incomplete_character_is_replaced_as_soon_as_it_cannot_be_completed(tokenizers):
    first, second, letter = 3 + 0xE2, 3 + 0x82, 3 + ord("A")
    assert pieces(tokenizers["llama"], [first, second, letter]) == ["", "", "\ufffdA", ""]
    assert pieces(tokenizers["llama"], [first, second]) == ["", "", "\ufffd"]


def test_special_tokens_are_never_shown_unless_asked_for(tokenizers):
    ids = tokenizers["smollm"].encode("<|im_start|>x<|im_end|>")
    assert "".join(pieces(tokenizers["smollm"], ids)) == "x"
    assert "".join(pieces(tokenizers["smollm"], ids, skip=False)) == "<|im_start|>x<|im_end|>"


def test_a_flushed_detokenizer_has_nothing_more(tokenizers):
    detokenizer = Detokenizer(tokenizers["llama"])
    assert detokenizer.push(3 + 0xE2) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


# --- stop strings


def reference_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Stop at the first place where any stop string ends; there, take the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, 0, end)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops: list[str], chunks: list[str], include: bool) -> tuple[str, str | None]:
    scanner = StopStrings(stops, include=include)
    emitted, matched = "", None
    for chunk in chunks:
        scan = scanner.push(chunk)
        emitted += scan.emit
        matched = scan.matched
    return emitted + scanner.flush(), matched


# few letters, so that overlaps and repeated prefixes are common
LETTERS = st.text(alphabet="ab\n", max_size=12)


@given(
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
    chunks=st.lists(LETTERS, max_size=8),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_for_any_chunking_the_emitted_text_is_the_reference_on_the_whole(stops, chunks, include):
    assert run(stops, chunks, include) == reference_cut("".join(chunks), stops, include)


@given(stops=st.lists(st.text(min_size=1, max_size=3), max_size=3), chunks=st.lists(st.text(max_size=9), max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_unicode_text_is_cut_alike(stops, chunks):
    assert run(stops, chunks, False) == reference_cut("".join(chunks), stops, False)


@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4), text=st.text(alphabet="abc"))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_may_still_become_a_stop_string(stops, text):
    scanner = StopStrings(stops)
    seen = emitted = ""
    for character in text:
        scan = scanner.push(character)
        seen, emitted = seen + character, emitted + scan.emit
        if scan.matched is not None:
            return
        lengths = [n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert len(seen) - len(emitted) == max(lengths, default=0)


def test_the_match_that_ends_first_wins_and_of_these_the_longest():
    assert run(["abcd", "bc"], ["abcd"], False) == ("a", "bc")
    assert run(["d", "bcd"], ["abcde"], False) == ("a", "bcd")
    assert run(["User:", "\nUser:"], ["hi\nUs", "er: x"], False) == ("hi", "\nUser:")


def test_the_match_is_kept_when_asked_and_all_after_it_dropped():
    assert run(["END"], ["a EN", "D b"], True) == ("a END", "END")
    assert run(["END"], ["a EN", "D b"], False) == ("a ", "END")


def test_after_a_match_nothing_more_comes_out():
    scanner = StopStrings(["x"])
    assert scanner.push("axb").emit == "a"
    assert scanner.push("more").emit == ""
    assert scanner.push("more").matched == "x"
    assert scanner.flush() == ""


def test_without_stop_strings_everything_passes_at_once():
    assert StopStrings([]).push("anything").emit == "anything"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidParameter, match="empty"):
        StopStrings(["a", ""])


def test_the_search_falls_back_at_most_once_a_character():
    """The automaton's amortised bound: a search that began again at each place would take 255 times as many."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, state):
            Counted.reads += 1
            return super().__getitem__(state)

    scanner = StopStrings(["a" * 255 + "b"])
    scanner._fallback = Counted(scanner._fallback)
    emitted = "".join(scanner.push("aaaaaaaaac" * 50 + "a" * 500).emit for _ in range(10))
    assert Counted.reads <= 10_000
    assert len(emitted) == 10_000 - 255
