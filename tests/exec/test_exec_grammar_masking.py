"""Masks in the runner: what masked rows choose, what is said of it, and that nothing else is touched."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from copy import copy

import pytest
import torch

from penstock.contract.errors import EngineFault
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.contract.thinking import ThinkingBudget
from penstock.exec import grammar_masking, guided_row, side_threads
from penstock.exec.grammar_masking import GrammarMasking
from penstock.exec.sampler import RowSampling, sample
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.torch_backend import TorchBackend

BACKEND = CpuBackend() if native.available() else TorchBackend()
CHOOSE = BACKEND.choose
WIDTH = 83  # no multiple of eight
GRAMMAR = Grammar(GrammarKind.REGEX, "x")
PATIENCE = 30.0
STEPS = 600
"""Each waits for up to a twentieth of a second where nobody draws."""


@pytest.fixture(autouse=True)
def patient(monkeypatch, request):
    """No row waits for a form because the machine is busy, except in tests of waiting."""
    if "form" not in request.node.name:
        monkeypatch.setattr(grammar_masking, "_PATIENCE_SECONDS", PATIENCE)
        monkeypatch.setattr(grammar_masking, "_SHORT_PATIENCE_SECONDS", PATIENCE)
        monkeypatch.setattr(side_threads, "_LONG_SECONDS", PATIENCE)


class Listed:
    """A matcher that allows some tokens and accepts fewer of them."""

    def __init__(self, allowed: set[int], refused: set[int] = frozenset(), broken: bool = False) -> None:
        self.allowed, self.refused, self.broken, self.taken = allowed, refused, broken, []

    def mask(self) -> bytes:
        if self.broken:
            raise EngineFault("too complex")
        bits = sum(1 << id_ for id_ in self.allowed)
        return bits.to_bytes((WIDTH + 7) // 8, "little")

    def take(self, token: int) -> bool:
        if token in self.refused:
            return False
        self.taken.append(token)
        return True

    def take_at_once(self, token: int) -> bool | None:
        """None for a refusal, which takes a search."""
        return None if token in self.refused else self.take(token)

    def closing(self) -> int:
        return min(self.allowed - self.refused)

    def copy(self):
        other = copy(self)
        other.taken = [*self.taken]
        return other

    def foresee(self, most: int) -> tuple[int, ...]:
        return (self.closing(),) * most


class Given:
    """Grammars that hand out the matchers of a test, in order."""

    def __init__(self, matchers) -> None:
        self._matchers = iter(matchers)

    def check(self, grammar: Grammar, room: int, tenant: str = "") -> Grammar:
        """Refuse none."""
        return grammar

    def matcher(self, grammar: Grammar, room: int, prompt: Sequence[int] = ()) -> Listed:
        return next(self._matchers)


def masked_rows(matchers) -> tuple[GrammarMasking, list[Row]]:
    """A masking with a slot for each matcher, None for a row without a grammar; and the rows of a step."""
    masking = GrammarMasking(BACKEND, Given([one for one in matchers if one is not None]))
    spec = SamplingSpec((("temperature", 0),))
    for slot, one in enumerate(matchers):
        grammar = None if one is None else GRAMMAR
        masking.admit(
            Admit(slot, f"s{slot}", (1, 2), (0,), 0, spec, 0, grammar=grammar, max_new_tokens=9, prompt_tokens=2)
        )
    return masking, [Row(slot, 1, 1, (), True) for slot in range(len(matchers))]


def draw(**fields) -> RowSampling:
    return RowSampling.of(SamplingSpec(tuple(sorted(({"seed": 7, "logprobs": 3} | fields).items()))), 0)


def logits_of(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5))


def row_views(rows):
    raise AssertionError(f"no stage here looks at rows {rows}")


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_raw_logprobs_of_a_masked_row_are_the_models_own(temperature):
    masking, rows = masked_rows([Listed({3, 9, 40, 82}), None])
    logits, draws = logits_of(2), [draw(temperature=temperature)] * 2
    own = logits.log_softmax(-1)
    sampled = masking.sample(logits.clone(), draws, [2, 2], masking.begin(rows), row_views)
    assert sampled.tokens[0] in (3, 9, 40, 82)
    for row in range(2):
        assert sampled.logprobs[row] == pytest.approx(float(own[row, sampled.tokens[row]]), abs=1e-5)
        best = own[row].topk(3)
        assert [id_ for id_, _ in sampled.top_logprobs[row]] == best.indices.tolist()
        assert [value for _, value in sampled.top_logprobs[row]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_processed_logprobs_of_a_masked_row_are_those_of_what_it_may_choose():
    allowed = [3, 9, 40, 82]
    masking, rows = masked_rows([Listed(set(allowed))])
    logits = logits_of(1)
    masked = logits[0, allowed].log_softmax(-1)
    draws = [draw(temperature=1.0, logprobs=10, logprobs_mode="processed_logprobs")]
    sampled = masking.sample(logits.clone(), draws, [2], masking.begin(rows), row_views)
    assert {id_ for id_, _ in sampled.top_logprobs[0]} == set(allowed)
    assert sampled.logprobs[0] == pytest.approx(float(masked[allowed.index(sampled.tokens[0])]), abs=1e-5)


def test_rows_without_a_grammar_choose_as_if_alone():
    logits, draws = logits_of(5), [draw(temperature=0.9)] * 5
    free = sample(logits.clone(), draws, [2] * 5, choose=CHOOSE)
    masking, rows = masked_rows([None, Listed({1, 2}), None, Listed({5}), None])
    mixed = masking.sample(logits.clone(), draws, [2] * 5, masking.begin(rows), row_views)
    for row in (0, 2, 4):
        assert [column[row] for column in mixed] == [column[row] for column in free]
    assert mixed.tokens[3] == 5
    assert mixed.tokens[1] in (1, 2)


def test_a_choice_that_cannot_be_completed_is_struck_out_and_the_row_chooses_again():
    logits = logits_of(1)
    order = logits[0].argsort(descending=True).tolist()
    matcher = Listed(set(order[:6]), refused=set(order[:3]))
    masking, rows = masked_rows([matcher])
    sampled = masking.sample(logits.clone(), [draw(temperature=0)], [2], masking.begin(rows), row_views)
    assert matcher.taken == sampled.tokens == [order[3]]


def test_after_many_refusals_the_known_ending_is_taken():
    logits = logits_of(1)
    order = logits[0].argsort(descending=True).tolist()
    matcher = Listed(set(order), refused=set(order[:-1]))
    masking, rows = masked_rows([matcher])
    sampled = masking.sample(logits.clone(), [draw(temperature=1.0)], [2], masking.begin(rows), row_views)
    assert matcher.taken == sampled.tokens == [order[-1]]
    assert sampled.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, order[-1]]), abs=1e-5)


def test_masks_are_those_of_their_rows_when_rows_move():
    one, two = Listed({4}), Listed({70})
    masking, rows = masked_rows([one, two])
    for order in (rows, rows[::-1], rows[1:], rows):
        draws, positions = [draw(temperature=0)] * len(order), [2] * len(order)
        sampled = masking.sample(logits_of(len(order)), draws, positions, masking.begin(order), row_views)
        assert sampled.tokens == [min((one, two)[row.slot].allowed) for row in order]


def test_each_mask_is_computed_once_from_when_the_token_before_it_is_known():
    class Asked(Listed):
        def __init__(self, allowed: set[int]) -> None:
            super().__init__(allowed)
            self.seen = []

        def mask(self) -> bytes:
            self.seen.append(len(self.taken))
            return super().mask()

    matchers = [Asked({1}), Asked({2}), Asked({3})]
    masking, rows = masked_rows(matchers)
    for _ in range(4):
        assert drawn_at_last(masking, rows, logits_of(3)).tokens == [1, 2, 3]
    left = [rows[0], rows[2]]
    masking.release(1)
    assert drawn_at_last(masking, left, logits_of(2)).tokens == [1, 3]
    wait_until(lambda: [one.seen for one in matchers] == [list(range(6)), list(range(5)), list(range(6))])


def test_a_step_hands_all_its_masks_over_at_once_and_a_token_only_where_that_may_take_long(monkeypatch):
    handed, hand_over = [], side_threads.SideThreads._hand_over
    monkeypatch.setattr(
        side_threads.SideThreads,
        "_hand_over",
        lambda self, jobs: (handed.append(len(jobs)), hand_over(self, jobs))[1],
    )
    best = logits_of(3)[0].argmax().item()
    masking, rows = masked_rows([Listed(set(range(WIDTH)), refused={best}), Listed({2}), Listed({3})])
    handed.clear()  # the jobs of admission
    assert drawn_at_last(masking, rows[1:], logits_of(2)).tokens == [2, 3]
    assert handed == [2]
    drawn_at_last(masking, rows, logits_of(3))
    assert handed == [2, 1, 2, 1]  # a token to try, the masks of two rows, and that of the row that chose again


def test_a_form_whose_token_took_long_at_once_is_moved_on_in_side_threads_from_then_on(monkeypatch):
    monkeypatch.setattr(guided_row, "_SLOW_SECONDS", -1.0)

    class Where(Listed):
        def __init__(self, allowed: set[int]) -> None:
            super().__init__(allowed)
            self.threads = []

        def take(self, token: int) -> bool:
            self.threads.append(threading.current_thread().name)
            return super().take(token)

    matcher, here = Where({4}), threading.current_thread().name
    masking, rows = masked_rows([matcher])
    for _ in range(3):
        assert drawn_at_last(masking, rows, logits_of(1)).tokens == [4]
    assert matcher.threads == [here, "penstock-forms", "penstock-forms"]


class Slow(Listed):
    """A matcher that does one thing only when the test lets it."""

    def __init__(self, what: str, allowed: set[int], refused: set[int] = frozenset()) -> None:
        super().__init__(allowed, refused)
        self.what, self.gate = what, threading.Event()

    def mask(self) -> bytes:
        if self.what == "mask" and self.taken:
            assert self.gate.wait(PATIENCE)
        return super().mask()

    def take(self, token: int) -> bool:
        if self.what == "take":
            assert self.gate.wait(PATIENCE)
        return super().take(token)

    def take_at_once(self, token: int) -> bool | None:
        return None if self.what == "take" else super().take_at_once(token)


class SlowToMake(Given):
    """Grammars of which the first takes long to compile."""

    def __init__(self, matchers, gate: threading.Event) -> None:
        super().__init__(matchers)
        self.gate = gate

    def matcher(self, grammar: Grammar, room: int, prompt: Sequence[int] = ()) -> Listed:
        made = super().matcher(grammar, room)
        assert made.what != "make" or made.gate.wait(PATIENCE)
        return made


@pytest.mark.parametrize("what", ["make", "mask", "take"])
def test_a_row_whose_form_takes_long_waits_and_draws_the_same_later_and_nobody_waits_for_it(what):
    logits = logits_of(3)
    best = [row.argsort(descending=True).tolist() for row in logits]
    slow = Slow(what, set(best[0]), refused=set(best[0][:2]))
    masking = GrammarMasking(BACKEND, SlowToMake([slow, Slow("", {9})], slow.gate))
    for slot, grammar in enumerate((GRAMMAR, GRAMMAR, None)):
        spec = SamplingSpec(())
        masking.admit(
            Admit(slot, f"s{slot}", (1, 2), (0,), 0, spec, 0, grammar=grammar, max_new_tokens=9, prompt_tokens=2)
        )
    rows = [Row(slot, 1, 1, (), True) for slot in range(3)]
    expected, drawn, steps = best[0][2], [], 0
    masking.begin_step(rows)
    while len(drawn) < 2:  # the second draw waits too, where masks are slow
        sampled = masking.sample(logits.clone(), [draw(temperature=0)] * 3, [2] * 3, masking.begin(rows), row_views)
        assert not masking.waits(2)
        assert sampled.tokens[1:] == [9, best[2][0]] if not masking.waits(1) else sampled.tokens[2] == best[2][0]
        steps += 1
        if not masking.waits(0):
            drawn.append(sampled.tokens[0])
        elif steps > 3:
            slow.gate.set()
    assert drawn == [expected, expected] == slow.taken[:2]
    assert steps > 4


def test_a_form_that_takes_long_is_not_waited_for_again_while_others_draw():
    slow = Slow("make", {4})
    masking = GrammarMasking(BACKEND, SlowToMake([slow], slow.gate))
    masking.admit(
        Admit(0, "s0", (1, 2), (0,), 0, SamplingSpec(()), 0, grammar=GRAMMAR, max_new_tokens=9, prompt_tokens=2)
    )
    rows = [Row(0, 1, 1, (), True), Row(1, 1, 1, (), True)]
    masking.begin_step(rows)
    for _ in range(200):  # each would wait for as long as a step may: ten seconds in all
        masking.sample(logits_of(2), [draw(temperature=0)] * 2, [2] * 2, masking.begin(rows), row_views)
        assert masking.waits(0)
    slow.gate.set()
    assert drawn_at_last(masking, rows[:1], logits_of(1)).tokens == [4]


@pytest.mark.parametrize("free", [Row(1, 1, 1, (), True), Row(1, 0, 5, (), False)], ids=["drew first", "prompt"])
@pytest.mark.parametrize("what", ["make", "take"])
def test_a_form_is_not_waited_for_long_beside_a_row_that_draws_no_more_in_this_step(monkeypatch, what, free):
    """A row with drafts draws before rows with a form, and a chunk of a prompt does not draw."""
    monkeypatch.setattr(grammar_masking, "_PATIENCE_SECONDS", PATIENCE)
    slow = Slow(what, {4})
    masking = GrammarMasking(BACKEND, SlowToMake([slow], slow.gate))
    masking.admit(
        Admit(0, "s0", (1, 2), (0,), 0, SamplingSpec(()), 0, grammar=GRAMMAR, max_new_tokens=9, prompt_tokens=2)
    )
    guided, began = Row(0, 1, 1, (), True), time.monotonic()
    masking.begin_step([guided, free])
    masking.sample(logits_of(1), [draw(temperature=0)], [2], masking.begin([guided]), row_views)
    assert masking.waits(0)
    assert time.monotonic() - began < PATIENCE / 2
    slow.gate.set()
    assert drawn_at_last(masking, [guided], logits_of(1)).tokens == [4]


class Closing(Slow):
    """A matcher that moves past a token before `take` returns, which the gate holds up; it closes with two tokens."""

    def __init__(self, allowed: set[int], endings: list[int]) -> None:
        super().__init__("take", allowed, refused=allowed - set(endings))
        self.endings = endings

    def take(self, token: int) -> bool:
        if token in self.refused:
            return False
        self.taken.append(token)
        assert self.gate.wait(PATIENCE)
        return True

    def closing(self) -> int:
        return self.endings[len(self.taken)]


def test_a_row_that_waits_for_its_forms_known_ending_draws_that_ending_later():
    """The search for the ending after it may be over before the row is told."""
    logits = logits_of(1)
    order = logits[0].argsort(descending=True).tolist()
    slow = Closing(set(order), order[:-3:-1])  # the two least likely
    masking, row = masked_rows([slow])
    for _ in range(3):
        masking.sample(logits.clone(), [draw(temperature=0)], [2], masking.begin(row), row_views)
        assert masking.waits(0)
    wait_until(lambda: slow.taken)
    masking.sample(logits.clone(), [draw(temperature=0)], [2], masking.begin(row), row_views)
    slow.gate.set()
    assert drawn_at_last(masking, row, logits).tokens == [order[-1]]
    assert slow.taken == [order[-1]]


def test_a_sequence_that_leaves_while_its_form_is_made_is_forgotten():
    slow = Slow("make", {4})
    masking = GrammarMasking(BACKEND, SlowToMake([slow, Slow("", {5})], slow.gate))
    row = [Row(0, 1, 1, (), True)]
    for seq_id in ("first", "second"):
        spec = SamplingSpec(())
        masking.admit(Admit(0, seq_id, (1, 2), (0,), 0, spec, 0, grammar=GRAMMAR, max_new_tokens=9, prompt_tokens=2))
        if seq_id == "first":
            masking.sample(logits_of(1), [draw(temperature=0)], [2], masking.begin(row), row_views)
            assert masking.waits(0)
            masking.release(0)
            assert not masking.waits(0)
    assert drawn_at_last(masking, row, logits_of(1)).tokens == [5]
    slow.gate.set()


def drawn_at_last(masking, rows, logits):
    """What the rows draw in the first step in which none of them waits."""
    for _ in range(STEPS):
        draws, positions = [draw(temperature=0)] * len(rows), [2] * len(rows)
        masking.begin_step(rows)
        sampled = masking.sample(logits.clone(), draws, positions, masking.begin(rows), row_views)
        if not any(masking.waits(row.slot) for row in rows):
            return sampled
    raise AssertionError("a row waits for ever")


def wait_until(holds) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_matcher_that_breaks_ends_its_row_alone():
    masking, rows = masked_rows([Listed({4}), Listed(set(), broken=True), Listed({6})])
    draws = [draw(temperature=0)] * 3
    sampled = masking.sample(logits_of(3), draws, [2] * 3, masking.begin(rows), row_views)
    assert sampled.failed == [False, True, False]
    assert [sampled.tokens[0], sampled.tokens[2]] == [4, 6]


def test_a_row_that_is_not_finite_fails_although_its_mask_would_hide_it():
    masking, rows = masked_rows([Listed({4}), Listed({5})])
    logits = logits_of(2)
    logits[0, 60] = float("nan")
    sampled = masking.sample(logits, [draw(temperature=0)] * 2, [2] * 2, masking.begin(rows), row_views)
    assert sampled.failed == [True, False]


class Counted:
    """Reasoning that is closed by tokens 4 and 70 once its budget is used up."""

    def __init__(self, budget: ThinkingBudget, prompt) -> None:
        self.left, self.closing, self.prompt = budget.tokens, [4, 70], tuple(prompt)

    @property
    def over(self) -> bool:
        return not self.closing

    @property
    def due(self) -> int | None:
        return None if self.left else self.closing[0]

    def take(self, token: int) -> None:
        if self.left:
            self.left -= 1
        else:
            assert token == self.closing.pop(0)


class Budgets:
    """Hands out counters of reasoning, and keeps them."""

    def __init__(self) -> None:
        self.begun: list[Counted] = []

    def begin(self, budget: ThinkingBudget, prompt) -> Counted:
        self.begun.append(Counted(budget, prompt))
        return self.begun[-1]


def admitted(slot: int, budget: int | None, tokens=(1, 2), grammar: Grammar | None = None) -> Admit:
    thinking = None if budget is None else ThinkingBudget(budget)
    spec = SamplingSpec((("temperature", 0),))
    return Admit(
        slot,
        f"s{slot}",
        tokens,
        (0,),
        0,
        spec,
        0,
        prompt_tokens=2,
        max_new_tokens=9,
        grammar=grammar,
        thinking=thinking,
    )


def step(masking: GrammarMasking, slots: list[int], draws: list[RowSampling], logits: torch.Tensor):
    rows = [Row(slot, 1, 1, (), True) for slot in slots]
    return masking.sample(logits.clone(), draws, [2] * len(rows), masking.begin(rows), row_views)


def test_a_used_up_budget_leaves_one_token_and_the_other_rows_alone():
    logits, draws = logits_of(4), [draw(temperature=0.9)] * 4
    free, own = sample(logits.clone(), draws, [2] * 4, choose=CHOOSE), logits.log_softmax(-1)
    masking = GrammarMasking(BACKEND, Given([Listed({9})]), Budgets())
    for slot, (budget, grammar) in enumerate([(1, None), (None, None), (None, GRAMMAR), (0, None)]):
        masking.admit(admitted(slot, budget, grammar=grammar))
    told = [step(masking, [0, 1, 2, 3], draws, logits) for _ in range(4)]
    assert [one.tokens[0] for one in told] == [free.tokens[0], 4, 70, free.tokens[0]]
    assert [one.tokens[3] for one in told] == [4, 70, free.tokens[3], free.tokens[3]]
    assert [one.tokens[2] for one in told] == [9] * 4
    for one in told:
        assert [column[1] for column in one] == [column[1] for column in free]
    assert told[1].logprobs[0] == pytest.approx(float(own[0, 4]), abs=1e-5)
    assert [id_ for id_, _ in told[1].top_logprobs[0]] == own[0].topk(3).indices.tolist()


def test_a_row_is_not_watched_any_more_when_its_reasoning_is_over():
    masking = GrammarMasking(BACKEND, None, Budgets())
    masking.admit(admitted(0, 0))
    for token in (4, 70):
        assert step(masking, [0], [draw(temperature=0)], logits_of(1)).tokens == [token]
    assert masking.begin([Row(0, 1, 1, (), True)]) is None
    masking.admit(admitted(1, 3))
    masking.release(1)
    assert masking.begin([Row(1, 1, 1, (), True)]) is None


def test_after_a_preemption_a_budget_stands_where_it_stood():
    budgets = Budgets()
    masking = GrammarMasking(BACKEND, None, budgets)
    masking.admit(admitted(0, 2, tokens=(1, 2, 30, 31, 4)))
    assert budgets.begun[0].prompt == (1, 2)
    assert step(masking, [0], [draw(temperature=1.0)], logits_of(1)).tokens == [70]
    masking.admit(admitted(1, 1, tokens=(1, 2, 30, 4, 70, 9)))
    assert masking.begin([Row(1, 1, 1, (), True)]) is None


def test_a_row_that_is_not_finite_fails_although_its_token_is_due():
    masking = GrammarMasking(BACKEND, None, Budgets())
    masking.admit(admitted(0, 0))
    masking.admit(admitted(1, 0))
    logits = logits_of(2)
    logits[0, 60] = float("nan")
    sampled = step(masking, [0, 1], [draw(temperature=0)] * 2, logits)
    assert (sampled.failed, sampled.tokens[1]) == ([True, False], 4)
