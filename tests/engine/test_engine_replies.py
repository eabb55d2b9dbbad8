"""The engine takes answers apart as it generates: a runner that writes a script, real scheduler, text and engine."""

from __future__ import annotations

import json

import pytest
from engine_harness import finishes_of, terminal_of, text_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, FinishReason, Output
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import GgufVocabulary, ModelCard
from penstock.contract.plan import RowResult, SampledToken, StepPlan, StepResult
from penstock.contract.request import ChatPrompt, EngineRequest, Message, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.contract.tools import ReasoningUse, ReplyRules, Tool, ToolUse
from penstock.core import Scheduler
from penstock.engine import Engine, Intake
from penstock.engine.output_queue import merge
from penstock.sim.clock import SimClock
from penstock.text import open_text

SPECIAL = ("<|end|>", "[TOOL_CALLS]", "<think>", "</think>")
CHARACTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
VOCABULARY = (*CHARACTERS, *SPECIAL)
IDS = {token: index for index, token in enumerate(VOCABULARY)} | {" ": len(CHARACTERS) - 2, "\n": len(CHARACTERS) - 1}
END = IDS["<|end|>"]
TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{% if open_thinking %}<think>{% endif %}{# [TOOL_CALLS] </think> #}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = Tool("f", json.dumps({"type": "function", "function": {"name": "f", "parameters": SCHEMA}}), json.dumps(SCHEMA))
CALL = '{"name":"f","arguments":{"city":"Rome"}}'
ARGUMENTS = '{"city":"Rome"}'
AUTO = ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO)
LOOKED = ["<think>", *"hm\n", "</think>", *"\n\nI look. ", "[TOOL_CALLS]", *f"[{CALL},{CALL}]", "<|end|>"]


def text_model():
    return open_text(
        GgufVocabulary(
            file="harness.gguf",
            model="gpt2",
            pre="gpt-2",
            tokens=VOCABULARY,
            token_types=(*[1] * len(CHARACTERS), *[3] * len(SPECIAL)),
            merges=(),
            scores=(),
            bos=-1,
            eos=END,
            unknown=-1,
            add_bos=False,
            add_space_prefix=False,
            chat_template=TEMPLATE,
        )
    )


TEXT = text_model()


class Writer:
    """A runner whose every sequence writes the same script, one token a step."""

    def __init__(self, script: list[str]) -> None:
        self._script = [IDS[each] for each in script]
        self._written: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            self._written[admit.slot] = 0
        rows = []
        for row in plan.rows:
            if row.sample:
                rows.append(RowResult(row.slot, (SampledToken(self._script[self._written[row.slot]]),)))
                self._written[row.slot] += 1
        return StepResult(plan.step, tuple(rows))


class AnyGrammar:
    """Lets every grammar pass; the `Writer` follows none."""

    def check(self, grammar: Grammar, room: int, tenant: str = "") -> Grammar:
        """Refuse nothing."""
        return grammar


def answer(
    script: list[str], rules: ReplyRules = AUTO, *, tools=(TOOL,), n=1, variables=(), grammar=None, **stop
) -> list[Output]:
    config = SchedulerConfig(num_blocks=512, max_num_seqs=8, max_model_len=1024, max_num_batched_tokens=512)
    engine = Engine(Scheduler(config), Writer(script), TEXT)
    card = ModelCard("m", 0, 1024, len(VOCABULARY), True)
    intake = Intake(TEXT, card, DEFAULT_LIMITS, SimClock(), lambda: 1, "fcfs", AnyGrammar())
    prompt = ChatPrompt((Message("user", "x"),), tools=tools, template_variables=variables)
    engine.submit(intake.resolve(EngineRequest("a", prompt, n=n, stop=StopRules(**stop), reply=rules, grammar=grammar)))
    outputs: list[Output] = []
    while engine.has_work:
        outputs += [output for _, output in engine.step()]
    return outputs


def deltas(outputs: list[Output], choice: int = 0) -> list[ChoiceDelta]:
    return [each for each in outputs if isinstance(each, ChoiceDelta) and each.choice == choice]


def reasoning_of(outputs: list[Output]) -> str:
    return "".join(each.reasoning for each in deltas(outputs))


def calls_of(outputs: list[Output], choice: int = 0) -> list[tuple[int, str, str]]:
    """The pieces of its calls, arguments in a row joined."""
    joined: list[tuple[int, str, str]] = []
    for piece in (piece for each in deltas(outputs, choice) for piece in each.calls):
        if not piece.name and joined and not joined[-1][1]:
            joined[-1] = (piece.index, "", joined[-1][2] + piece.arguments)
        else:
            joined.append((piece.index, piece.name, piece.arguments))
    return joined


TWICE = [(0, "f", ""), (0, "", ARGUMENTS), (1, "f", ""), (1, "", ARGUMENTS)]


def test_an_answer_is_taken_apart():
    outputs = answer(LOOKED)
    assert (reasoning_of(outputs), text_of(outputs), calls_of(outputs)) == ("hm", "I look.", TWICE)
    assert [each.reason for each in finishes_of(outputs)] == [FinishReason.TOOL_CALLS]
    usage = terminal_of(outputs).usage
    assert (usage.reasoning_tokens, usage.completion_tokens) == (5, len(LOOKED))
    assert tokens_of(outputs) == tuple(IDS[each] for each in LOOKED)  # every token comes, whatever its text became


def test_without_rules_the_same_answer_is_text_without_its_control_tokens():
    outputs = answer(LOOKED, ReplyRules())
    assert text_of(outputs) == f"hm\n\n\nI look. [{CALL},{CALL}]"
    assert [each.reason for each in finishes_of(outputs)] == [FinishReason.STOP]
    assert terminal_of(outputs).usage.reasoning_tokens == 0


@pytest.mark.parametrize("use", [ReasoningUse.SPLIT, ReasoningUse.HIDDEN])
@pytest.mark.parametrize(
    "script",
    [LOOKED, [*"<think>hm</think>ok", "<|end|>"], [*" <thin ", "<|end|>"], [*"<think>hm</th", "<|end|>"]],
)
def test_deltas_say_how_many_tokens_are_reasoning_at_the_latest_when_text_follows(script, use):
    outputs = answer(script, ReplyRules(use, ToolUse.AUTO))
    known, told = 0, 0
    for each in deltas(outputs):
        known, told = known + each.reasoning_tokens, told + len(each.tokens)
        assert known <= told
        if each.text:
            assert known == terminal_of(outputs).usage.reasoning_tokens
    assert known == terminal_of(outputs).usage.reasoning_tokens


def test_hidden_reasoning_is_counted_but_not_told():
    outputs = answer(LOOKED, ReplyRules(ReasoningUse.HIDDEN, ToolUse.AUTO))
    assert (reasoning_of(outputs), text_of(outputs)) == ("", "I look.")
    assert terminal_of(outputs).usage.reasoning_tokens == 5


def test_the_only_call_that_is_wanted_ends_the_answer_and_frees_its_blocks():
    outputs = answer(LOOKED, ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO, parallel_tool_calls=False))
    assert calls_of(outputs) == TWICE[:2]
    one = ["[TOOL_CALLS]", *CALL, *" and more text that is never generated", "<|end|>"]
    outputs = answer(one, ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO, parallel_tool_calls=False))
    assert (text_of(outputs), calls_of(outputs)) == ("", TWICE[:2])
    assert [each.reason for each in finishes_of(outputs)] == [FinishReason.TOOL_CALLS]
    assert terminal_of(outputs).usage.completion_tokens == 1 + len(CALL)


def test_what_the_length_cuts_off_is_a_call_from_its_arguments_on():
    outputs = answer(LOOKED, max_tokens=30)
    assert calls_of(outputs) == []
    assert text_of(outputs) == "I look. [TOOL_CALLS]" + f"[{CALL}"[:14]
    outputs = answer(LOOKED, max_tokens=46)
    assert calls_of(outputs) == [TWICE[0], (0, "", '{"cit')]
    assert text_of(outputs) == "I look."
    assert [each.reason for each in finishes_of(outputs)] == [FinishReason.LENGTH]


def test_a_call_says_what_stands_in_front_of_it():
    heads = [piece for each in deltas(answer(LOOKED)) for piece in each.calls if piece.id]
    thinking, text = len(["<think>", *"hm\n", "</think>", *"\n\n"]), len("I look. ")
    until_arguments = len('[{"name":"f","arguments":{') + 1  # with the opening
    assert [head.text_before for head in heads] == [len("I look.")] * 2
    assert heads[0].tokens_before == thinking + text + until_arguments
    assert heads[1].tokens_before == heads[0].tokens_before + len(CALL) + 1


def test_a_call_cut_off_by_a_stop_string_is_text_and_a_whole_one_is_not():
    outputs = answer(LOOKED, strings=("arguments",))
    assert text_of(outputs) == 'I look. [TOOL_CALLS][{"name":"f","'
    assert [(each.reason, each.stop) for each in finishes_of(outputs)] == [(FinishReason.STOP, "arguments")]
    outputs = answer(["[TOOL_CALLS]", *CALL, *"X", "<|end|>"], strings=("X",))
    assert calls_of(outputs) == TWICE[:2]
    assert [(each.reason, each.stop) for each in finishes_of(outputs)] == [(FinishReason.TOOL_CALLS, "X")]


def test_a_named_tools_answer_ends_as_any_stop():
    outputs = answer([*ARGUMENTS, "<|end|>"], ReplyRules(ReasoningUse.SPLIT, ToolUse.NAMED, "f"))
    assert calls_of(outputs) == TWICE[:2]
    assert [each.reason for each in finishes_of(outputs)] == [FinishReason.STOP]


def test_a_required_call_is_read_as_the_list_that_is_enforced():
    outputs = answer([*f"[{CALL}]", "<|end|>"], ReplyRules(ReasoningUse.SPLIT, ToolUse.REQUIRED))
    assert calls_of(outputs) == TWICE[:2]
    assert [each.reason for each in finishes_of(outputs)] == [FinishReason.TOOL_CALLS]


def test_reasoning_that_the_template_opens():
    outputs = answer([*"hm", "</think>", *"So.", "<|end|>"], variables=(("open_thinking", True),))
    assert (reasoning_of(outputs), text_of(outputs)) == ("hm", "So.")
    assert terminal_of(outputs).usage.reasoning_tokens == 3
    endless = answer(list("hmmm hmmm"), variables=(("open_thinking", True),), max_tokens=9)
    assert (reasoning_of(endless), text_of(endless)) == ("hmmm hmmm", "")
    assert terminal_of(endless).usage.reasoning_tokens == 9


def test_a_guided_answer_is_no_reasoning_though_the_template_has_opened_some():
    opened = (("open_thinking", True),)
    any_json = Grammar(GrammarKind.JSON, "{}")
    required = ReplyRules(ReasoningUse.SPLIT, ToolUse.REQUIRED)
    outputs = answer([*f"[{CALL}]", "<|end|>"], required, variables=opened, grammar=any_json)
    assert (reasoning_of(outputs), text_of(outputs), calls_of(outputs)) == ("", "", TWICE[:2])
    free = ReplyRules(ReasoningUse.SPLIT)
    outputs = answer([*"{}", "<|end|>"], free, tools=(), variables=opened, grammar=any_json)
    assert (reasoning_of(outputs), text_of(outputs)) == ("", "{}")


def test_choices_have_calls_with_ids_of_their_own():
    outputs = answer(LOOKED, n=3)
    assert all(calls_of(outputs, choice) == TWICE for choice in range(3))
    ids = {piece.id for choice in range(3) for each in deltas(outputs, choice) for piece in each.calls if piece.id}
    assert len(ids) == 6


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=len(LOOKED), max_size=len(LOOKED)))
def test_a_slow_reader_gets_the_same_answer(taken):
    """The output queue joins deltas that wait: whenever the reader takes them, they add up to the same."""
    outputs, waiting, read = answer(LOOKED), [], []
    for output, take in zip(outputs, [*taken, *[True] * len(outputs)], strict=False):
        merge(waiting, [output])
        if take:
            read, waiting = read + waiting, []
    read += waiting
    assert (reasoning_of(read), text_of(read), calls_of(read)) == ("hm", "I look.", TWICE)
    assert tokens_of(read) == tokens_of(outputs)


def test_a_tool_that_cannot_be_checked_is_refused_before_anything_is_queued():
    broken = Tool("f", TOOL.definition, '{"type": "dragon"}')
    with pytest.raises(InvalidParameter, match=r"tools\.0\.function\.parameters"):
        answer(LOOKED, tools=(broken,))


def test_a_text_model_says_what_callers_may_set():
    assert TEXT.template_variables == frozenset({"open_thinking"})
    assert isinstance(TEXT.template_variables, frozenset)
    assert TEXT.reply_format.thinks
