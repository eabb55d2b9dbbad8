"""How much is verified: how many requests of which sizes, under how many schedules.

Decides nothing about which requests or schedules; those follow from the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError

__all__ = ["SMALL", "Extent"]


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a verification.

    Attributes:
        requests: sequences to draw; some are choices of one ask.
        schedules: ways to run them all together.
        seed: of everything that is drawn.
        prompt_tokens: length of the longest prompt; the model's context may allow less.
        new_tokens: most tokens generated for a request.

    Raises:
        ConfigError: naming the number that is below 1.
    """

    requests: int = 32
    schedules: int = 8
    seed: int = 0
    prompt_tokens: int = 320
    new_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("requests", "schedules", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")

    def longest_prompt(self, max_positions: int) -> int:
        """Tokens of the longest prompt that is drawn for a model with this context.

        Raises:
            ConfigError: the context has no room for a prompt beside the new tokens.
        """
        room = max_positions - self.new_tokens
        if room < 1:
            raise ConfigError(
                "new_tokens", f"{self.new_tokens} leave no room for a prompt in this model's context, {max_positions}"
            )
        return min(self.prompt_tokens, room)


SMALL = Extent(requests=8, schedules=3, prompt_tokens=96, new_tokens=16)
"""Enough to notice a kernel that looks at its batch, in the time that a test may take."""
