"""Guesses that a sequence goes on as it did before, or as an earlier answer to the same caller did.

If an answer's grammar foresees tokens, they come first, and the guess follows them.

Needs no model, and is right where answers repeat something: an edited file, a summary with quotations, records of one
form, an agent's turns. One caller's answers are never used to guess another's: a right guess makes an answer faster,
and the timing would reveal them. Owned by the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.contract.plan import Draft, Draftable
from penstock.drafters.suffix_index import GRAM, LONGEST, TOKEN_BYTES, SuffixIndex

__all__ = ["SuffixDrafter"]

_LONGEST_INDEXED = 16_384
"""How many of a sequence's latest tokens are indexed when it is first seen: `TOKEN_BYTES` each, 5 ms for all."""

_REMEMBERED = 16_384
"""Most tokens of earlier answers kept per caller; before they exceed twice as many, all but the latest are dropped."""

_CALLERS = 64
"""Number of callers whose earlier answers are kept: the latest ones."""


class SuffixDrafter:
    """See the module, and `contract.ports.Drafter`.

    Args:
        most_bytes: memory for the earlier answers of all callers together.
    """

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        """Memory that earlier answers take; may be read by any thread."""
        self._most_bytes = most_bytes
        self._remembered = min(_REMEMBERED, most_bytes // (2 * TOKEN_BYTES))
        self._live: dict[str, _LiveSequence] = {}
        self._recent: OrderedDict[str, SuffixIndex] = OrderedDict()  # by scope, the latest last

    def draft(self, sequence: Draftable) -> tuple[Draft, ...]:
        """The foreseen tokens, then what followed an earlier occurrence of the sequence's end with these tokens.

        The longest match wins, in the sequence itself or in earlier answers; among equals, the sequence's own.
        """
        live = self._live.get(sequence.seq_id)
        if live is None:
            live = self._live[sequence.seq_id] = _LiveSequence(sequence)
        live.follow(sequence)
        foreseen, tokens = sequence.foreseen[: sequence.most], live.index.tokens
        if not foreseen:
            return self._repeated(sequence, live, tokens, sequence.most)
        first = Draft(sequence.seq_id, foreseen, "grammar")
        most = sequence.most - len(foreseen)
        if not most:
            return (first,)
        return (first, *self._repeated(sequence, live, [*tokens[-LONGEST:], *foreseen], most))

    def _repeated(self, sequence: Draftable, live: _LiveSequence, tokens: list[int], most: int) -> tuple[Draft, ...]:
        """At most `most` tokens that followed an earlier occurrence of the end of `tokens`."""
        own, index, drafter = live.index.match(tokens), live.index, "suffix"
        recent = self._recent.get(sequence.scope)
        if recent is not None:
            other = recent.match(tokens)
            if other is not None and (own is None or other.length > own.length):
                own, index, drafter = other, recent, "recent"
        if own is None:
            return ()
        following = index.after(own.end, most)
        return (Draft(sequence.seq_id, following, drafter, own.length),) if following else ()

    def forget(self, seq_id: str) -> None:
        """Drop a sequence that has ended, and remember its answer for its caller. An unknown one is no error."""
        live = self._live.pop(seq_id, None)
        if live is None:
            return
        answer = live.answer
        if len(answer) <= GRAM:
            return
        recent = self._recent.pop(live.scope, None) or SuffixIndex()
        before = recent.bytes
        if len(recent.tokens) + len(answer) > 2 * self._remembered:
            kept, recent = recent.tokens[-self._remembered :], SuffixIndex()
            recent.extend(kept)
        recent.extend(answer[-self._remembered :])
        self._recent[live.scope] = recent
        self.bytes += recent.bytes - before
        while len(self._recent) > _CALLERS or self.bytes > self._most_bytes:
            _, oldest = self._recent.popitem(last=False)
            self.bytes -= oldest.bytes


class _LiveSequence:
    """The index over one running sequence, as of its last `draft`."""

    __slots__ = ("_first", "_prompt_tokens", "index", "scope")

    def __init__(self, sequence: Draftable) -> None:
        self.index = SuffixIndex()
        self.scope = sequence.scope
        self._prompt_tokens = sequence.prompt_tokens
        self._first = max(0, len(sequence.tokens) - _LONGEST_INDEXED)  # the position of the first indexed token

    @property
    def answer(self) -> list[int]:
        """The sequence's generated tokens, as far as they are indexed."""
        return self.index.tokens[max(0, self._prompt_tokens - self._first) :]

    def follow(self, sequence: Draftable) -> None:
        """Index the tokens that are new in the sequence."""
        known = self._first + len(self.index.tokens)
        self.index.extend(sequence.tokens[known:])
