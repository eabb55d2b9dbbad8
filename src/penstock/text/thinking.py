"""Limits reasoning to a token budget: once it is used up, decides which tokens close the reasoning.

Detects reasoning by the same rules as answer parsing (`ReasoningSplit`). Decides how the closing tag is spelled; a
part that the model has already written is not repeated. Does not know logits.
Invariant: the forced tokens depend only on the prompt's last tokens, the budget and the generated tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import Prompt
from penstock.contract.thinking import ThinkingBudget
from penstock.text.detokenizer import Detokenizer
from penstock.text.reasoning import THINK_TAGS, ReasoningSplit, ThinkTags
from penstock.text.reply import ReplyReader, opens_reasoning
from penstock.text.tokenizer import TextModel

__all__ = ["BudgetedThinking", "ReasoningBudgets"]


class ReasoningBudgets:
    """Makes and enforces the budgets of one model's requests; implements `contract.ports.ThinkingBudgets`.

    Safe to call from several threads.
    """

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._spelled: dict[str, tuple[int, ...]] = {}

    def make(self, tokens: int, prompt: Prompt, rendered: str, reader: ReplyReader | None) -> ThinkingBudget:
        """Make the budget for the answers to a prompt.

        Args:
            tokens: the maximum number of reasoning tokens.
            prompt: the prompt as requested.
            rendered: the prompt's text; a conversation's as the template wrote it.
            reader: the reader that parses the answers, if any: both must see the same text.

        Raises:
            InvalidParameter: this model does not think, thinks in a channel, or cannot spell the closing tag; names
                `thinking_token_budget`.
        """
        if not self._text.reply_format.thinks:
            message = "the served model does not think: its chat template knows no reasoning"
            raise InvalidParameter("thinking_token_budget", message, code="unsupported_parameter")
        if self._text.reply_format.channels:
            message = "the served model thinks in a channel of its own, which is not closed by a tag"
            raise InvalidParameter("thinking_token_budget", message, code="unsupported_parameter")
        tags = self._text.reply_format.tags
        if not self.spell(tags.closing):
            message = f"the served model's vocabulary cannot spell {tags.closing}"
            raise InvalidParameter("thinking_token_budget", message, code="unsupported_model")
        spelled = self._text.tokenizer.special_ids(tags.markers) | (reader.spelled if reader else frozenset())
        return ThinkingBudget(tokens, opens_reasoning(prompt, rendered, tags), tuple(sorted(spelled)))

    def begin(self, budget: ThinkingBudget, prompt: Sequence[int]) -> BudgetedThinking:
        """See the port."""
        detokenizer = Detokenizer(self._text.tokenizer, spelled=frozenset(budget.spelled), prompt=prompt)
        return BudgetedThinking(budget, detokenizer, self.spell, self._text.reply_format.tags)

    def spell(self, text: str) -> tuple[int, ...]:
        """The ids of `text` in any context; () if the vocabulary cannot spell it.

        They are the tokenizer's own, unless it adds something (SentencePiece's dummy space); else the longest match.
        """
        if text not in self._spelled:
            tokenizer = self._text.tokenizer
            usual = tokenizer.spellings(text, param="thinking_token_budget")
            exact = (ids for ids in usual if b"".join(map(tokenizer.token_bytes, ids)) == text.encode())
            self._spelled[text] = next(exact, ()) or tokenizer.longest_matches(text)
        return self._spelled[text]


class BudgetedThinking:
    """Implements `contract.ports.Thinking`. Owned by the runner, one per sequence.

    Args:
        detokenizer: fresh; owned by this object from now on.
        spell: gives the ids of a text.
        tags: the tags around reasoning.
    """

    __slots__ = ("_detokenizer", "_due", "_left", "_spell", "_split", "_tags")

    def __init__(
        self,
        budget: ThinkingBudget,
        detokenizer: Detokenizer,
        spell: Callable[[str], tuple[int, ...]],
        tags: ThinkTags = THINK_TAGS,
    ) -> None:
        self._left = budget.tokens
        self._tags = tags
        self._split = ReasoningSplit(opened=budget.opened, tags=tags)
        self._detokenizer = detokenizer
        self._spell = spell
        self._due: deque[int] = deque()
        self._close_if_used_up()

    @property
    def over(self) -> bool:
        """Whether no more reasoning can come."""
        return self._split.over

    @property
    def due(self) -> int | None:
        """The token that must come next; None if any may."""
        return self._due[0] if self._due else None

    def take(self, token: int) -> None:
        """Advance past `token`."""
        if self._due:
            expected = self._due.popleft()
            assert token == expected, f"token {token} stands where {expected} of the closing tag was due"
        elif self._split.inside:
            self._left -= 1
        self._split.push(self._detokenizer.push(token))
        self._close_if_used_up()

    def _close_if_used_up(self) -> None:
        if self._due or self._left > 0 or not self._split.inside:
            return
        # An incomplete character at the end separates the next token from a tag begun before it: write the whole tag.
        closing = self._tags.closing
        missing = closing if self._detokenizer.unfinished else closing[self._split.closing_begun :]
        self._due.extend(self._spell(missing))
