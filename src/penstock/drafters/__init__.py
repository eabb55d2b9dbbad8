"""Drafters (`contract.ports.Drafter`): they guess the next tokens from text that was seen before.

A right guess saves steps; no answer depends on a guess, so a wrong one never shows to a caller. The core decides how
many of a guess's tokens are computed (`core.draft_lengths`). Uses the standard library alone.
"""

from penstock.drafters.suffix_drafter import SuffixDrafter

__all__ = ["SuffixDrafter"]
