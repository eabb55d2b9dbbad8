"""SamplingParams: what is accepted, what is refused and by which field's name, and what it becomes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import EngineRequest, StopRules
from penstock.contract.sampling import NEUTRAL, SamplingSpec
from penstock.sampling import PARAMETERS, STAGES, Home, SamplingParams
from penstock.sampling import parameters as parameter_files

HUGE = 10**400
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def test_importing_the_room_loads_no_tensor_library():
    code = "import sys, penstock.sampling; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_parameter_lives_in_the_file_of_its_name_and_all_are_found():
    folder = parameter_files.__path__[0]
    files = subprocess.run(["ls", folder], capture_output=True, text=True, check=True).stdout.split()
    names = sorted(file.removesuffix(".py") for file in files if file.endswith(".py") and not file.startswith("_"))
    assert [parameter.name for parameter in PARAMETERS] == names
    assert len(names) == 35


def test_every_parameter_has_its_field_with_the_same_default_and_no_field_is_without_one():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert fields == {parameter.name: parameter.default for parameter in PARAMETERS}


def test_every_parameter_lands_in_a_field_that_its_value_of_the_contract_has():
    stop_fields = {field.name for field in dataclasses.fields(StopRules)}
    request_fields = {field.name for field in dataclasses.fields(EngineRequest)}
    for parameter in PARAMETERS:
        homes = {Home.STOP_RULES: stop_fields, Home.REQUEST: request_fields, Home.SPEC: {parameter.name}}
        assert parameter.field in homes[parameter.home]
    assert {p.field for p in PARAMETERS if p.home is Home.STOP_RULES} == stop_fields


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.spec() == NEUTRAL
    assert params.stop_rules() == StopRules(max_tokens=16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (float("nan"), float("inf"), 1e400, -0.1, 2.001, True, "x", None, HUGE, [1])],
        *[("top_p", bad) for bad in (0, 0.0, 1.0001, -1, float("nan"), float("-inf"), False, "0.5", None, -HUGE)],
        *[("min_p", bad) for bad in (-0.01, 1.1, float("nan"), float("inf"), True, "x", None, HUGE)],
        *[("top_k", bad) for bad in (-2, 2**31, HUGE, 1.0, float("nan"), True, "40", None)],
        *[("seed", bad) for bad in (2**63, -(2**63) - 1, HUGE, 1.5, float("inf"), True, "x")],
        *[("n", bad) for bad in (0, -1, 17, HUGE, 1.0, True, "1", None)],
        *[("best_of", bad) for bad in (0, 17, 1.0, True, "2")],
        *[("max_tokens", bad) for bad in (0, -1, 2**31, HUGE, 5.0, float("nan"), True, "16")],
        *[("min_tokens", bad) for bad in (-1, HUGE, 1.0, True, "x", None, 17)],
        *[("logprobs", bad) for bad in (21, -1, HUGE, True, 0.0, "0")],
        *[("logprobs_mode", bad) for bad in ("raw", 0, None, True)],
        *[("presence_penalty", bad) for bad in (-2.01, 2.01, float("nan"), "1", True)],
        *[("frequency_penalty", bad) for bad in (-2.01, 2.01, float("inf"), "1", False)],
        *[("repetition_penalty", bad) for bad in (0, -1, 10.1, float("nan"), True, "1")],
        *[("repeat_last_n", bad) for bad in (-2, 1.0, HUGE, None)],
        *[("logit_bias", bad) for bad in ([1], {"a": 1}, {"1": "x"}, {"1": 101}, {"1": float("nan")}, {"-1": 1}, "x")],
        *[
            ("logit_bias", bad)
            for bad in ({1: 2, "1": 3}, {1.5: 1}, {True: 1}, dict.fromkeys(range(1025), 1), {"\u0661": 1})
        ],
        *[("allowed_token_ids", bad) for bad in ([-1], [True], "12", [1.0], list(range(1025)))],
        *[("bad_words", bad) for bad in ([""], [1], ["x"] * 129, "x" * 257, ["\ud800"])],
        *[("typical_p", bad) for bad in (0, 1.1, float("nan"), None)],
        *[("top_n_sigma", bad) for bad in (-0.1, 101, float("nan"), None)],
        *[("xtc_probability", bad) for bad in (-0.1, 1.1, None)],
        *[("xtc_threshold", bad) for bad in (-0.1, 1.1, None)],
        *[("dry_multiplier", bad) for bad in (-0.1, 101, None)],
        *[("dry_base", bad) for bad in (0.9, 8.1, None)],
        *[("dry_allowed_length", bad) for bad in (0, 129, 1.0, None)],
        *[("dry_penalty_last_n", bad) for bad in (-2, 1.0, None)],
        *[
            ("repetition_detection", bad)
            for bad in (3, {"max_pattern_size": 3}, {"min_count": 2}, (1, 2), "x", {"a": 1})
        ],
        ("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}),
        ("repetition_detection", {"max_pattern_size": 2, "min_count": 1}),
        ("repetition_detection", {"max_pattern_size": 257, "min_count": 2}),
        *[("dry_sequence_breakers", bad) for bad in ([""], [1], ["x"] * 33)],
        *[("stop", bad) for bad in ("", [""], ["a"] * 65, "x" * 257, [1], 7, b"x", ["\ud800"], "\udfff", {"a": 1})],
        *[("stop_token_ids", bad) for bad in ([-1], [True], [1.0], ["a"], 5, "12", [0] * 65, [HUGE], [2**31], {1: 2})],
        *[("ignore_eos", bad) for bad in (1, 0, "true", None)],
        *[("include_stop_str_in_output", bad) for bad in (1, "no", None, float("nan"))],
    ],
)
def test_a_bad_value_is_refused_in_the_name_of_its_field(field, value):
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
    assert 0 < len(refused.value.message) < 200


def test_biases_are_one_value_however_they_are_written():
    for given in ({"7": 1, "3": -2.5, "9": 0}, {3: -2.5, 7: 1.0}, [(7, 1), (3, -2.5)]):
        assert SamplingParams(logit_bias=given).logit_bias == ((3, -2.5), (7, 1.0))
    assert not SamplingParams(logit_bias={"5": 0}).spec().has("logit_bias")


def test_params_can_be_made_from_params():
    params = SamplingParams(logit_bias={"7": 1}, bad_words="x", allowed_token_ids=[7], dry_multiplier=1)
    assert dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))


def test_min_tokens_may_not_exceed_max_tokens_when_that_is_given():
    assert SamplingParams(min_tokens=16).stop_rules().min_tokens == 16
    assert SamplingParams(min_tokens=500, max_tokens=None).stop_rules().min_tokens == 500
    with pytest.raises(InvalidParameter, match="max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_best_of_may_not_be_below_n():
    assert SamplingParams(n=2, best_of=2).best_of == 2
    with pytest.raises(InvalidParameter, match="best_of"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 5e-324},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"n": 16},
        {"stop": "x" * 256},
        {"stop": ["a", "b", "c", "d"]},
        {"stop": []},
        {"stop_token_ids": [0] * 64},
        {"max_tokens": 1},
        {"logprobs": 0},
    ],
)
def test_the_ends_of_each_range_are_allowed(fields):
    assert SamplingParams.from_fields(fields) == SamplingParams(**fields)


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams.from_fields({"temperature": 0.5, "temprature": 0.5})
    assert refused.value.param == "temprature"


def test_equal_meaning_compares_equal():
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams(stop=(), stop_token_ids=[])
    assert SamplingParams(temperature=1) == SamplingParams(temperature=1.0)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


def test_a_spec_holds_what_is_not_neutral_and_nothing_else():
    params = SamplingParams(temperature=0.7, top_k=40, top_p=1.0, min_p=0.0, seed=-3, logprobs=0)
    assert params.spec() == SamplingSpec((("logprobs", 0), ("seed", -3), ("temperature", 0.7), ("top_k", 40)))
    assert SamplingParams(temperature=1.0, seed=0).spec() == SamplingSpec((("seed", 0),))


def test_a_greedy_spec_forgets_what_only_a_random_choice_reads():
    filtered = SamplingParams(temperature=0, top_k=40, top_p=0.9, min_p=0.1, seed=7)
    assert filtered.spec() == SamplingParams(temperature=-0.0).spec() == SamplingSpec((("temperature", 0.0),))
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"
    assert SamplingParams(temperature=0, logprobs=0).spec().has("logprobs")


def test_stop_rules_carry_every_rule_under_the_contracts_names():
    params = SamplingParams(
        max_tokens=None,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[3, 1],
        ignore_eos=True,
        include_stop_str_in_output=True,
        repetition_detection={"max_pattern_size": 5, "min_count": 3},
    )
    assert params.stop_rules() == StopRules(0, 2, (3, 1), ("a", "b"), True, True, (1, 5, 3))


def test_stages_run_in_their_stated_order():
    assert [name for name, _ in STAGES] == [
        *("allowed_token_ids", "bad_words", "logit_bias"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier"),
        *("temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc_probability"),
    ]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_schema_is_plain_json_and_its_bounds_are_those_of_the_check(parameter):
    schema = json.loads(json.dumps(parameter.json_schema(), allow_nan=False))
    assert schema["description"] == parameter.doc
    assert schema["default"] == parameter.default
    for option in schema.get("anyOf", [schema]):
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in option:
                if parameter.name != "min_tokens":  # its upper end is above the default of max_tokens
                    SamplingParams(**{parameter.name: option[bound]})
                with pytest.raises(InvalidParameter):
                    SamplingParams(**{parameter.name: option[bound] + step})
        if option["type"] == "null":
            SamplingParams(**{parameter.name: None})
    if all(option["type"] != "null" for option in schema.get("anyOf", [schema])):
        with pytest.raises(InvalidParameter):
            SamplingParams(**{parameter.name: None})


def test_parameters_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        BY_NAME["top_p"].default = 0.5


def test_a_misspelt_name_is_told_with_the_one_that_was_meant():
    with pytest.raises(InvalidParameter, match=r"^top_kk: is not a sampling parameter; did you mean top_k\?$") as error:
        SamplingParams(top_kk=1)
    assert (error.value.param, error.value.code) == ("top_kk", "unknown_parameter")
    with pytest.raises(InvalidParameter, match=r"is not a sampling parameter$"):
        SamplingParams(zzz=1)
    with pytest.raises(InvalidParameter, match="did you mean temperature"):
        SamplingParams.from_fields({"temperatur": 1})
    assert "temperature" in inspect.signature(SamplingParams).parameters
    assert replace(SamplingParams(top_k=3), top_p=0.5).top_k == 3
