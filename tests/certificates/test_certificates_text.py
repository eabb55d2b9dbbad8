"""A certificate has one spelling, and no bit of it can be changed unseen."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from certificate_makers import ANSWER, CONTRACT, REQUEST, certificate

from penstock.certificates import BadCertificate, read, seal, write


def test_what_is_written_is_read_again():
    made = certificate()
    assert read(write(made)) == made
    assert read(write(made) + b"\n") == made


def test_its_text_is_canonical_json():
    text = write(certificate())
    values = json.loads(text)
    assert json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == text
    assert values["request"]["sampling"] == {
        "logit_bias": [[3, -1.5], [9, 2.0]],
        "logprobs": 0,
        "seed": 7,
        "temperature": 1.25,
    }


def test_every_flipped_bit_is_found():
    text = write(certificate()) + b"\n"
    for at in range(len(text)):
        for bit in range(8):
            tampered = bytearray(text)
            tampered[at] ^= 1 << bit
            with pytest.raises(BadCertificate):
                read(bytes(tampered))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"bf16"', b'"bf16" ', "written"),
        (b'"seed":7', b'"seed":7.0', "digest"),
        (b'"seed":7', b'"seed":70e-1', "written"),
        (b'"version":1', b'"version":1,"more":2', "written"),
        (b'"version":1', b'"version":2', "version 2"),
        (b'"choices":2', b'"choices":"2"', "no certificate"),
        (b'"bf16"', b'"\\u0062f16"', "written"),
        (b'"length"', b'"tired"', "no certificate"),
        (b'"adapter":"ad', b'"adapter":"ae', "digest"),
    ],
)
def test_other_spellings_and_values_are_refused(old, new, why):
    text = write(certificate())
    assert old in text
    with pytest.raises(BadCertificate, match=why):
        read(text.replace(old, new, 1))


@pytest.mark.parametrize("text", [b"", b"\n", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"version":1}'])
def test_what_is_no_certificate_is_refused(text):
    with pytest.raises(BadCertificate):
        read(text)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ANSWER[:1], "1 choices"),
        ((msgspec.structs.replace(ANSWER[0], marks=ANSWER[0].marks[1:]), ANSWER[1]), "marks"),
        ((msgspec.structs.replace(ANSWER[0], marks=ANSWER[0].marks.upper().replace("0", "G")), ANSWER[1]), "marks"),
        ((ANSWER[0], msgspec.structs.replace(ANSWER[1], logprobs="")), "choice 1 has no SHA-256"),
    ],
)
def test_an_answer_must_have_the_form_of_one(answer, why):
    with pytest.raises(BadCertificate, match=re.escape(why)):
        read(write(seal(CONTRACT, REQUEST, answer)))
