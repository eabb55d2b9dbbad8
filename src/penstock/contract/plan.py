"""What one step computes (`StepPlan`), and its results (`StepResult`).

These two values are all that passes between scheduler and runner. Results of rows are named tuples: one is made for
each token of each stream, and a frozen dataclass takes several times as long to make.

A plan is plain data: it can be printed, written to a file, replayed and explained. It holds no tensors and no token
values, except those of newly admitted sequences and of blocks to save: the runner already has what it sampled.
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
    """Everything a runner must know about a sequence, given once when it takes a slot.

    Attributes:
        slot: index in the runner's tables, `0 <= slot < max_num_seqs`; free until this step.
        seq_id: for logs and errors only.
        tokens: every known token: the prompt, and after a preemption also what was generated.
        blocks: block ids that hold (or will hold) the KV of positions `[0, len(blocks) * block_size)`, in order. With
            a window, blocks that no later position sees may belong to another sequence, also later in the runner's
            tables: they are never read again.
        computed: how many leading positions already have their KV in those blocks; `computed < len(tokens)`.
        sampling: the sequence's sampling parameters.
        choice: index of the choice, part of the randomness key.
        prompt_tokens: how many of `tokens` are the prompt; the rest was generated before a preemption. -1 for all.
        max_new_tokens: the most tokens to generate in all, including those in `tokens`.
        grammar: the grammar of the generated tokens; None for free text.
        embedding: the vector wanted instead of tokens; then no row of the sequence samples. None for tokens.
        thinking: how much reasoning the generated tokens may hold; None for any.
        checkpoint: the checkpoint slot with the recurrent state after `computed` positions; -1 if `computed` is 0 or
            the model carries none.
        followed: whether a predictor of the model's own follows the sequence: from here on, or never.
        adapter: the name of the sequence's adapter; "" for none.
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
    followed: bool = True
    adapter: str = ""


class Draftable(NamedTuple):
    """A sequence whose next row could carry drafts.

    Attributes:
        tokens: all its tokens; read them before the next call of the scheduler.
        most: the most drafts that could be used.
        prompt_tokens: how many of `tokens` are the prompt.
        scope: knowledge of other sequences may be used only within the same scope: their `cache_salt`.
        foreseen: the next tokens that its last row's result foresaw.
    """

    seq_id: str
    tokens: Sequence[int]
    most: int
    prompt_tokens: int = 0
    scope: str = ""
    foreseen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the next tokens of a sequence: at least one id of the vocabulary, right or wrong.

    Attributes:
        drafter: name of the drafter, for metrics.
        evidence: the drafter's own measure of confidence, at least 1: guesses of one drafter with similar evidence (in
            powers of two) are assumed to be right equally often.
    """

    seq_id: str
    tokens: tuple[int, ...]
    drafter: str = ""
    evidence: int = 1


Guess = tuple[Draft, ...]
"""The possible next tokens of a sequence, each draft following the one before; () for none."""


@dataclass(frozen=True, slots=True)
class Save:
    """Save a block beyond the process: it is full, and does not change until a plan hands it out again.

    Also used to save a recurrent state: that after a block's last position, in a checkpoint slot.

    Attributes:
        block: block id; for a state, the checkpoint slot.
        key: the key to find it by; for a state, the key of the block that it ends.
        parent: the key of the block before it, or the root of its sequence's keys.
        before: how many blocks are before it.
        tokens: its tokens, from which it can be recomputed.
    """

    block: int
    key: bytes
    parent: bytes
    before: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Compute positions `[start, start + count)` of the sequence in `slot`.

    The last positions of a sampling row may hold drafts: guesses of the next tokens. The runner draws at the last known
    position and, while the drawn token equals the draft in its place, at the next one. So it draws what it would draw
    without drafts, and a row yields one token more than it had right drafts. Positions of wrong drafts count as not
    computed: the next row starts there.

    A row may be planned while the one before it is still being computed. Then its last position holds the token that
    will be drawn there: plans carry no token values, and the runner has it in time. If the sequence turns out to have
    ended or failed, the row is computed in vain and its result ignored.

    If the model carries recurrent state, a row with drafts keeps the state before each in a spare place, and the
    next row resumes from the place before the first wrong one. A row behind one that waits has no drafts.

    A row with `stored` computes nothing: its positions are whole blocks with these keys, whose KV is read from the
    store. No further row of the sequence is planned until its result is known. If the model carries recurrent state,
    what was read counts as computed only together with the state at its end, which the last reading row of a sequence
    brings; a row that falls short takes the sequence back to where it was admitted.

    Attributes:
        count: at least 1, including drafts; a chunk of a prompt or a decoded token, the runner makes no difference.
        new_blocks: block ids to append to the sequence's table before this step.
        sample: whether tokens are drawn; true exactly when the row reaches the last known token (not counting drafts)
            and the sequence is not embedded.
        drafts: tokens of the last `len(drafts)` positions; () in a row that does not sample.
        checkpoints: where to keep recurrent state, in order of position, each after `start` and at most
            `start + count`; () if the model carries none.
        stored: keys of the blocks to read instead of computing; () in rows that compute.
        state: in the last reading row of a sequence with recurrent state: the key of the state at its end, which is
            read too, and kept in `checkpoints` if there are any; b"" in all other rows.
        spares: one spare place per draft, for the recurrent state before it; () if the model carries none.
        resume: the spare place that holds the recurrent state of the last row's right drafts, from which this row
            continues; -1 if all of them were right, or there were none.
        follow: positions that the draft model may compute to catch up with this sequence after the row has drawn; 0
            in a row that does not sample, and without a draft model.
        guesses: tokens that the draft model then guesses after the last drawn one, if it has caught up. It uses the
            sequence's blocks.
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
    spares: tuple[int, ...] = ()
    resume: int = -1
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
    """A step failed as a whole; the sequences with rows in it are computed one by one, and all others wait."""
    NEWCOMER = "newcomer"
    """Another tenant's newcomer took a slot in this step, and no other sequence is admitted with it."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The head of the queue was not admitted: it needs `need`, and there are `have`."""

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
        saves: blocks to save beyond the process, as they were before this plan; saving may fail.
        state_saves: checkpoints of recurrent state to save, as they were before this plan; saving may fail.
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
        """Positions that this step reads from the store instead, if they are still there."""
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
        logprob: its log probability under the raw distribution, or the processed one if the request says so; 0.0 if
            not requested.
        rank: its rank among all tokens by that probability, from 1; 0 if the log probability was not requested.
        top_logprobs: the top tokens at its position, as many as were requested.
    """

    id: int
    logprob: float = 0.0
    rank: int = 0
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of some tokens of a prompt under the model.

    Attributes:
        start: index of the first of these tokens in its prompt; at least 1, as nothing predicts the first token.
        logprobs: one a token, under the raw distribution.
        top_logprobs: for each token, the top tokens at its position, as many as requested.
        ranks: for each token, its rank among all tokens by likelihood, from 1.
    """

    start: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    ranks: tuple[int, ...]


class RowResult(NamedTuple):
    """The result of one row.

    Attributes:
        slot: the slot of the row.
        tokens: what a sampling row drew, in order of position: the right drafts and then one more, unless the row
            failed or waits there.
        prompt: scores of the prompt tokens that the row predicted; None if it predicted none or none were requested.
        embedding: the vector of a prompt that this row completed, float32, little-endian; None if none is wanted.
        failure: why the sequence cannot go on (for example, its logits are not finite), safe to show; "" if it can. The
            sequence ends with it, after `tokens`; other sequences are unaffected.
        waits: whether a sampling row has no next token yet because its grammar's mask is not ready. Its last known
            position then counts as not computed, and the next row starts there: it draws what this one would have
            drawn. A row that was planned after this one waits too.
        restored: in a row with `stored` that fell short: how many leading blocks were read; 0 if the model carries
            state. The rest is computed.
        foreseen: in a row that sampled: tokens that its grammar makes likely to follow; a guess.
        guess: what the draft model expects after the last drawn token; at most as many tokens as ordered.
        lag: known positions that the draft model has not computed; -1 if unknown.
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

    @property
    def right(self) -> tuple[SampledToken, ...]:
        """The right drafts of a row that did not fail: all drawn tokens but the last, or all of a row that waits."""
        return self.tokens if self.waits else self.tokens[:-1]


class GuessWork(NamedTuple):
    """The draft model's work in a step.

    Attributes:
        seconds: how long it took.
        passes: through the model, one after the other.
        positions: that they computed in all.
    """

    seconds: float
    passes: int
    positions: int


class StoreCounts(NamedTuple):
    """Progress of saving blocks since the runner's start.

    Attributes:
        written: blocks that were written to files.
        dropped: blocks that were handed out again before they were written.
        failed: blocks that could not be written to disk.
        damaged: files whose contents failed the check.
        evicted: files that were deleted to make room.
        bytes: size of the store, as far as is known.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0
    damaged: int = 0
    evicted: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan.

    Attributes:
        step: the plan's.
        rows: one for each row with a result, in plan order. A chunk in the middle of a prompt has none, unless its
            scores are wanted; nor has a row that read all its blocks.
        seconds: how long the step took, by the runner's clock. Time is data here: the core never reads a clock.
        restoring: the part of `seconds` that reading stored blocks took.
        store: the progress of saving; None if it has not changed since the last result.
        guessing: the draft model's work, included in `seconds`; None if it did nothing.
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
