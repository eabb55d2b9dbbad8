"""Drafters (`contract.ports.Drafter`): they guess the next tokens from text that was seen before.

A right guess saves steps. No answer depends on a guess, so a caller never sees a wrong one. The core decides how many
of a guess's tokens are computed (`core.draft_lengths`). Uses only the standard library.
"""

from penstock.drafters.suffix_drafter import SuffixDrafter

__all__ = ["SuffixDrafter"]
