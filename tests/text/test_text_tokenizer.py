"""The tokenizer gives the ids that transformers gives, from `tokenizer.json` and from GGUF metadata alike."""

from __future__ import annotations

import json
import random
import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import text_vocabularies as vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from penstock.contract.errors import InvalidParameter, ModelFileError
from penstock.contract.model import GgufVocabulary, HuggingFaceText
from penstock.text import TextModel, open_text
from penstock.text.gguf_tokenizer import read_gguf
from penstock.text.huggingface import read_huggingface
from penstock.text.tokenizer import twin_of

GGUF_NAMES = (*vocabularies.FAMILIES, "llama", "gemma4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, HuggingFaceText]:
    return {name: vocabularies.save(name, tmp_path_factory.mktemp(name)) for name in vocabularies.NAMES}


@pytest.fixture(scope="module")
def models(saved) -> dict[str, TextModel]:
    ours = {name: open_text(files) for name, files in saved.items()}
    gguf = {f"{name}.gguf": open_text(vocabularies.to_gguf(name, saved[name])) for name in GGUF_NAMES}
    return ours | gguf


@pytest.fixture(scope="module")
def references(saved):
    return {name: vocabularies.reference(files) for name, files in saved.items()}


def prompts(name: str) -> list[str]:
    specials = vocabularies.SPECIALS[name]
    joined = "".join(specials)
    spaced = " a ".join(specials) + "\n" + "\n ".join(specials)
    return [
        *vocabularies.CORPUS,
        "\n".join(vocabularies.CORPUS),
        joined,
        spaced,
        f"x{joined}y",
        "<think> a</think>    b",
    ]


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_ids_from_tokenizer_json_equal_transformers(name, models, references):
    for text in prompts(name):
        assert list(models[name].tokenizer.encode(text)) == references[name](text)["input_ids"], text


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_ids_from_gguf_equal_transformers(name, models, references):
    for text in prompts(name):
        assert list(models[f"{name}.gguf"].tokenizer.encode(text)) == references[name](text)["input_ids"], text


@pytest.mark.parametrize("name", GGUF_NAMES)
@given(text=st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_unicode_text_has_the_same_ids_from_both_formats_and_transformers(name, text, models, references):
    expected = references[name](text)["input_ids"]
    assert list(models[name].tokenizer.encode(text)) == expected
    assert list(models[f"{name}.gguf"].tokenizer.encode(text)) == expected


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_decoding_gives_the_text_back(name, models):
    for text in vocabularies.CORPUS:
        # SentencePiece has one sign for a space and for U+2581, so it cannot give the latter back
        expected = text.replace("\u2581", " ") if name in vocabularies.SENTENCEPIECE else text
        if name == "llama-metaspace":  # a text that begins with a space gets no second one, and loses it: as published
            expected = expected.removeprefix(" ")
        if name == "qwen2":
            expected = unicodedata.normalize("NFC", expected)
        assert models[name].tokenizer.decode(models[name].tokenizer.encode(text)) == expected


@pytest.mark.parametrize("name", [n for n in vocabularies.NAMES if n not in vocabularies.SENTENCEPIECE])
def test_decoding_random_ids_equals_transformers(name, models, references):
    rng = random.Random(1)
    tokenizer = models[name].tokenizer
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            expected = references[name].decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("name", vocabularies.SENTENCEPIECE)
def test_decoding_random_sentencepiece_ids_without_byte_tokens_equals_transformers(name, models, references):
    rng = random.Random(2)
    tokenizer = models[name].tokenizer
    for _ in range(200):
        ids = [rng.randrange(259, tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        assert tokenizer.decode(ids) == references[name].decode(ids, skip_special_tokens=True)


def test_byte_tokens_join_into_characters_and_broken_ones_become_one_replacement(models):
    tokenizer = models["llama"].tokenizer
    ids = [3 + byte for byte in "€".encode()]
    assert tokenizer.decode(ids) == "€"
    # transformers writes one U+FFFD a byte here, and spoils the valid `A` too; Unicode 3.9 asks for one in all
    assert tokenizer.decode([*ids[:2], 3 + ord("A")]) == "\ufffdA"


def test_token_bytes_are_exact(models):
    llama, smollm = models["llama"].tokenizer, models["smollm"].tokenizer
    assert llama.token_bytes(3 + 0xE2) == b"\xe2"
    assert llama.token_bytes(llama.encode(" ")[1])[:1] == b" "
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert sorted(smollm.token_bytes(i) for i in range(3, 3 + 256)) == [bytes([b]) for b in range(256)]
    assert smollm.token_bytes(10**6) == b""
    assert smollm.token_bytes(-1) == b""


def test_token_bytes_of_a_text_join_to_that_text(models):
    for name in ("gpt2", "smollm", "llama3", "tekken", "smollm.gguf", "llama3.gguf"):
        tokenizer = models[name].tokenizer
        for text in vocabularies.CORPUS:
            ids = [i for i in tokenizer.encode(text) if not tokenizer.is_special(i)]
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_a_multibyte_added_token_keeps_its_own_spelling(saved, tmp_path):
    content = json.loads((Path(saved["smollm"].directory) / "tokenizer.json").read_text())
    id_ = len(content["model"]["vocab"])
    token = {"id": id_, "content": "éé", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(token | {"normalized": False, "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = open_text(HuggingFaceText(str(tmp_path))).tokenizer
    assert tokenizer.encode("éé") == (id_,)
    assert tokenizer.decode([id_]) == "éé"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_refused_by_name(text, models):
    for model in models.values():
        with pytest.raises(InvalidParameter, match="surrogate") as caught:
            model.tokenizer.encode(text, param="prompt")
        assert caught.value.param == "prompt"


def test_threads_encode_alike(models):
    model = models["llama3"]
    chats = [vocabularies.user(text, f"<|eot_id|>{text}") for text in vocabularies.CORPUS]

    def encode_all(_: int) -> list[object]:
        raw = [model.tokenizer.encode(text) for text in vocabularies.CORPUS]
        return [raw, [model.encode_messages(chat) for chat in chats]]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(encode_all, range(16)))
    assert all(result == results[0] for result in results)
    assert results[0] == encode_all(0)


@pytest.mark.parametrize("name", [*vocabularies.NAMES, *(f"{name}.gguf" for name in GGUF_NAMES)])
def test_a_twin_is_the_same_pipeline_over_the_same_vocabulary(name, saved):
    plain = name.removesuffix(".gguf")
    if name == plain:
        backend = read_huggingface(saved[plain]).backend
    else:
        backend = read_gguf(vocabularies.to_gguf(plain, saved[plain])).backend
    before, twin = backend.to_str(), twin_of(backend)
    assert twin.to_str() == before
    twin.add_tokens(["\ufdd0"])
    twin.encode_special_tokens = True
    assert (backend.to_str(), backend.encode_special_tokens) == (before, False)


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(saved, tmp_path):
    tokenizer = vocabularies.train("smollm")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = vocabularies.CORPUS[1]
    files = HuggingFaceText(str(tmp_path))
    assert open_text(files).tokenizer.encode(text) == open_text(saved["smollm"]).tokenizer.encode(text)


@pytest.mark.parametrize("most", [2, 3, 4, 7, 1000])
@pytest.mark.parametrize("text", [vocabularies.CORPUS[1], "a<|im_end|>" * 5, "b <|im_start|>", ""])
def test_a_text_is_cut_as_transformers_cuts_it_between_the_tokens_around_it(text, most, tmp_path):
    tokenizer = vocabularies.train("smollm")
    around = [(each, tokenizer.token_to_id(each)) for each in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{around[0][0]} $A {around[1][0]}", pair=None, special_tokens=around
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = HuggingFaceText(str(tmp_path))
    theirs = vocabularies.reference(files)(text, truncation=True, max_length=most)["input_ids"]
    ours = open_text(files).tokenizer
    assert list(ours.encode(text, most=most)) == theirs
    with pytest.raises(InvalidParameter, match="must be at least 2") as caught:
        ours.encode(text, most=1)  # which transformers does not cut at all
    assert caught.value.param == "truncate_prompt_tokens"


# --- end of sequence and beginning


def test_eos_is_the_union_of_the_three_files(saved, tmp_path):
    for file in Path(saved["llama3"].directory).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    model = open_text(HuggingFaceText(str(tmp_path)))
    assert model.eos_token_ids == {7, 8, model.tokenizer.encode("<|eot_id|>")[1]}
    assert model.bos_token_id == model.tokenizer.encode("")[0]


def test_an_eos_token_may_be_an_object(saved, tmp_path):
    for file in Path(saved["smollm"].directory).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert open_text(HuggingFaceText(str(tmp_path))).eos_token_ids == {2}


def test_gguf_eos_adds_control_tokens_that_end_turns_or_texts_by_name(saved):
    vocabulary = vocabularies.to_gguf("llama3", saved["llama3"])
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    assert open_text(vocabulary).eos_token_ids == {ids["<|eot_id|>"], ids["<|end_of_text|>"]}
    ordinary = list(vocabulary.token_types)
    ordinary[ids["<|end_of_text|>"]] = 4
    assert open_text(replace(vocabulary, token_types=tuple(ordinary))).eos_token_ids == {ids["<|eot_id|>"]}


@pytest.mark.parametrize("options", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("name", ["llama3", "smollm", "llama"])
def test_tokenizer_json_alone_decides_whether_bos_is_added_as_in_transformers(name, options, saved, tmp_path):
    for file in Path(saved[name].directory).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | options
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = HuggingFaceText(str(tmp_path))
    ours, reference = open_text(files), vocabularies.reference(files)
    assert list(ours.tokenizer.encode("Hello")) == reference("Hello")["input_ids"]
    assert ours.encode_messages(vocabularies.user("x")) == open_text(saved[name]).encode_messages(
        vocabularies.user("x")
    )


def test_a_bos_token_may_hold_a_colon():
    vocabulary = replace(_tiny(), tokens=("a", "b", "ab", "<b:1>"), bos=3, add_bos=True)
    assert open_text(vocabulary).tokenizer.encode("ab") == (3, 2)


def test_a_model_without_bos_has_none(models):
    assert models["gpt2"].bos_token_id is None
    assert models["gpt2.gguf"].bos_token_id is None
    assert models["llama.gguf"].bos_token_id == 1


def test_gguf_without_space_prefix_or_bos_adds_neither(saved):
    vocabulary = replace(vocabularies.to_gguf("llama", saved["llama"]), add_bos=False, add_space_prefix=False)
    tokenizer = open_text(vocabulary).tokenizer
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("Hello"))) == b"Hello"
    assert tokenizer.decode(tokenizer.encode(" x")) == " x"


# --- files that cannot be used


def test_a_missing_tokenizer_json_says_what_to_do(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is missing.*save_pretrained"):
        open_text(HuggingFaceText(str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "No"}}'])
def test_a_corrupt_tokenizer_json_is_one_line(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: ") as caught:
        open_text(HuggingFaceText(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [("model", "continuing_subword_prefix", "long prefix"), ("post_processor", "special_tokens", {})],
)
def test_damage_that_makes_the_library_panic_is_refused_at_load(key, field, value, saved, tmp_path):
    content = json.loads((Path(saved["llama"].directory) / "tokenizer.json").read_text())
    content[key][field] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match="not a readable tokenizer"):
        open_text(HuggingFaceText(str(tmp_path)))


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused(saved, tmp_path):
    content = json.loads((Path(saved["gpt2"].directory) / "tokenizer.json").read_text())
    for decoder in (None, {"type": "BPEDecoder", "suffix": "</w>"}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"decoder": decoder}))
        with pytest.raises(ModelFileError, match="decoder"):
            open_text(HuggingFaceText(str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tokenizer_config.json", "{", "readable JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token: must be a string"),
        ("tokenizer_config.json", '{"eos_token": "<nowhere>"}', "eos_token: '<nowhere>' is not in the vocabulary"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: must be a string"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}', "only: rag"),
        ("config.json", '{"eos_token_id": "2"}', "eos_token_id: must be a token id"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', "eos_token_id: must be a token id"),
        ("chat_template.jinja", "a\n{% if %}", "chat template, line 2"),
    ],
)
def test_a_broken_side_file_is_named_with_its_key(file, content, complaint, saved, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((Path(saved["gpt2"].directory) / "tokenizer.json").read_bytes())
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelFileError, match=complaint) as caught:
        open_text(HuggingFaceText(str(tmp_path)))
    assert caught.value.file.endswith(file)


def _tiny() -> GgufVocabulary:
    return GgufVocabulary(
        file="tiny.gguf", model="gpt2", pre="gpt-2", tokens=("a", "b", "ab", "<e>"), token_types=(1, 1, 1, 3),
        merges=("a b",), scores=(), bos=-1, eos=3, unknown=-1, add_bos=False, add_space_prefix=False, chat_template="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model: 't5' is not implemented"),
        ({"model": "bert", "unknown": -1}, r"tokenizer\.ggml\.unknown_token_id: is missing"),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre: unknown pre-tokenizer 'default'; known are .*llama-bpe.*smollm"),
        ({"pre": ""}, r"tokenizer\.ggml\.pre: unknown pre-tokenizer ''"),
        ({"token_types": (1, 1)}, r"tokenizer\.ggml\.token_type: has 2 entries for 4 tokens"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores: has 0 entries for 4 tokens"),
        ({"merges": ("a c",)}, r"tokenizer\.ggml\.merges: merge 0, 'a c'"),
        ({"model": "gemma4", "merges": ()}, r"tokenizer\.ggml\.merges: is missing"),
        ({"model": "gemma4", "merges": ("a c",)}, r"tokenizer\.ggml\.merges: merge 0, 'a c'"),
        ({"merges": ("ab",)}, r"tokenizer\.ggml\.merges: merge 0, 'ab'"),
        ({"tokens": ("a", "b", "ab", ""), "merges": (" a",)}, r"tokenizer\.ggml\.merges: merge 0, ' a'"),
        ({"tokens": ("a", "b", "ab", "a")}, r"tokenizer\.ggml\.tokens: tokens 0 and 3 are both 'a'"),
        ({"eos": 4}, r"tokenizer\.ggml\.eos_token_id: 4 is no token id"),
        ({"bos": -2}, r"tokenizer\.ggml\.bos_token_id: -2 is no token id"),
        ({"add_bos": True}, r"tokenizer\.ggml\.add_bos_token: is true"),
        ({"chat_template": "{{"}, r"tokenizer\.chat_template: chat template, line 1"),
    ],
)
def test_bad_gguf_metadata_is_refused_by_key(change, complaint):
    assert open_text(_tiny()).tokenizer.encode("ab<e>") == (2, 3)
    with pytest.raises(ModelFileError, match=complaint):
        open_text(replace(_tiny(), **change))


def test_duplicate_tokens_are_refused_in_sentencepiece_too():
    vocabulary = replace(_tiny(), model="llama", scores=(0.0,) * 4, merges=(), tokens=("a", "b", "b", "<e>"))
    with pytest.raises(ModelFileError, match="are both"):
        open_text(vocabulary)


def test_a_vocabulary_prints_as_a_line():
    big = replace(_tiny(), tokens=("word",) * 50_000, merges=("w o",) * 50_000, chat_template="x" * 50_000)

    assert len(repr(big)) < 300
    assert _tiny().file in repr(big)


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", (2,)), ("tekken", (2,)), ("gpt-2", (0, 1)), ("qwen2", (0, 1))])
def test_only_some_families_take_a_whole_word_that_no_merge_reaches(pre, ids):
    assert open_text(replace(_tiny(), pre=pre, merges=())).tokenizer.encode("ab") == ids


def test_no_damage_to_tokenizer_json_does_more_than_refuse_the_file(saved, tmp_path):
    """Random edits still load or end in a `ModelFileError`: nothing else escapes, the library's panics included."""
    content = (Path(saved["smollm"].directory) / "tokenizer.json").read_text()
    rng = random.Random(5)
    refused = 0
    for _ in range(150):
        at = rng.randrange(len(content))
        damaged = content[:at] + rng.choice(['"', "}", "9", "", "null", "\\"]) + content[at + rng.randrange(1, 40) :]
        (tmp_path / "tokenizer.json").write_text(damaged)
        try:
            open_text(HuggingFaceText(str(tmp_path)))
        except ModelFileError:
            refused += 1
    assert refused > 100


# --- the default model


@pytest.mark.model
def test_the_default_model_keeps_the_published_facts(default_model):
    from penstock.models import gguf_dialect
    from penstock.weights.files import open_model

    model = open_text(open_model(default_model, gguf_dialect).text)
    tokenizer = model.tokenizer
    assert tokenizer.encode("<|im_start|>") == (1,)
    assert model.eos_token_ids == {0, 2}
    assert model.bos_token_id == 1
    assert tokenizer.vocab_size == 49152
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("12345")] == [b"1", b"2", b"3", b"4", b"5"]
    for text in vocabularies.CORPUS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = model.encode_messages(vocabularies.user("Hi"))
    assert chat[:1] == (1,)
    assert tokenizer.decode(chat, skip_special_tokens=False).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_long_text_has_the_ids_of_its_words_and_other_threads_go_on_meanwhile(models):
    """`encode` of the tokenizers package keeps Python's lock until it is done; a stream beside it stood still."""
    tokenizer = next(iter(models.values())).tokenizer
    turns, over = [0], threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(take_turns)
        wait_until_turning(turns)
        before = turns[0]
        ids = tokenizer.encode("word " * 200_000)
        after = turns[0]
        over.set()
        other.result(60)
    assert after - before > 20
    assert ids[1000:2000] == tokenizer.encode("word " * 2_000)[1000:2000]


def wait_until_turning(turns: list[int]) -> None:
    until = time.monotonic() + 30
    while turns[0] < 10:
        assert time.monotonic() < until
        time.sleep(0.001)
