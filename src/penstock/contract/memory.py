"""A loaded model as plain values: how much memory it takes, and what the scheduler must know about it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.answer_contract import AnswerContract
from penstock.contract.config import EngineConfig
from penstock.contract.known_times import KnownTimes

__all__ = ["MemoryReport", "RunnerFacts", "readable_bytes"]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """How much memory everything takes, for the operator to read at the start.

    Attributes:
        weight_bytes: size of the model's weights.
        weight_formats: their formats, in words.
        kv_bytes: size of the KV cache once all of it is used.
        kv_dtype: its data type, by torch's name.
        max_model_len: maximum number of tokens of one request.
        max_num_seqs: sequences that run at once.
        state_bytes: size of recurrent state: running sequences, checkpoints and spare places together; 0 for none.
        checkpoints: number of checkpoints of recurrent state; None for a model without.
        spare_states: number of places for the recurrent state before each draft.
        generates: whether the model generates text; False for a model that only embeds.
        draft_bytes: size of the draft model's weights; 0 without a draft model.
        draft_formats: their formats, in words.
        draft_kv_bytes: the part of `kv_bytes` that belongs to the draft model.
        ranks: of each rank that has a share of the model, its part of `weight_bytes` and of `kv_bytes`; () for none.
    """

    weight_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_dtype: str
    weight_formats: str = ""
    max_num_seqs: int = 0
    state_bytes: int = 0
    checkpoints: int | None = None
    spare_states: int = 0
    generates: bool = True
    draft_bytes: int = 0
    draft_formats: str = ""
    draft_kv_bytes: int = 0
    ranks: tuple[tuple[int, int], ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that the KV cache can hold, of all sequences together."""
        return self.num_blocks * self.block_size

    def lines(self) -> tuple[str, ...]:
        """The lines of the report."""
        holds = f"{self.num_blocks} blocks, {self.kv_tokens} tokens in all, {self.kv_dtype}"
        forms = f": {self.weight_formats}" if self.weight_formats else ""
        state = () if self.checkpoints is None else (self._state_line(self.checkpoints),)
        draft = (self._draft_line(),) if self.draft_bytes else ()
        return (
            f"weights          {readable_bytes(self.weight_bytes)}{forms}",
            *draft,
            *self._rank_lines(),
            f"KV cache         {readable_bytes(self.kv_bytes)}: {holds}",
            *state,
            f"longest request  {self.max_model_len} tokens{', prompt and output together' if self.generates else ''}",
        )

    def _rank_lines(self) -> tuple[str, ...]:
        shares = [(readable_bytes(weights), readable_bytes(kv)) for weights, kv in self.ranks]
        return tuple(
            f"rank {rank:<11} weights {weights}, KV cache {kv}, in a process of its own"
            for rank, (weights, kv) in enumerate(shares)
        )

    def _draft_line(self) -> str:
        kept = f"{readable_bytes(self.draft_bytes)}: {self.draft_formats}"
        return f"draft weights    {kept}; {readable_bytes(self.draft_kv_bytes)} of the KV cache are its own"

    def _state_line(self, checkpoints: int) -> str:
        holds = f"{self.max_num_seqs} running sequences, {checkpoints} checkpoints"
        if self.spare_states:
            holds += f", {self.spare_states} for guesses"
        return f"recurrent state  {readable_bytes(self.state_bytes)}: {holds}"


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """A runner that is ready, for code that does not use tensors.

    Attributes:
        config: the operator's options; for a model that looks ahead, with steps as long as the longest prompt.
        memory: its sizes. Another runner with the same sizes can execute the same plans.
        vocab_size: number of logits of a row.
        embedding_size: length of an embedding.
        window: the most positions that any layer attends to; None if a layer attends to all.
        looks_ahead: whether tokens attend to later ones, so that the model only embeds.
        model_digest: identifies the model in block keys.
        kv_folder: folder of saved KV blocks; "" if none are saved.
        state_folder: folder of saved recurrent states; "" if none are saved.
        draft_context: the most positions that the draft model can compute; 0 without a draft model.
        step_times: what steps should take, by the program's cost and the machine's limits; None where these cannot be
            measured.
        contract: what the bits of answers depend on, without the tokenizer; None if answers cannot be certified.
        uncertified: why they cannot; "" if they can.
    """

    config: EngineConfig
    memory: MemoryReport
    vocab_size: int
    embedding_size: int
    window: int | None
    looks_ahead: bool
    model_digest: bytes
    kv_folder: str = ""
    state_folder: str = ""
    draft_context: int = 0
    step_times: KnownTimes | None = None
    contract: AnswerContract | None = None
    uncertified: str = ""


def readable_bytes(count: int) -> str:
    """Format a number of bytes in the largest binary unit that is not larger than it."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
