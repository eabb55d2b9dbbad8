"""What a model in memory is, as plain values: where the memory goes, and what those who plan steps must know of it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.config import EngineConfig

__all__ = ["MemoryReport", "RunnerFacts", "readable_bytes"]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the memory goes, for the operator to read at start.

    Attributes:
        weight_bytes: what the model's parameters take.
        weight_formats: how they are kept, in words.
        kv_bytes: what the KV cache takes once all of it is used.
        kv_dtype: what it is kept in, as its name in torch.
        max_model_len: most tokens of one request.
        max_num_seqs: sequences that run at once.
        state_bytes: of recurrent state, that of running sequences and checkpoints together; 0 for none.
        checkpoints: of recurrent state; None for a model that carries none.
        generates: whether output is counted in a request's tokens; a model that only embeds has none.
        draft_bytes: what the draft model's parameters take; 0 where there is none.
        draft_formats: how they are kept, in words.
        draft_kv_bytes: of `kv_bytes`, what is the draft model's.
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
    generates: bool = True
    draft_bytes: int = 0
    draft_formats: str = ""
    draft_kv_bytes: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, of all sequences together."""
        return self.num_blocks * self.block_size

    def lines(self) -> tuple[str, ...]:
        """The report, a line each."""
        holds = f"{self.num_blocks} blocks, {self.kv_tokens} tokens in all, {self.kv_dtype}"
        forms = f": {self.weight_formats}" if self.weight_formats else ""
        state = () if self.checkpoints is None else (self._state_line(self.checkpoints),)
        draft = (self._draft_line(),) if self.draft_bytes else ()
        return (
            f"weights          {readable_bytes(self.weight_bytes)}{forms}",
            *draft,
            f"KV cache         {readable_bytes(self.kv_bytes)}: {holds}",
            *state,
            f"longest request  {self.max_model_len} tokens{', prompt and output together' if self.generates else ''}",
        )

    def _draft_line(self) -> str:
        kept = f"{readable_bytes(self.draft_bytes)}: {self.draft_formats}"
        return f"draft weights    {kept}; {readable_bytes(self.draft_kv_bytes)} of the KV cache are its own"

    def _state_line(self, checkpoints: int) -> str:
        holds = f"{self.max_num_seqs} running sequences, {checkpoints} checkpoints"
        return f"recurrent state  {readable_bytes(self.state_bytes)}: {holds}"


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """A runner that is ready, to whoever knows no tensors.

    Attributes:
        config: the operator's options; of a model that looks ahead, with steps as long as the longest prompt.
        memory: its sizes. A runner that is made for them again takes the same plans.
        vocab_size: logits of a row.
        embedding_size: values of an embedding.
        window: positions that any layer looks back to; None where a layer looks back to all.
        looks_ahead: tokens see later ones of their sequence: it embeds, and generates nothing.
        model_digest: names the model in block keys.
        kv_folder: where KV blocks are kept beyond the process; "" where they are not.
        state_folder: where recurrent states are kept beside them; "" where the model carries none.
        draft_context: positions that the draft model can compute; 0 where there is none.
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


def readable_bytes(count: int) -> str:
    """A number of bytes, in the largest binary unit of which there is one."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
