"""What the draft model does in a step: which sequences it follows, and how many tokens it guesses for each.

It guesses after a step has drawn its tokens, and the next step computes the guesses. `draft_lengths` decides whether
they are worth the large model's time; this file decides whether they are worth the draft model's. `core.step_time`
learns what a pass and a position take, `core.draft_chances` how often guesses are right.

While guesses do not pay, one hundredth of the time is spent on single guesses, to find out whether they would. A
predictor of the model's own, which cannot catch up, then follows only a few of the new sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from penstock.contract.plan import Draft, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool
from penstock.core.draft_chances import MODEL, DraftChances
from penstock.core.draft_lengths import DELAY
from penstock.core.step_time import StepTimes
from penstock.core.steps import PlanBuilder

__all__ = ["Guessing"]

_MOST = 8
"""The most tokens of a guess. Each takes a pass, and is right only if all before it are."""

_PROBES = 0.01
"""The share of the time for guesses that are not expected to pay."""

_SAVED = 0.05
"""Seconds of that time that can be saved up, or what a probe takes if that is more; also the initial amount."""

_FEW = 16
"""Positions that the draft model may catch up on in any step."""

_LEVEL = 4
"""Positions by which it may be behind a sequence without counting their time."""

_LEAST_PAYING = 0.1
"""If guesses are worth their time in a smaller share of recent steps than this, few new sequences are followed: each
position of a followed sequence costs time."""

_FOLLOWED_ANYWAY = 8
"""One in this many new sequences is followed even if guesses do not pay, to find out whether they would."""

_RECENT_STEPS = 32
"""Steps over which the share of those with worthwhile guesses is averaged."""


class _Candidate(NamedTuple):
    """A row for which tokens could be guessed.

    Attributes:
        at: the number of the row in the plan.
        chance: that a guessed token is right if the ones before it are.
        most: the most tokens that could be used.
        lag: known positions that the draft model has not computed.
        behind: the same after the row has drawn, at most.
        share: how many of these one guess must pay for. An answer is assumed to go on for as long as it is now, so the
            cost of catching up is divided among that many guesses.
    """

    at: int
    chance: float
    most: int
    lag: int
    behind: int
    share: float


class Guessing:
    """What the scheduler decides about the draft model. Owned by `Drafting`.

    Args:
        config: says how far the draft model's context reaches, and whether guesses are weighed.
        pool: whose blocks guessed positions take.
        times: what steps and passes take.
        chances: what is known of guesses.
    """

    __slots__ = ("_allowance", "_chances", "_config", "_paying", "_pool", "_probe_seconds", "_times", "_unfollowed")

    def __init__(self, config: SchedulerConfig, pool: BlockPool, times: StepTimes, chances: DraftChances) -> None:
        self._config = config
        self._pool = pool
        self._times = times
        self._chances = chances
        self._allowance = _SAVED  # seconds for guesses that may not pay
        self._probe_seconds = 0.0  # of the last probe that was too expensive
        self._paying = 1.0  # the share of recent steps in which guesses were worth their time
        self._unfollowed = 0  # new sequences since the last one that was followed

    def choose_followed(self, builder: PlanBuilder) -> None:
        """Choose which new sequences a predictor of the model's own follows: few if guesses have not paid lately."""
        for at, admit in enumerate(builder.admits):
            if self._paying >= _LEAST_PAYING or self._unfollowed >= _FOLLOWED_ANYWAY - 1:
                self._unfollowed = 0
            else:
                self._unfollowed += 1
                builder.admits[at] = replace(admit, followed=False)

    def add(self, builder: PlanBuilder, spare: int) -> None:
        """Order guesses of the draft model for rows, as far as blocks are left.

        Args:
            builder: holds all rows of the plan, with their drafts.
            spare: blocks that must still be available afterwards.
        """
        found = list(self._candidates(builder))
        if not found:
            return
        if not self._config.weigh_drafts:
            self._order_all(builder, found, spare)
            return
        drawing = [row.start for row in builder.rows if row.sample]
        counts = self._worth(found, drawing)
        self._paying += (bool(counts) - self._paying) / _RECENT_STEPS
        if counts:
            self._order(builder, found, counts, len(drawing), spare)
        else:
            self._probe(builder, found, spare)

    def learn(self, result: StepResult) -> None:
        """Learn from a step that was computed."""
        if 0.0 < result.seconds < float("inf"):
            most = max(_SAVED, self._probe_seconds)
            self._allowance = min(most, self._allowance + _PROBES * result.seconds)
        if result.guessing is not None:
            self._times.learn_guessing(result.guessing)

    def _candidates(self, builder: PlanBuilder) -> Iterator[_Candidate]:
        for index, (row, seq) in enumerate(zip(builder.rows, builder.seqs, strict=True)):
            if not row.sample or seq.lag is None or seq.drawing > 1:  # the draft model's progress is not known
                continue
            drafts, end = len(row.drafts), row.start + row.count
            most = min(_MOST, seq.limit - end - 2, self._config.draft_context - end)
            if most < 1:
                continue
            chance = self._chances.of(seq.judgements, Draft(seq.id, (), MODEL))
            best = seq.guesses[0][0] if seq.guesses else None
            if best is not None and best.drafter != MODEL and self._chances.of(seq.judgements, best) > chance:
                continue  # what is repeated now is likely to be repeated further
            generated = max(1, len(seq.tokens) - len(seq.request.prompt))
            share = max(1.0, seq.lag / generated)
            yield _Candidate(index, chance, most, seq.lag, seq.lag + drafts + 1, share)

    def _worth(self, found: Sequence[_Candidate], drawing: list[int]) -> dict[int, int]:
        """How many tokens to guess, by place in `found`: one more pass as long as it yields more tokens per second.

        The step as a whole is the measure, as in `draft_lengths`. A pass costs the draft model's time, and the large
        model's time for the same positions in the next step.
        """
        seconds = self._times.of(self._times.decoding(drawing))
        each_pass, each = self._times.guessing(1, 0), self._times.guessing(0, 1)
        if not seconds or not (each_pass or each):
            return {}
        price = self._times.draft_price(drawing)
        counts: dict[int, int] = {}
        brought, taken = float(len(drawing)), seconds
        going = sorted(range(len(found)), key=lambda place: (-found[place].chance, place))
        for length in range(1, _MOST + 1):
            joining, gain, cost = [], 0.0, each_pass + (price.once if length == 1 else 0.0)
            for place in going:
                one = found[place]
                chance = one.chance**length
                took = price.each + each * (one.share if length == 1 else 1.0)
                if length <= one.most and chance * (taken + cost) >= (brought + gain) * took:
                    joining.append(place)
                    gain, cost = gain + chance, cost + took
            longest = min(self._config.step_seconds, seconds * (1 + DELAY) if len(joining) < len(drawing) else inf)
            if not joining or gain * taken < brought * cost or taken + cost > longest:
                break
            for place in joining:
                counts[place] = length
            brought, taken, going = brought + gain, taken + cost, joining
        return counts

    def _order(
        self, builder: PlanBuilder, found: Sequence[_Candidate], counts: dict[int, int], drawing: int, spare: int
    ) -> None:
        """Order `counts` guesses. A sequence that is far behind catches up first, over several steps."""
        budget = self._catching_up(builder, drawing)
        for place in sorted(counts):
            one = found[place]
            late = max(0, one.lag - _LEVEL)
            if late <= budget:
                self._order_row(builder, one.at, one.behind, counts[place], spare)
            elif budget > 0:
                self._order_row(builder, one.at, budget, 0, spare)
            budget -= min(late, budget)

    def _catching_up(self, builder: PlanBuilder, drawing: int) -> int:
        """Positions that the draft model may compute before it guesses, in the time of a step or of a part of one."""
        most = self._config.max_num_batched_tokens
        each = self._times.guessing(0, 1)
        if not each:
            return _FEW
        seconds = self._times.of(self._times.decoding([row.start for row in builder.rows if row.sample]))
        return min(most, max(_FEW, int(seconds * (1.0 if drawing == 1 else DELAY) / each)))

    def _probe(self, builder: PlanBuilder, found: Sequence[_Candidate], spare: int) -> None:
        """Order one token for one row, if the saved time pays for it. While its cost is unknown, it is free."""
        one = min(found, key=lambda each: (each.behind, each.at))
        follow = min(one.behind, self._catching_up(builder, 2))
        cost = self._times.guessing(1, follow)
        if cost <= self._allowance:
            self._allowance -= cost
            self._order_row(builder, one.at, follow, int(follow == one.behind), spare)
        else:
            self._probe_seconds = cost

    def _order_all(self, builder: PlanBuilder, found: Sequence[_Candidate], spare: int) -> None:
        """Order guesses of every length for every row, to test that no answer depends on them."""
        budget = self._config.max_num_batched_tokens
        for one in found:
            follow = min(one.behind, budget)
            budget -= follow
            if follow > 0:
                wanted = min(one.most, 1 + (builder.step + one.at) % 4) if follow == one.behind else 0
                self._order_row(builder, one.at, follow, wanted, spare)

    def _order_row(self, builder: PlanBuilder, index: int, follow: int, guesses: int, spare: int) -> None:
        """Order up to `guesses` tokens after row number `index`, as many as there are blocks for.

        The draft model computes the last drawn token and all guesses except the last.
        """
        row, seq, pool = builder.rows[index], builder.seqs[index], self._pool
        end, blocks = row.start + row.count, len(seq.lease.blocks)
        room = (blocks + max(0, pool.available - spare)) * pool.block_size - end
        if room > 0:
            guesses = min(guesses, room)
            pool.extend(seq.lease, max(0, pool.blocks_for(end + max(1, guesses)) - blocks))
            builder.order_guesses(index, follow, guesses, tuple(seq.lease.blocks[blocks:]))
