"""Whether a runner's result can belong to its row.

Decides from the row and its sequence's request alone. A mismatch is our bug, never a caller's.
"""

from __future__ import annotations

from penstock.contract.plan import Row, RowResult
from penstock.core.sequence import Seq

__all__ = ["mismatch"]


def mismatch(row: Row, seq: Seq, result: RowResult | None) -> str:
    """Why `result` cannot be the result of `row`; "" if it can."""
    request = seq.request
    if row.stored:
        short = result is None or (result == RowResult(row.slot, restored=result.restored))
        fits = short and (result is None or 0 <= result.restored < len(row.stored))
        return "" if fits else "a row that reads says something else than how far it came"
    completes = request.embedding is not None and row.start + row.count == len(request.prompt)
    if result is None:
        return "nothing came of a row that samples or completes an embedding" if row.sample or completes else ""
    if result.foreseen and (result.failure or result.waits or not row.sample):
        return "a row that failed, waits or does not sample foresees something"
    if len(result.guess) > row.guesses:
        return f"{len(result.guess)} tokens were guessed behind a row that wants {row.guesses}"
    if result.failure or result.waits or row.drafts:
        fault = _wrong_run(row, result)
        if fault or result.failure or result.waits:
            return fault
    elif len(result.tokens) != row.sample:
        return f"{len(result.tokens)} tokens came of a row that {'samples' if row.sample else 'does not sample'}"
    if (result.embedding is not None) != completes:
        return "an embedding came of a row that completes none, or none of one that does"
    return ""


def _wrong_run(row: Row, result: RowResult) -> str:
    """Why `result` cannot be the right drafts of `row`, and the token after them, a failure or a wait there."""
    drawn = tuple(token.id for token in result.tokens)
    broken_off = bool(result.failure) or result.waits
    right = drawn if broken_off else drawn[:-1]
    if broken_off and result.embedding is not None:
        return "a row that failed or waits has an embedding"
    if result.waits and (result.failure or not row.sample):
        return "a row waits that failed, or does not sample"
    if not (broken_off or drawn) or right != row.drafts[: len(right)]:
        return f"{drawn} came of a row with the drafts {row.drafts}"
    if not broken_off and drawn[-1:] == row.drafts[len(right) : len(drawn)]:
        return f"the row stopped at {drawn[-1]}, which was drafted"
    return ""
