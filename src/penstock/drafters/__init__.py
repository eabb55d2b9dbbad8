"""Who guesses what comes next (`contract.ports.Drafter`): from text that was seen before.

Guesses save steps or do not; no answer depends on them, and nothing here can be wrong in a way that a caller sees. How
many of a guess's tokens are computed is decided by the core (`core.draft_lengths`). The standard library alone.
"""

from penstock.drafters.suffix_drafter import SuffixDrafter

__all__ = ["SuffixDrafter"]
