"""What one step computes (`StepPlan`), and its results (`StepResult`).

These two values are all that passes between deciding and doing. What came of a row is in named tuples: one is
made for each token of each stream, and a frozen dataclass takes several times as long to make.

A plan is plain data: it can be printed, written to a file, replayed and explained. It holds no tensors and, beyond the
tokens of a newly admitted sequence and of blocks to be saved, no token values: the runner already has what it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.grammar import Grammar
from penstock.contract.sampling import SamplingSpec
from penstock.contract.thinking import ThinkingBudget

__all__ = [
    "Admit",
    "Checkpoint",
    "Draft",
    "Draftable",
    "Guess",
    "GuessWork",
    "PromptScores",
    "Row",
    "RowResult",
    "SampledToken",
    "Save",
    "Stall",
    "StallReason",
    "StepPlan",
    "StepResult",
    "StoreCounts",
    "TopLogprobs",
]


TopLogprobs = tuple[tuple[int, float], ...]
"""The top tokens at a position, each with its log probability, most likely first."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Keep the recurrent state that a sequence has after its first `position` positions in checkpoint `slot`."""

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Admit:
    """All a runner must learn about a sequence, once, when it takes a slot.

    Attributes:
        slot: index in the runner's tables, `0 <= slot < max_num_seqs`; free until this step.
        seq_id: for logs and errors only.
        tokens: every token known so far: the prompt, and after a preemption what was generated too.
        blocks: block ids that hold (or will hold) the KV of positions `[0, len(blocks) * block_size)`, in order. Under
            a window, those that no position to come sees may be another sequence's; so may they in the runner's tables
            later: they are never read again.
        computed: how many leading positions already have their KV in those blocks; `computed < len(tokens)`.
        sampling: the sequence's sampling parameters.
        choice: index of the choice, part of the randomness key.
        prompt_tokens: how many of `tokens` are the prompt; the rest was generated before a preemption. -1 for all.
        max_new_tokens: most tokens that may be generated in all, those in `tokens` included.
        grammar: the form that the generated tokens must have; None for free text.
        embedding: the vector that is wanted in place of tokens: no row of the sequence samples. None for tokens.
        thinking: how much reasoning the generated tokens may hold; None for any.
        checkpoint: the checkpoint slot that holds the recurrent state after `computed` positions; -1 where `computed`
            is 0, or the model carries none.
    """

    slot: int
    seq_id: str
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int
    sampling: SamplingSpec
    choice: int
    _: KW_ONLY
    prompt_tokens: int = -1
    max_new_tokens: int = 0
    grammar: Grammar | None = None
    embedding: EmbeddingSpec | None = None
    thinking: ThinkingBudget | None = None
    checkpoint: int = -1


class Draftable(NamedTuple):
    """A sequence whose next row could carry drafts.

    Attributes:
        tokens: all of it; to be read before the scheduler is called again.
        most: more drafts could not be of use.
        prompt_tokens: how many of `tokens` are the prompt.
        scope: what is known of other sequences may be used for those of the same scope alone: their `cache_salt`.
        foreseen: what its last row's result said of the tokens that come next.
    """

    seq_id: str
    tokens: Sequence[int]
    most: int
    prompt_tokens: int = 0
    scope: str = ""
    foreseen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the tokens that come next in a sequence: at least one id of the vocabulary, right or wrong.

    Attributes:
        drafter: who guesses, in a word for metrics.
        evidence: how much speaks for it, for its drafter to say: guesses of one drafter with about as much evidence are
            taken to be right about as often. From 1 on, and it counts in powers of two.
    """

    seq_id: str
    tokens: tuple[int, ...]
    drafter: str = ""
    evidence: int = 1


Guess = tuple[Draft, ...]
"""What may come next in a sequence, each draft behind the one before; () for nothing."""


@dataclass(frozen=True, slots=True)
class Save:
    """Keep a block beyond the process: it is full, and stays as it is until a plan hands it out again.

    The same says which recurrent state is kept: that after a block's last position, in a checkpoint slot.

    Attributes:
        block: its id; of a state the checkpoint slot.
        key: under which it will be asked for; of a state the key of the block that it ends.
        parent: the key of the block before it, or the root of its sequence's keys.
        before: how many blocks are before it.
        tokens: its tokens, by which it can be computed again.
    """

    block: int
    key: bytes
    parent: bytes
    before: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Compute positions `[start, start + count)` of the sequence in `slot`.

    The last positions of a sampling row may hold drafts: guesses of the tokens that come next. The runner draws at the
    last known position and, as long as what it drew equals the draft in that place, at the next one; so what is drawn
    is what would be drawn without drafts, and a row brings one token more than it had drafts that were right.
    Positions of drafts that were wrong count as not computed: the next row starts there.

    A row may be planned while the one before it is still being computed. Then its last position holds the token that is
    drawn there: plans carry no token values, and the runner has it in time. Where that sequence turns out to have ended
    or failed, the row is computed in vain and what came of it is ignored.

    A row with `stored` computes nothing: its positions are whole blocks, of which these are the keys, and their KV is
    read from where it was saved. Nobody plans another row behind it before it is known how far it came. Where the model
    carries state, what is read counts as computed only with the state at its end, which the last of a sequence's
    reading rows brings: one that comes short takes the sequence back to where it was admitted.

    Attributes:
        count: at least 1, drafts included; prefill chunk or decode, the runner does not care which.
        new_blocks: block ids appended to the sequence's table before this step.
        sample: whether tokens are drawn; true exactly when the row catches up with every token known (drafts apart),
            so that the first one drawn is the next one, and the sequence is not an embedding's.
        drafts: tokens of the last `len(drafts)` positions; () in a row that does not sample.
        checkpoints: where to keep recurrent state on the way, in order of position, each after `start` and at most
            `start + count`; () where the model carries none.
        stored: keys of the blocks that are read instead of computed; () in all rows that compute.
        state: of the last row that reads for a sequence that carries state: the key of the state at its end, which is
            read too, and kept in `checkpoints` if there are any; b"" in all others.
        follow: positions that the draft model may compute to catch up with this sequence, after the row has drawn; 0 in
            a row that does not sample, and where there is no draft model.
        guesses: tokens that the draft model then guesses behind the last one drawn, if it has caught up. The blocks
            that it needs for that are the sequence's.
    """

    slot: int
    start: int
    count: int
    new_blocks: tuple[int, ...]
    sample: bool
    drafts: tuple[int, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    stored: tuple[bytes, ...] = ()
    state: bytes = b""
    follow: int = 0
    guesses: int = 0


class StallReason(StrEnum):
    """Why the head of the waiting queue was not admitted in this step."""

    NO_BLOCKS = "no_blocks"
    NO_SLOT = "no_slot"
    NO_BUDGET = "no_budget"
    SHARED_PREFIX = "shared_prefix"
    """Its next block is being computed by a running sequence now; waiting for that is cheaper than doing it twice."""
    SUSPECTS = "suspects"
    """A step failed as a whole; those who had a row in it are computed one by one, and all others wait."""
    NEWCOMER = "newcomer"
    """Another tenant's newcomer took a slot in this step, and nobody is admitted beside it."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The waiting head stays where it is: it needs `need` of what there are `have` of."""

    seq_id: str
    reason: StallReason
    need: int
    have: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Apply in this order: `releases`, then `saves`, then `admits`, then `rows`.

    Attributes:
        step: counts from 0 without gaps.
        releases: slots whose sequence is gone (finished, aborted or preempted); the runner forgets them.
        rows: what to compute; empty when there is nothing to do. At most one row a slot.
        stalls: at most one: the waiting head, if it could not be admitted.
        waiting: how many sequences are still waiting after this plan.
        saves: blocks to keep beyond the process, each as it was before this plan; a wish, and no promise.
        state_saves: checkpoints of recurrent state to keep beyond it, as they were before this plan; a wish too.
    """

    step: int
    releases: tuple[int, ...]
    admits: tuple[Admit, ...]
    rows: tuple[Row, ...]
    stalls: tuple[Stall, ...] = ()
    waiting: int = 0
    saves: tuple[Save, ...] = ()
    state_saves: tuple[Save, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Positions computed by this step."""
        return sum([row.count for row in self.rows if not row.stored])

    @property
    def num_restored(self) -> int:
        """Positions that this step reads instead, if they are there."""
        return sum([row.count for row in self.rows if row.stored])

    def explain(self) -> str:
        """One line for people: what the step does and why the queue did not move."""
        prefill = sum(row.count for row in self.rows if row.count > 1 and not row.stored)
        text = (
            f"step {self.step}: {len(self.rows)} rows, {self.num_tokens} tokens ({prefill} in chunks), "
            f"{len(self.admits)} admitted, {len(self.releases)} released, {self.waiting} waiting"
        )
        if self.num_restored:
            text += f", {self.num_restored} tokens read from the store"
        for stall in self.stalls:
            text += f"; {stall.seq_id} waits: {stall.reason} (needs {stall.need}, has {stall.have})"
        return text


class SampledToken(NamedTuple):
    """A token that a row drew.

    Attributes:
        id: the token.
        logprob: its log probability under the raw distribution, or the processed one if the request says so; 0.0
            where the request did not ask for it.
        rank: its place among all tokens by that probability, from 1; 0 where the log probability was not asked for.
        top_logprobs: the top tokens at its position, as many as were requested.
    """

    id: int
    logprob: float = 0.0
    rank: int = 0
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the model thought of some tokens of a prompt, in the places where they stand.

    Attributes:
        start: index of the first of these tokens in its prompt; at least 1, as nothing predicts the first token.
        logprobs: one a token, under the raw distribution.
        top_logprobs: beside them, the top tokens at each position, as many as were requested.
        ranks: beside them, each token's place among all tokens by likelihood, from 1.
    """

    start: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    ranks: tuple[int, ...]


class RowResult(NamedTuple):
    """What came of one row.

    Attributes:
        slot: whose row it was.
        tokens: what a sampling row drew, in order of position: the drafts that were right, and then one more, unless
            the row failed or waits there.
        prompt: scores of the prompt tokens that the row predicted; None where it predicted none or nobody asked.
        embedding: the vector of a prompt that this row completed, float32, little-endian; None where none is wanted.
        failure: why the sequence cannot go on (say, its logits are not finite), safe to show; "" where it can. The
            sequence ends with it, after `tokens`; other sequences are unharmed.
        waits: whether a sampling row has no next token yet, because what its form allows is still being found out. Its
            last known position then counts as not computed, and the next row starts there: it draws what this one
            would have drawn. A row that was planned behind this one waits too.
        restored: of a row with `stored` that came short: how many leading blocks were read, 0 where the model carries
            state. The rest is to be computed.
        foreseen: of a row that sampled: tokens that its form makes likely to come behind those that it drew; a guess.
        guess: what the draft model takes to come next, behind the last token drawn; at most as many as were wanted.
        lag: known positions that the draft model has not computed; -1 where nobody said.
    """

    slot: int
    tokens: tuple[SampledToken, ...] = ()
    prompt: PromptScores | None = None
    embedding: bytes | None = None
    failure: str = ""
    waits: bool = False
    restored: int = 0
    foreseen: tuple[int, ...] = ()
    guess: tuple[int, ...] = ()
    lag: int = -1


class GuessWork(NamedTuple):
    """What the draft model did in a step.

    Attributes:
        seconds: how long it took.
        passes: through the model, one after the other.
        positions: that they computed, all together.
    """

    seconds: float
    passes: int
    positions: int


class StoreCounts(NamedTuple):
    """What became of blocks that were to be saved, since the runner's start.

    Attributes:
        written: blocks that are in files now, and were not.
        dropped: blocks that were handed out again before they were written.
        failed: blocks that the disk did not take.
        damaged: files that were found not to be what was written.
        evicted: files that made place.
        bytes: what the store takes, as far as is known.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0
    damaged: int = 0
    evicted: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.

    Attributes:
        step: the plan's.
        rows: one for each row of the plan that has something to say, in the plan's order. A chunk in the middle of a
            prompt has nothing to say, unless its scores are wanted; nor has a row that read all that it was to.
        seconds: how long the step took, by the runner's clock. Time is data here: the core never reads a clock.
        restoring: seconds of these that reading stored blocks took.
        store: how saving goes; None where nothing has changed since the last result.
        guessing: what the draft model did, within `seconds`; None where it did nothing.
    """

    step: int
    rows: tuple[RowResult, ...] = ()
    seconds: float = 0.0
    restoring: float = 0.0
    store: StoreCounts | None = None
    guessing: GuessWork | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that this step drew."""
        return sum([len(row.tokens) for row in self.rows])
