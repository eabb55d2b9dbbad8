"""The size of a verification: how many requests, of what length, in how many schedules.

For a given model and options, the seed and these numbers determine the requests and schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError

__all__ = ["SMALL", "Budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """The size of a verification.

    Attributes:
        requests: sequences to draw; some are choices of the same request.
        schedules: ways to run them all together.
        seed: seeds everything that is drawn.
        prompt_tokens: length of the longest prompt; the model's context may allow less.
        new_tokens: most tokens generated for a request.

    Raises:
        ConfigError: a number is below 1; the error names it.
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
        """Length in tokens of the longest prompt drawn for a model with this context.

        Raises:
            ConfigError: the new tokens leave no position of the context for a prompt.
        """
        left = max_positions - self.new_tokens
        if left < 1:
            raise ConfigError(
                "new_tokens", f"{self.new_tokens} leave no room for a prompt in this model's context, {max_positions}"
            )
        return min(self.prompt_tokens, left)


SMALL = Budget(requests=8, schedules=3, prompt_tokens=96, new_tokens=16)
"""Enough to notice a kernel whose rows depend on the batch, in the time that a test may take."""
