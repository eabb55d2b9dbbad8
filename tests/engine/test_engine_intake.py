"""The intake: what is resolved, and what is refused by name."""

from dataclasses import replace

import engine_harness as harness
import pytest

from penstock.contract.errors import InvalidParameter, PromptTooLong, RequestError
from penstock.contract.grammar import JSON_OBJECT, Grammar, GrammarKind
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.request import ChatPrompt, EngineRequest, Message, StopRules, TextPrompt, TokenPrompt
from penstock.contract.sampling import SamplingSpec
from penstock.contract.tools import ReplyRules, ToolUse
from penstock.engine import Intake


def refusal(request: EngineRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        harness.build().intake.resolve(request)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": TokenPrompt(())}, "prompt"),
        ({"prompt": TokenPrompt((0, len(harness.VOCABULARY)))}, "prompt"),
        ({"prompt": TokenPrompt((-1,))}, "prompt"),
        ({"prompt": ChatPrompt(())}, "messages"),
        ({"prompt": TextPrompt("x" * 100_000)}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"stop": StopRules(strings=("a",) * 65)}, "stop"),
        ({"stop": StopRules(token_ids=(len(harness.VOCABULARY),))}, "stop_token_ids"),
        ({"stop": StopRules(strings=("a" * 257,))}, "stop"),
        ({"stop": StopRules(strings=("",))}, "stop"),
        ({"stop": StopRules(token_ids=(1,) * 65)}, "stop_token_ids"),
        ({"stop": StopRules(max_tokens=-1)}, "max_tokens"),
        ({"stop": StopRules(min_tokens=-1)}, "min_tokens"),
        ({"prompt": ChatPrompt((Message("user", ""),) * 2049)}, "messages"),
        ({"stop": StopRules(min_tokens=1000)}, "min_tokens"),
        ({"stop": StopRules(max_tokens=4, min_tokens=5)}, "min_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param):
    assert refusal(EngineRequest(**{"id": "a", "prompt": TextPrompt("hi"), **fields})).param == param


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers():
    error = refusal(EngineRequest("a", TokenPrompt((1,) * 128)))
    assert isinstance(error, PromptTooLong)
    assert "128" in error.message
    assert error.code == "context_length_exceeded"


def test_a_prompt_one_below_the_context_gets_one_token():
    resolved = harness.build().intake.resolve(
        EngineRequest("a", TokenPrompt((1,) * 127), stop=StopRules(max_tokens=50))
    )
    assert resolved.sequences[0].stop.max_tokens == 1


def test_no_max_tokens_means_the_rest_of_the_context():
    resolved = harness.build().intake.resolve(EngineRequest("a", TokenPrompt((1,) * 28)))
    assert resolved.sequences[0].stop.max_tokens == 100


def test_the_models_end_joins_the_callers_stop_ids_unless_it_is_ignored():
    intake = harness.build().intake
    rules = intake.resolve(EngineRequest("a", TextPrompt("hi"), stop=StopRules(token_ids=(3,)))).sequences[0].stop
    assert rules.token_ids == (3, harness.END_ID)
    rules = (
        intake.resolve(EngineRequest("a", TextPrompt("hi"), stop=StopRules(token_ids=(3,), ignore_eos=True)))
        .sequences[0]
        .stop
    )
    assert rules.token_ids == (3,)


def test_random_sampling_gets_a_seed_and_greedy_none():
    intake = harness.build().intake
    assert intake.resolve(EngineRequest("a", TextPrompt("hi"))).sequences[0].sampling.get("seed", -1) == 7
    greedy = SamplingSpec((("temperature", 0.0),))
    assert not intake.resolve(EngineRequest("a", TextPrompt("hi"), sampling=greedy)).sequences[0].sampling.has("seed")
    own = SamplingSpec((("seed", 99),))
    assert intake.resolve(EngineRequest("a", TextPrompt("hi"), sampling=own)).sequences[0].sampling == own


def test_an_empty_text_starts_from_the_models_end_where_there_is_no_beginning():
    resolved = harness.build().intake.resolve(EngineRequest("a", TextPrompt("")))
    assert resolved.sequences[0].prompt == (harness.END_ID,)


def test_a_conversation_is_rendered_and_its_text_kept():
    resolved = harness.build().intake.resolve(EngineRequest("a", ChatPrompt((Message("user", "hi there"),))))
    assert resolved.prompt_text == "hi there" + harness.END
    assert resolved.sequences[0].prompt[-1] == harness.END_ID


def test_choices_differ_in_id_and_index_only():
    requests = harness.build().intake.resolve(EngineRequest("a", TextPrompt("hi"), n=3)).sequences
    assert [(r.id, r.choice) for r in requests] == [("a/0", 0), ("a/1", 1), ("a/2", 2)]
    assert len({r.prompt for r in requests}) == 1


def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidParameter):
        harness.build().intake.resolve(EngineRequest("a", TextPrompt("\ud800")))


class AnyGrammar:
    """Takes every grammar, in any number of tokens."""

    def check(self, grammar, max_new_tokens, tenant=""):
        self.most, self.tenant = max_new_tokens, tenant
        return replace(grammar, ending=(1,), size=1)


@pytest.mark.parametrize(
    ("grammar", "max_tokens", "most"),
    [
        (JSON_OBJECT, 0, 8),
        (JSON_OBJECT, 5, 5),
        (JSON_OBJECT, 50, 50),
        (Grammar(GrammarKind.JSON, '{"type":"array"}'), 0, 100),
        (None, 0, 100),
    ],
)
def test_any_json_object_ends_within_a_bound_where_the_request_has_none(grammar, max_tokens, most):
    built, grammars = harness.build(), AnyGrammar()
    limits = replace(DEFAULT_LIMITS, max_json_object_tokens=8)
    intake = Intake(built.text, built.card, limits, built.clock, lambda: 7, "fcfs", grammars)
    prompt = TokenPrompt((1,) * 28)
    resolved = intake.resolve(EngineRequest("a", prompt, stop=StopRules(max_tokens=max_tokens), grammar=grammar))
    assert resolved.sequences[0].stop.max_tokens == most
    assert grammar is None or grammars.most == most
    assert grammar is None or resolved.sequences[0].grammar.ending == (1,)  # what is scheduled was judged


def beside_calls(form):
    return EngineRequest(
        "a",
        ChatPrompt((Message("user", "hi"),)),
        grammar=Grammar(GrammarKind.JSON, "the form or calls"),
        reply=ReplyRules(tool_use=ToolUse.AUTO, form=form),
    )


@pytest.mark.parametrize(("form", "most"), [(JSON_OBJECT, 8), (Grammar(GrammarKind.JSON, '{"type":"array"}'), 125)])
def test_so_does_any_json_object_beside_calls(form, most):
    built, grammars = harness.build(), AnyGrammar()
    limits = replace(DEFAULT_LIMITS, max_json_object_tokens=8)
    intake = Intake(built.text, built.card, limits, built.clock, lambda: 7, "fcfs", grammars)
    resolved = intake.resolve(beside_calls(form))
    assert resolved.sequences[0].stop.max_tokens == most


class Refuses:
    """Takes every grammar but one."""

    def __init__(self, source: str) -> None:
        self.source = source

    def check(self, grammar, max_new_tokens, tenant=""):
        if grammar.source == self.source:
            raise InvalidParameter("structured_outputs", "structured_outputs: it has something unsupported.")


@pytest.mark.parametrize(
    ("source", "param"), [(JSON_OBJECT.source, "structured_outputs"), ("the form or calls", "tools")]
)
def test_what_cannot_be_followed_beside_calls_is_told_of_the_form_or_of_the_tools(source, param):
    built = harness.build()
    intake = Intake(built.text, built.card, DEFAULT_LIMITS, built.clock, lambda: 7, "fcfs", Refuses(source))
    with pytest.raises(InvalidParameter) as refused:
        intake.resolve(beside_calls(JSON_OBJECT))
    assert (refused.value.param, str(refused.value)) == (param, f"{param}: it has something unsupported.")
