"""What the scheduler is told about model, memory and the operator's wishes. `loading` writes it; a trace carries it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from penstock.contract.errors import ConfigError
from penstock.contract.known_times import KnownTimes

__all__ = ["POLICIES", "SchedulerConfig", "most_blocks"]

POLICIES = ("fcfs", "priority", "fair")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything that the scheduler knows about the world outside.

    Attributes:
        num_blocks: KV blocks in the pool.
        block_size: tokens a block holds.
        max_num_seqs: sequences that run at once; also the number of slots.
        max_num_batched_tokens: most positions that one step computes; at least `max_num_seqs`.
        max_model_len: most tokens of one sequence, prompt and output together.
        policy: `fcfs` (arrival order), `priority` (lower number first, then arrival), or `fair` (first the tenant that
            got least, relative to its share).
        prefix_caching: whether full blocks are kept and found again.
        max_bypasses: how many admissions may pass a waiting head that does not fit before all others wait for it.
        model_digest: names the model in block keys, so that models never share KV blocks.
        depth: plans that may be in flight at once; at most the runner's (`contract.ports.OverlappingRunner`).
        window: the most positions that any layer looks back to, the current one included; None if a layer looks back to
            all. Blocks before the window are given back.
        checkpoints: slots for recurrent state; None for a model that carries none. If it is a number, sequences are
            continued only from checkpoints.
        spare_states: places for the recurrent state before each draft; a model that carries state has at most as many
            drafts in flight.
        checkpoint_interval: positions between the checkpoints of a long prompt; a multiple of `block_size`, or
            0 for checkpoints at ends and branches only.
        looks_ahead: tokens see later ones of their sequence, so that a prompt is computed whole, in one step, and
            nothing of it can be kept or continued: sequences are embedded only.
        step_target_ms: milliseconds that a step may take while any sequence decodes, as predicted from earlier steps;
            prompts get what decoding leaves of it. 0: as long as `max_num_batched_tokens` positions take.
        weigh_drafts: compute guesses only as far as they are likely to save time; otherwise all for which there is
            room, as `penstock verify` needs.
        storing: whether full blocks are saved beyond the process, and stored ones read instead of computed.
        draft_context: positions that the draft model can compute; 0: there is no draft model.
        step_times: what is known of step times before the first step; None if nothing is.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    policy: str = "fcfs"
    prefix_caching: bool = True
    max_bypasses: int = 16
    model_digest: bytes = b""
    depth: int = 1
    window: int | None = None
    checkpoints: int | None = None
    checkpoint_interval: int = 0
    spare_states: int = 0
    looks_ahead: bool = False
    step_target_ms: int = 0
    weigh_drafts: bool = True
    storing: bool = False
    draft_context: int = 0
    step_times: KnownTimes | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", f"must be at least 1, got {self.window}")
        if self.checkpoints is not None and self.checkpoints < 0:
            raise ConfigError("checkpoints", f"must be at least 0, got {self.checkpoints}")
        if self.checkpoint_interval < 0 or self.checkpoint_interval % self.block_size:
            raise ConfigError(
                "checkpoint_interval",
                f"must be a multiple of block_size ({self.block_size}), got {self.checkpoint_interval}",
            )
        if self.spare_states and self.checkpoints is None:
            raise ConfigError("spare_states", "are of a model that carries recurrent state")
        for name in ("max_bypasses", "step_target_ms", "draft_context", "spare_states"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must be at least 0, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is below max_num_seqs ({self.max_num_seqs}): every running sequence"
                " must be able to decode in each step",
            )
        if self.policy not in POLICIES:
            raise ConfigError("policy", f"must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.storing and (not self.prefix_caching or self.window is not None):
            raise ConfigError("storing", "needs a prefix cache, and a model with a layer that looks back to all")
        if self.draft_context and (self.window is not None or self.looks_ahead):
            raise ConfigError("draft_context", "needs a model that generates, with a layer that looks back to all")
        if self.looks_ahead:
            self._check_looking_ahead()

    def _check_looking_ahead(self) -> None:
        """Make sure that every prompt fits one step, and that no setting would keep a part of it."""
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is below max_model_len ({self.max_model_len}): a model that looks ahead"
                " computes a prompt in one step",
            )
        kept = {"prefix_caching": self.prefix_caching, "window": self.window, "checkpoints": self.checkpoints}
        for name, value in kept.items():
            if value is not None and value is not False:
                raise ConfigError(name, f"must not be set for a model that looks ahead, got {value!r}")

    @property
    def step_seconds(self) -> float:
        """`step_target_ms` in seconds; infinity if there is no target."""
        return self.step_target_ms / 1000 or inf

    def most_blocks(self, num_tokens: int) -> int:
        """See the function of this name."""
        return most_blocks(num_tokens, self.block_size, self.max_num_batched_tokens, self.window)


def most_blocks(num_tokens: int, block_size: int, max_num_batched_tokens: int, window: int | None) -> int:
    """The most blocks that a sequence of so many tokens needs at once, if nothing else is in flight.

    With a window, they hold the positions that the next one sees, and the positions of one step.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    seen, new = -(-(window - 1) // block_size) + 1, -(-max_num_batched_tokens // block_size)
    return min(whole, seen + new)
