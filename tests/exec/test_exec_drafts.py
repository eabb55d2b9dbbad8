"""Drafts through the real runner: every token, number and failure is as without drafts, for every kind of row.

The drafter knows the answer and says some of it wrong. The scheduler is the real one, the model a small transformer;
its logits differ in the last bits with the number of rows, which a library's product allows, so log probabilities are
held to a tolerance here, and to the bit with the default model (`test_e2e_drafts`).
"""

from __future__ import annotations

import random
import time
from copy import copy

import pytest
import torch
from test_exec_runner import BACKEND, CACHES, CPU, GOOD, SHAPE, Ticks, ToyLM, make_runner

from penstock.contract.events import DraftsJudged, Finished, FinishReason, Generated
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.plan import Draft, Row, StepPlan
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.contract.thinking import ThinkingBudget
from penstock.core import Scheduler
from penstock.exec import batch, grammar_masking, side_threads
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import TorchRunner
from penstock.sampling import SamplingParams

CONFIG = SchedulerConfig(
    140,
    block_size=4,
    max_num_seqs=12,
    max_num_batched_tokens=300,
    max_model_len=SHAPE.max_positions,
    weigh_drafts=False,
)
NEW = 14


class Strict:
    """A grammar whose masks and refusals depend on every token taken, and on nothing else."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def _allowed(self, token: int) -> bool:
        return (token + sum(self.taken) + len(self.taken)) % 3 == 0

    def mask(self) -> bytes:
        bits = sum(1 << token for token in range(SHAPE.vocab_size) if self._allowed(token))
        return bits.to_bytes((SHAPE.vocab_size + 7) // 8, "little")

    def take(self, token: int) -> bool:
        if token % 5 == len(self.taken) % 5:
            return False
        self.taken.append(token)
        return True

    def take_at_once(self, token: int) -> bool | None:
        """None for a refusal, which takes a search."""
        return self.take(token) or None

    def closing(self) -> int:
        return next(t for t in range(SHAPE.vocab_size) if self._allowed(t) and t % 5 != len(self.taken) % 5)

    def copy(self):
        other = copy(self)
        other.taken = [*self.taken]
        return other

    def foresee(self, most: int) -> tuple[int, ...]:
        return (self.closing(), 3, 3)[:most]


class Unready(Strict):
    """The same, but now and then its answers take longer than a step may wait."""

    def mask(self) -> bytes:
        self._dawdle(3)
        return super().mask()

    def take(self, token: int) -> bool:
        self._dawdle(2)
        return super().take(token)

    def take_at_once(self, token: int) -> bool | None:
        return None

    def _dawdle(self, every: int) -> None:
        if len(self.taken) % every == 1:
            time.sleep(0.12)


class Grammars:
    def check(self, grammar, room, tenant=""):
        """Refuse none."""
        return grammar

    def __init__(self, made=Strict) -> None:
        self._made = made

    def matcher(self, grammar, room, prompt=()) -> Strict:
        return self._made()


class Counted:
    """Reasoning of this many tokens, closed by tokens 4 and 70."""

    def __init__(self, budget: int) -> None:
        self._left, self._closing = budget, [4, 70]

    @property
    def over(self) -> bool:
        return not self._closing

    @property
    def due(self) -> int | None:
        return None if self._left else self._closing[0]

    def take(self, token: int) -> None:
        if self._left:
            self._left -= 1
        else:
            assert token == self._closing.pop(0)


class Budgets:
    def begin(self, budget, prompt) -> Counted:
        return Counted(budget.tokens)


KINDS = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0},
    {"seed": 11, "logprobs": 0, "temperature": 1.3},
    {"seed": 12, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"seed": 13, "repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 1},
    {"temperature": 0, "frequency_penalty": 1.9, "dry_multiplier": 2.0, "logprobs": 0},
    {"seed": 14, "xtc_probability": 0.5, "xtc_threshold": 0.05, "typical_p": 0.9},
    {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1},
]
GRAMMAR = {"grammar": Grammar(GrammarKind.REGEX, "x")}
THINKING = {"thinking": ThinkingBudget(5)}


def requests() -> list[SequenceRequest]:
    words = random.Random(5)
    made = []
    for number, fields in enumerate([*KINDS, KINDS[0], KINDS[4], KINDS[2], KINDS[0]]):
        prompt = tuple(words.randrange(SHAPE.vocab_size) for _ in range(words.randint(2, 17)))
        watched = [{}, GRAMMAR, GRAMMAR, THINKING, THINKING | GRAMMAR][max(0, number - len(KINDS) + 1)]
        spec = SamplingParams(**fields).spec()
        made.append(SequenceRequest(f"r{number}", prompt, number % 3, spec, StopRules(max_tokens=NEW), **watched))
    return made


def serve(asked, right=None, expected=None, count=3, model=None, made=Strict):
    """Run all to their end; returns events by id, and the number of steps. `right` is the share of right drafts."""
    kv = KVStore(CACHES, CONFIG.num_blocks, CONFIG.block_size, torch.float32, CPU)
    for cache in (*kv.keys, *kv.values):
        cache.fill_(float("nan"))
    runner = TorchRunner(model or ToyLM(), kv, 12, SHAPE.max_positions, Ticks(), BACKEND, Grammars(made), Budgets())
    scheduler, rng, steps = Scheduler(CONFIG), random.Random(1), 0
    events = {request.id: [] for request in asked}
    for request in asked:
        scheduler.submit(request)
    with pytest.MonkeyPatch.context() as patch:
        if made is Strict:  # so that the number of steps does not depend on how busy the machine is
            patch.setattr(grammar_masking, "_PATIENCE_SECONDS", 30.0)
            patch.setattr(grammar_masking, "_SHORT_PATIENCE_SECONDS", 30.0)
            patch.setattr(side_threads, "_LONG_SECONDS", 30.0)
        while scheduler.has_work:
            drafts = []
            for one in scheduler.draftable() if right is not None else ():
                known = sum(isinstance(event, Generated) for event in events[one.seq_id])
                coming = [event.token for event in expected[one.seq_id] if isinstance(event, Generated)][known:]
                tokens = [
                    t if rng.random() < right else (t + 1) % SHAPE.vocab_size for t in coming[: min(count, one.most)]
                ]
                drafts += [Draft(one.seq_id, tuple(tokens))] if tokens else []
            plan = scheduler.plan(drafts)
            for event in scheduler.commit(plan, runner.run(plan)):
                if not isinstance(event, DraftsJudged):
                    events[event.seq_id].append(event)
            scheduler.check()
            steps += 1
    return events, steps


PLAIN, PLAIN_STEPS = serve(requests())


def same(events, expected) -> None:
    """Equal events; log probabilities up to the last bits of a product."""
    assert events.keys() == expected.keys()
    for name in events:
        here, there = events[name], expected[name]
        assert [type(event) for event in here] == [type(event) for event in there], name
        for one, other in zip(here, there, strict=True):
            if isinstance(one, Generated):
                assert (one.token, one.rank, len(one.top)) == (other.token, other.rank, len(other.top)), name
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in other.top], name
                assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)
            elif isinstance(one, Finished):
                assert one == other


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 4])
def test_every_kind_of_row_says_what_it_says_without_drafts(right, count):
    events, steps = serve(requests(), right, PLAIN, count)
    same(events, PLAIN)
    if right == 0.0:
        assert steps == PLAIN_STEPS == NEW
    if right == 1.0:
        assert steps == 1 + -(-(NEW - 1) // (count + 1))


@pytest.mark.parametrize("number", range(len(KINDS) + 4))
def test_every_kind_alone(number):
    one = requests()[number]
    events, _ = serve([one], 0.7, PLAIN)
    same(events, {one.id: PLAIN[one.id]})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("right", [None, 0.7])
def test_rows_whose_form_is_not_ready_draw_later_what_they_would_have_drawn(right):
    events, steps = serve(requests(), right, PLAIN, made=Unready)
    same(events, PLAIN)
    assert steps > (PLAIN_STEPS if right is None else 0)


def test_what_is_tested_reaches_masks_penalties_and_budgets():
    assert len({tuple(e.token for e in events if isinstance(e, Generated)) for events in PLAIN.values()}) == len(PLAIN)
    closed = [e.token for e in PLAIN["r10"] if isinstance(e, Generated)][5:7]
    assert closed == [4, 70]


def test_a_row_that_is_not_finite_at_a_draft_fails_where_it_would_without_it():
    """The token that poisons the model is drawn as the third one; the fourth cannot be."""
    greedy = [r for r in requests() if r.id == "r1"]
    tokens = [event.token for event in PLAIN["r1"] if isinstance(event, Generated)]
    poisonous = next(t for at, t in enumerate(tokens) if at >= 2 and t not in (*tokens[:at], *greedy[0].prompt))
    plain, _ = serve(greedy, model=ToyLM(poisonous))
    drafted, steps = serve(greedy, 1.0, PLAIN, 6, ToyLM(poisonous))
    same(drafted, plain)
    assert plain["r1"][-1].reason is FinishReason.ERROR
    assert steps == 2 < len(plain["r1"])


def slots_behind_a_draft(patch) -> set[int]:
    """The slots that draw behind a draft that was right, kept up to date."""
    behind: set[int] = set()
    advance, confirm = batch.SlotTables.advance, batch.SlotTables.confirm_draft

    def advancing(tables, row):
        behind.discard(row.slot)
        advance(tables, row)

    def confirming(tables, slot):
        behind.add(slot)
        confirm(tables, slot)

    patch(batch.SlotTables, "advance", advancing)
    patch(batch.SlotTables, "confirm_draft", confirming)
    return behind


def plant_a_wrong_position(patch):
    """A draw behind a draft uses the random number of the place before."""
    behind, next_draws = slots_behind_a_draft(patch), batch.SlotTables.next_draws

    def early(tables, rows):
        samplings, positions = next_draws(tables, rows)
        return samplings, [at - (row.slot in behind) for row, at in zip(rows, positions, strict=True)]

    patch(batch.SlotTables, "next_draws", early)


def plant_a_view_without_the_drafts(patch):
    """Penalties behind a draft do not see the draft."""
    behind, views = slots_behind_a_draft(patch), batch.SlotTables.views

    def late(tables, slots):
        seen = views(tables, slots)
        ends = seen.ends - torch.tensor([[slot in behind] for slot in slots]).long()
        return type(seen)(seen.tokens, seen.prompt_ends, ends, seen.specs, seen.choices)

    patch(batch.SlotTables, "views", late)


def plant_a_draft_that_is_not_confirmed(patch):
    """The position of a right draft does not count as computed."""
    patch(batch.SlotTables, "confirm_draft", lambda tables, slot: None)


@pytest.mark.parametrize(
    "plant", [plant_a_wrong_position, plant_a_view_without_the_drafts, plant_a_draft_that_is_not_confirmed]
)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        same(serve(requests(), 1.0, PLAIN)[0], PLAIN)


@pytest.mark.parametrize(
    "row",
    [
        Row(0, 0, 4, (), False, (5,)),  # does not sample
        Row(0, 0, 9, (), True, (1,) * 6),  # no block for the last draft
        Row(0, 0, 3, (), True, (5,)),  # the known tokens are not all computed
    ],
)
def test_impossible_drafts_are_our_bug(row):

    runner, _ = make_runner(block_size=4)
    with pytest.raises(AssertionError):
        runner.run(StepPlan(0, (), (GOOD,), (row,)))
