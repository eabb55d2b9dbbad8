"""Certificates made in a batch on two threads, computed again alone on one: equal, or the first place that differs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tiny_adapters import linear_modules, load_with_adapters, write_adapter

from needs import COMPILED
from penstock import LLM, SamplingParams
from penstock.certificates import BadCertificate, Certificate, read, seal, write
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, InvalidParameter
from penstock.kernels import native
from penstock.verify import Recomputed, Recomputing, open_recomputing

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

SIZES = {"kv_cache_memory": 4_000_000, "max_model_len": 128}
PROMPTS = ["the sea", "once upon a time, there was", "a", "yes or no, and why not. or", "the sea and the land"]
SHAPES = (
    {"temperature": 0},
    {"seed": 3},
    {"min_p": 0.05, "repetition_penalty": 1.3, "n": 2},
    {"temperature": 0.7, "top_k": 8, "n": 2, "best_of": 3},
    {"stop": ["e", "th"], "logprobs": 3, "min_tokens": 2},
    {"structured_outputs": {"regex": "(yes|no), [a-f]{2,5}"}, "max_tokens": 24},
    {"bad_words": ["ea"], "logit_bias": {"5": 2.0}, "temperature": 0},
    {"dry_multiplier": 0.8, "presence_penalty": 0.5, "ignore_eos": True},
)


def params(at: int) -> SamplingParams:
    fields = {"max_tokens": 4 + at % 17} | SHAPES[at % len(SHAPES)]
    return SamplingParams.from_fields(fields | ({"seed": at} if at % 3 else {}))


@pytest.fixture(scope="module")
def made(model) -> list[bytes]:
    """A hundred certificates, from one batch of up to 16 sequences on two threads, with guesses and cached prefixes."""
    prompts = [f"{PROMPTS[at % len(PROMPTS)]} {'abcdefgh'[at % 7]}" for at in range(100)]
    with LLM(str(model), threads=2, max_num_seqs=16, max_num_batched_tokens=40, **SIZES) as llm:
        outputs = llm.generate(prompts, [params(at) for at in range(100)], certify=True, use_tqdm=False)
    return [output.certificate.encode() for output in outputs]


def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), threads=1, **SIZES)


@pytest.fixture(scope="module")
def recomputing(model, made):
    with open_recomputing(config(model), read(made[0]).contract) as opening:
        yield opening


def remade(certificate: Certificate, **changed) -> Certificate:
    """What a forger would write: a changed certificate with a new digest."""
    forged = msgspec.structs.replace(certificate, **changed)
    return seal(forged.contract, forged.request, forged.answer)


def test_a_hundred_made_in_a_batch_on_two_threads_are_equal_alone_on_one(made, recomputing):
    assert len({bytes(each) for each in made}) == 100
    for text in made:
        found = recomputing.recompute(read(text))
        assert found == Recomputed()
        assert (found.confirmed, found.refuted, found.explain()) == (True, False, "equal")


def test_log_probabilities_are_certified_though_nobody_sees_them(model):
    with LLM(str(model), threads=1, **SIZES) as llm:
        [plain] = llm.generate(PROMPTS[0], replace(params(1), seed=3, logprobs=None), certify=True, use_tqdm=False)
        [shown] = llm.generate(PROMPTS[0], replace(params(1), seed=3, logprobs=5), certify=True, use_tqdm=False)
        [bare] = llm.generate(PROMPTS[0], replace(params(1), seed=3), use_tqdm=False)
    assert plain.outputs[0].token_ids == bare.outputs[0].token_ids
    hidden, seen = read(plain.certificate.encode()), read(shown.certificate.encode())
    assert hidden.answer[0].tokens == tuple(bare.outputs[0].token_ids)
    assert hidden == seen  # the same bits, with alternatives and without
    assert (plain.outputs[0].logprobs, bare.certificate) == (None, "")


def flips(text: bytes, count: int, rng: random.Random) -> list[bytes]:
    flipped = []
    for place in rng.sample(range(len(text) * 8), count):
        tampered = bytearray(text)
        tampered[place // 8] ^= 1 << place % 8
        flipped.append(bytes(tampered))
    return flipped


def test_every_flipped_bit_is_found_without_computing(made):
    text = min(made, key=len)
    for at in range(len(text)):
        for bit in range(8):
            tampered = bytearray(text)
            tampered[at] ^= 1 << bit
            with pytest.raises(BadCertificate):
                read(bytes(tampered))


def outcome(text: bytes, recomputing: Recomputing) -> str:
    """What a verifier says of a text with a new digest: why it is refused, or where it differs."""
    try:
        forged = msgspec.json.decode(text, type=Certificate)
        found = recomputing.recompute(read(write(remade(forged))))
    except (msgspec.MsgspecError, UnicodeDecodeError, BadCertificate, ConfigError) as error:
        return str(error)
    return "" if found.confirmed else found.explain()


def test_a_flipped_bit_of_answer_or_contract_is_found_though_the_digest_was_made_anew(made, recomputing):
    certificate = read(min(made, key=len))
    text, rng = write(certificate), random.Random(1)
    answer = text.index(b'"answer":'), text.index(b',"contract":')
    contract = answer[1] + 1, text.index(b',"digest":')
    for start, end in (answer, contract):
        for flipped in flips(text[start:end], 200, rng):
            tampered = text[:start] + flipped + text[end:]
            assert outcome(tampered, recomputing), flipped


def test_a_flipped_bit_of_the_request_is_found_or_asks_for_the_same_answer(made, recomputing):
    """A changed request with a new digest is found out, unless what it then certifies is true."""
    certificate = read(made[1])
    text, rng = write(certificate), random.Random(2)
    start, end = text.index(b'"request":'), text.index(b',"version":')
    results = [
        outcome(text[:start] + flipped + text[end:], recomputing) for flipped in flips(text[start:end], 100, rng)
    ]
    assert sum(map(bool, results)) > 60


def test_the_first_place_is_named(made, recomputing):
    certificate = next(each for each in map(read, made) if len(each.answer[0].tokens) > 6)
    first = certificate.answer[0]
    token = (first.tokens[3] + 1) % 40
    other = msgspec.structs.replace(first, tokens=(*first.tokens[:3], token, *first.tokens[4:]))
    found = recomputing.recompute(remade(certificate, answer=(other, *certificate.answer[1:])))
    assert found.explain() == f"differs at choice 0, token 3, token: certified {token}, computed {first.tokens[3]}"
    assert found.refuted
    marks = first.marks[:20] + ("0000" if first.marks[20:24] != "0000" else "1111") + first.marks[24:]
    other = msgspec.structs.replace(first, marks=marks)
    found = recomputing.recompute(remade(certificate, answer=(other, *certificate.answer[1:])))
    assert found.difference is not None
    assert (found.difference.position, found.difference.what) == (5, "log probability (mark)")
    assert found.same_tokens


def test_other_arithmetic_is_neither_confirmed_nor_refuted(made, recomputing):
    certificate = read(made[2])
    elsewhere = remade(certificate, contract=replace(certificate.contract, instruction_set="neon"))
    found = recomputing.recompute(elsewhere)
    assert (found.confirmed, found.refuted) == (False, False)
    assert "equal, although" in found.explain()
    assert "instruction_set was neon" in found.explain()
    first = elsewhere.answer[0]
    other = msgspec.structs.replace(first, tokens=tuple((token + 1) % 40 for token in first.tokens))
    found = recomputing.recompute(remade(elsewhere, answer=(other, *elsewhere.answer[1:])))
    assert (found.confirmed, found.refuted, found.same_tokens) == (False, False, False)


@pytest.mark.parametrize("name", ["model", "tokenizer", "form", "dtype"])
def test_another_model_is_refused_by_name(made, recomputing, name):
    certificate = read(made[0])
    changed = remade(certificate, contract=replace(certificate.contract, **{name: "0123"}))
    with pytest.raises(ConfigError, match=f"another model: its {name} is 0123"):
        recomputing.recompute(changed)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"prompt": ()}, "it has 0 tokens"),
        ({"prompt": (1 << 40,)}, "outside the vocabulary"),
        ({"candidates": 0}, "1 choices of 0"),
        ({"sampling": {"unheard": 3}}, "'unheard' is no sampling parameter"),
        ({"sampling": {"bad_words": ((1, 99999),), "seed": 1}}, "bad_words: token id 99999"),
        ({"adapter": "abc"}, "the adapter abc, which is not loaded"),
    ],
)
def test_a_request_that_the_model_cannot_have_had_is_refused(made, recomputing, changed, why):
    certificate = next(each for each in map(read, made) if each.request.choices == 1)
    found = recomputing.recompute(remade(certificate, request=msgspec.structs.replace(certificate.request, **changed)))
    assert found.refuted
    assert why in found.explain()


def test_what_does_not_fit_here_is_not_judged(made, recomputing):
    certificate = read(made[0])
    long = msgspec.structs.replace(certificate.request, prompt=(3,) * 128)
    with pytest.raises(ConfigError, match=r"needs a context of 1\d\d tokens, and here it is 128"):
        recomputing.recompute(remade(certificate, request=long))


@pytest.mark.parametrize("form", ["int8", "int4", "none"])
def test_a_certificate_brings_its_form_along(model, form):
    with LLM(str(model), threads=2, quantization=form, kv_cache_dtype="int8", **SIZES) as llm:
        [output] = llm.generate(PROMPTS[1], params(1), certify=True, use_tqdm=False)
    certificate = read(output.certificate.encode())
    assert certificate.contract.kv_cache_dtype == "int8"
    with open_recomputing(config(model), certificate.contract) as recomputing:
        assert recomputing.recompute(certificate).confirmed


@pytest.mark.parametrize("form", ["onednn", "dense", "unheard"])
def test_a_form_that_this_release_lacks_is_refused_by_name(model, made, form):
    contract = replace(read(made[0]).contract, form=form)  # a release before this one had onednn
    with (
        pytest.raises(ConfigError, match=f"its form is '{form}', which no options of this release give"),
        open_recomputing(config(model), contract),
    ):
        pass


def test_the_adapter_is_part_of_it(model, tmp_path):
    every = linear_modules(load_with_adapters(model).program)
    folder = write_adapter(tmp_path / "poet", every, 4, seed=1)
    with LLM(str(model), threads=2, lora={"poet": str(folder)}, **SIZES) as llm:
        [output] = llm.generate(PROMPTS[1], params(1), adapter="poet", certify=True, use_tqdm=False)
    certificate = read(output.certificate.encode())
    with open_recomputing(replace(config(model), lora=(f"renamed={folder}",)), certificate.contract) as recomputing:
        assert recomputing.recompute(certificate).confirmed
        plain = msgspec.structs.replace(certificate.request, adapter="")
        assert recomputing.recompute(remade(certificate, request=plain)).refuted


def test_where_torch_computes_there_are_none(model, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    refusal = pytest.raises(InvalidParameter, match="certificate: cannot be given here: it needs the compiled")
    with LLM(str(model), threads=1, **SIZES) as llm, refusal:
        llm.generate(PROMPTS[0], params(1), certify=True, use_tqdm=False)
