"""Drafts in a plan: which rows may carry drafts, and how many.

Drafts take what is left: they never displace a row, an admission or a block that another sequence may need. This file
does not know the drafters; it learns how often their guesses are right and what a draft costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from math import inf
from operator import mul

from penstock.contract.events import DraftsJudged
from penstock.contract.plan import Draft, Draftable, Guess, Row, SampledToken
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool
from penstock.core.draft_chances import DraftChances, judge
from penstock.core.draft_lengths import Offer, draft_lengths
from penstock.core.guessing import Guessing
from penstock.core.sequence import Seq
from penstock.core.spare_states import SpareStates
from penstock.core.step_time import DraftPrice, StepTimes
from penstock.core.steps import PlanBuilder

__all__ = ["Drafting"]

_MOST = 32
"""The most tokens of a guess that are considered."""

_RECENT = 1 / 8
"""The weight of a step in the average of what guesses promised."""

_PATIENCE = 16
"""The doubt from which on guesses for a sequence are sought less often: to seek, weigh and judge one takes about 25
microseconds, which adds up to one part in forty of a step with 8 rows. A row without a guess, or with a wrong one that
was not worth its time, adds one to the doubt; a right guess takes one away; a row that carries drafts resets it."""

_PAUSE = 4
"""Guesses for doubtful sequences are sought only in steps whose number is divisible by this: in the same step for all
of them, so that the other steps have nothing to weigh."""


class Drafting:
    """What the scheduler decides about drafts. Owned by it.

    Args:
        config: says how much a step computes at most, and whether drafts are weighed.
        pool: whose blocks drafted positions take.
        times: what steps take.
        spares: places for the state before each draft; None for a model that carries no state.

    Attributes:
        guessing: decides what the draft model does; None without a draft model.
    """

    __slots__ = ("_chances", "_config", "_pool", "_spares", "_times", "guessing")

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, times: StepTimes, spares: SpareStates | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._times = times
        self._spares = spares
        self._chances = DraftChances()
        self.guessing = Guessing(config, pool, times, self._chances) if config.draft_context else None

    def draftable(self, running: Iterable[Seq], step: int) -> Iterator[Draftable]:
        """The sequences whose next row could carry drafts: they decode, and their last token is known.

        A sequence whose guesses have not been worth their time lately is included only now and then.

        Args:
            running: sequences that hold a slot.
            step: the number of the next plan.
        """
        if self._nowhere:
            return
        patience = _PATIENCE if self._config.weigh_drafts and step % _PAUSE else inf
        for seq in running:
            if seq.doubt >= patience and not seq.foreseen:
                continue
            most = min(self._config.max_num_batched_tokens - 1, seq.limit - len(seq.tokens) - 1, _MOST)
            if self._computes_nothing(seq):
                continue
            if most > 0 and seq.remaining == 1 and not seq.drawing and seq.request.embedding is None:
                prompt, salt = len(seq.request.prompt), seq.request.cache_salt
                yield Draftable(seq.id, seq.tokens, most, prompt, salt, seq.foreseen)

    def add(self, builder: PlanBuilder, drafts: Sequence[Draft], spare: int, *, others_wait: bool = False) -> None:
        """Add drafts to rows, as far as they are worth their time and budget and blocks are left.

        Of two guesses for a sequence, the one with more expected tokens is taken. A draft ends before a stop id:
        nothing after it is wanted, and a grammar need not know how to go on past its end.

        Args:
            builder: holds all rows of the plan.
            drafts: guesses of other drafters than the draft model; several for one sequence follow each other.
            spare: blocks that must still be available afterwards.
            others_wait: whether a sequence waits to take the place of one that ends.
        """
        if self._nowhere:
            return
        given: dict[str, Guess] = {}
        for draft in drafts:
            given[draft.seq_id] = (*given.get(draft.seq_id, ()), draft)
        found: list[tuple[int, tuple[int, ...]]] = []
        offers: list[Offer] = []
        common = inf
        for index, seq in enumerate(builder.seqs):
            if not builder.rows[index].sample:
                continue
            if seq.drawing > 1 or self._computes_nothing(seq):  # its last token is not known
                common = min(common, seq.promised)
                continue
            guess, seq.offer, offer = given.get(seq.id, ()), None, seq.offer
            if not guess and offer is None:
                common = min(common, _note_promise(seq, ()))
                continue
            seq.guesses = self._ranked(seq, guess, () if offer is None else (offer,))
            tokens = _before(seq.stop_ids, tuple([token for draft in seq.guesses[0] for token in draft.tokens]))
            found.append((index, tokens))
            most = min(len(tokens), seq.limit - len(seq.tokens) - 1, _MOST)
            offers.append(self._chances_of(seq, seq.guesses[0])[: max(0, most)])
            common = min(common, _note_promise(seq, offers[-1]))
        if found:
            self._add_found(builder, found, offers, spare, inf if others_wait else common)
        if self.guessing is not None:
            self.guessing.choose_followed(builder)
            if builder.draft_budget > 0:
                self.guessing.add(builder, spare)

    def judge(self, seq: Seq, row: Row, drawn: Sequence[SampledToken]) -> list[DraftsJudged]:
        """Learn from the drawn tokens how good the guesses were. Returns a judgement of each part that the row carried.

        Call before the drawn tokens are appended.
        """
        guesses, seq.guesses = seq.guesses, ()
        if not guesses:
            seq.doubt = min(_PATIENCE, seq.doubt + 1)
            return []
        agrees = any(guess[0].tokens[0] == token.id for token in drawn[:1] for guess in guesses)
        seq.doubt = 0 if row.drafts else max(0, min(_PATIENCE, seq.doubt + (-1 if agrees else 1)))
        judged: list[DraftsJudged] = []
        for rank, guess in enumerate(guesses):
            carried = 0 if rank else len(row.drafts)  # drafts come from the first guess alone
            tokens = [token.id for token in drawn]
            for draft in guess:
                length = len(draft.tokens)
                self._chances.learn(seq.judgements, draft, tokens)
                right = judge(draft.tokens, tokens)[0]
                if carried > 0:
                    judged.append(DraftsJudged(seq.id, draft.drafter, min(carried, length), min(carried, right)))
                tokens, carried = tokens[length:] if right == length else [], carried - length
        return judged

    def _ranked(self, seq: Seq, *guesses: Guess) -> tuple[Guess, ...]:
        """The guesses for a sequence without empty ones, the one with the most expected tokens first."""
        there = [guess for guess in guesses if guess]
        if len(there) > 1:
            there.sort(key=lambda guess: -sum(accumulate(self._chances_of(seq, guess), mul)))
        return tuple(there)

    def _chances_of(self, seq: Seq, guess: Guess) -> list[float]:
        """For each token of a guess, the probability that it is right if the tokens before it are."""
        chances: list[float] = []
        for draft in guess:
            chances += [self._chances.of(seq.judgements, draft)] * len(draft.tokens)
        return chances

    def _add_found(
        self,
        builder: PlanBuilder,
        found: Sequence[tuple[int, tuple[int, ...]]],
        offers: Sequence[Offer],
        spare: int,
        common: float,
    ) -> None:
        """Add what was `found` (row number, tokens) to the rows, as far as it is worth its time."""
        starts = [row.start for row in builder.rows if row.sample and row.count == 1]
        drawing = [row.sample for row in builder.rows].count(True)
        seconds, price, row_price = 0.0, DraftPrice(), 0.0
        if self._config.weigh_drafts:
            seconds, price = self._times.of(self._times.decoding(starts)), self._times.draft_price(starts)
            row_price = self._times.row_price(starts)
        budget = builder.draft_budget
        if self._spares is not None:
            budget = min(budget, self._spares.available)
        target = self._config.step_seconds
        counts = draft_lengths(
            offers,
            drawing,
            seconds,
            price.each,
            budget,
            target,
            once=price.once,
            row_price=row_price,
            common=common,
        )
        for (index, tokens), wanted in zip(found, counts, strict=True):
            self._add_to_row(builder, index, tokens[:wanted], spare)

    def _add_to_row(self, builder: PlanBuilder, index: int, tokens: tuple[int, ...], spare: int) -> None:
        """Add as many of `tokens` to row number `index` as there are blocks for."""
        row, seq, pool = builder.rows[index], builder.seqs[index], self._pool
        end, blocks = row.start + row.count, len(seq.lease.blocks)
        room = (blocks + max(0, pool.available - spare)) * pool.block_size - end
        count = min(len(tokens), room)
        if count > 0:
            pool.extend(seq.lease, max(0, pool.blocks_for(end + count) - blocks))
            spares = () if self._spares is None else self._spares.take(count)
            builder.add_drafts(index, tokens[:count], tuple(seq.lease.blocks[blocks:]), spares)

    @property
    def _nowhere(self) -> bool:
        """Whether there is nowhere to keep the recurrent state before a draft."""
        return self._spares is not None and not self._config.spare_states

    def _computes_nothing(self, seq: Seq) -> bool:
        """Whether the next row of `seq` only draws, where an earlier one waits: its state has already moved on."""
        return seq.draw_waits and self._spares is not None


def _note_promise(seq: Seq, offer: Offer) -> float:
    """Note how many right tokens `offer` promises; returns that, or the average of recent steps if it is higher."""
    now = float(sum(accumulate(offer, mul)))
    seq.promised += (now - seq.promised) * _RECENT
    return max(now, seq.promised)


def _before(stop_ids: frozenset[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens in front of the first stop id."""
    return tokens if stop_ids.isdisjoint(tokens) else tuple(takewhile(lambda token: token not in stop_ids, tokens))
