"""Texts in sampling parameters become token ids at admission; ids that the model does not have are refused."""

from __future__ import annotations

import pytest

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.engine.token_id_resolver import TokenIdResolver
from penstock.sampling import SamplingParams

PIECES = [b"a", b"b", b" a", b"\n", b"b\n", b":a", b"ab"]


class Spelling:
    """A tokenizer of PIECES that takes the longest first."""

    def tokens_with(self, text):
        return tuple(i for i, piece in enumerate(PIECES) if text.encode() in piece)

    def spellings(self, text, *, param):
        return tuple(dict.fromkeys(self._ids(each) for each in (text, " " + text) if self._ids(each)))

    def _ids(self, text):
        ids, rest = [], text.encode()
        while rest:
            fits = [i for i in range(len(PIECES)) if rest.startswith(PIECES[i])]
            if not fits:
                return ()
            ids.append(max(fits, key=lambda i: len(PIECES[i])))
            rest = rest[len(PIECES[ids[-1]]) :]
        return tuple(ids)


def resolve(limits=None, **fields):
    terms = TokenIdResolver(Spelling(), len(PIECES), limits or RequestLimits())
    return terms.resolve(SamplingParams(seed=1, **fields).spec())


def test_bad_words_become_their_spellings():
    assert resolve(bad_words=["a", "b"]).get("bad_words", ()) == ((0,), (1,), (2,))
    assert resolve(bad_words=["aa"]).get("bad_words", ()) == ((0, 0), (2, 0))


def test_sequence_breakers_become_every_token_that_holds_one_and_only_where_they_are_used():
    assert resolve(dry_multiplier=1).get("dry_sequence_breakers", ()) == (3, 4, 5)
    assert resolve(dry_multiplier=1, dry_sequence_breakers=["b"]).get("dry_sequence_breakers", ()) == (1, 4, 6)
    assert resolve(dry_multiplier=1, dry_sequence_breakers=[]).get("dry_sequence_breakers", (9,)) == ()
    assert not resolve().has("dry_sequence_breakers")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {"7": 1}}, "logit_bias"),
        ({"allowed_token_ids": [0, 7]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0, 2], "bad_words": ["a"]}, "bad_words"),
        ({"bad_words": ["ab", "aab"], "limits": RequestLimits(max_bad_word_tokens=5)}, "bad_words"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(fields, name):
    with pytest.raises(InvalidParameter) as refused:
        resolve(**fields)
    assert refused.value.param == name


def test_other_parameters_pass_unread():
    params = SamplingParams(temperature=0.5, seed=4, logit_bias={"6": 2}, allowed_token_ids=[6], xtc_probability=0.2)
    assert TokenIdResolver(Spelling(), len(PIECES), RequestLimits()).resolve(params.spec()) == params.spec()
