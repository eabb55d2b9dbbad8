"""Facts about a model for rooms that do not use tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.sampling import SamplingScalar

__all__ = [
    "GgufVocabulary",
    "HuggingFaceText",
    "KvCacheSpec",
    "ModelCard",
    "ModelFacts",
    "ModelShape",
    "StateSpec",
    "StepCost",
    "StepRow",
    "TextFiles",
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that the scheduler, the KV store and the tests need.

    Attributes:
        num_kv_heads: number of key heads, and of value heads; query heads share them in groups.
        head_dim: width of one head, `D` in shape comments.
        vocab_size: width of the logits; every token id lies below it.
        max_positions: longest context that the model was trained for.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The KV cache of one layer, or of several layers that share it.

    Attributes:
        heads: number of key heads, and of value heads.
        head_dim: width of one head.
        window: how many positions its layers attend to, the current one included; None for all. Earlier positions are
            never read again.
        value_dim: for a latent cache, which has one head and stores only keys: the value of a position is the last
            `value_dim` elements of its key. 0 if values are stored separately, as wide as keys.
    """

    heads: int
    head_dim: int
    window: int | None = None
    value_dim: int = 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state that a layer carries from token to token: a float32 array of this `shape` for each sequence."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRow:
    """The size of one row of a step, to estimate its cost.

    Attributes:
        computed: positions of its sequence that were computed before.
        count: positions that the row computes.
        samples: positions whose logits are needed.
    """

    computed: int
    count: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """The work of one step, independent of the machine. Costs can be added.

    Attributes:
        weight_bytes: bytes of weights to read.
        kv_bytes: bytes of keys and values to read.
        fp32_ops: multiplications and additions in float32.
        bf16_ops: multiplications and additions in bfloat16.
        int8_ops: multiplications and additions of 8-bit integers.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    fp32_ops: int = 0
    bf16_ops: int = 0
    int8_ops: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.fp32_ops + other.fp32_ops,
            self.bf16_ops + other.bf16_ops,
            self.int8_ops + other.int8_ops,
        )


@dataclass(frozen=True, slots=True)
class HuggingFaceText:
    """Text files of a directory in Hugging Face layout: `tokenizer.json` and the small JSON files beside it."""

    directory: str


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokenizer and chat template from a GGUF file's metadata (`tokenizer.ggml.*` and `tokenizer.chat_template`).

    Its `repr` omits the template and the fields with an entry per token.

    Attributes:
        file: path, for error messages.
        model: tokenizer kind: `gpt2` (byte-level BPE), `llama` (SentencePiece), `gemma4` (SentencePiece's alphabet
            and bytes, joined by merges), or `bert` (WordPiece).
        pre: name of the pre-tokenizer, such as `smollm` or `llama-bpe`; "" when the file has none.
        tokens: the vocabulary; the index is the token id.
        token_types: one per token (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte).
        merges: BPE merges, "left right", best first; empty for `llama` and `bert`.
        scores: one per token for `llama`; unused by other kinds.
        bos, eos, unknown: token ids, -1 when absent.
        add_bos: whether text should start with `bos`.
        add_space_prefix: SentencePiece's dummy prefix.
        chat_template: Jinja source, "" when the file has none.
        add_eos: whether text should end with `eos`, as embedding models expect.
    """

    file: str
    model: str
    pre: str
    tokens: tuple[str, ...] = field(repr=False)
    token_types: tuple[int, ...] = field(repr=False)
    merges: tuple[str, ...] = field(repr=False)
    scores: tuple[float, ...] = field(repr=False)
    bos: int
    eos: int
    unknown: int
    add_bos: bool
    add_space_prefix: bool
    chat_template: str = field(repr=False)
    add_eos: bool = False


TextFiles = HuggingFaceText | GgufVocabulary


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say, except for its weights.

    Attributes:
        name: the default name for clients.
        text: the files of its tokenizer and chat template, or the ones that the operator named instead.
        embedding: how embeddings are made if a request does not say.
        sampling_defaults: as in `ModelCard`.
        sampling_origin: the file that `sampling_defaults` come from; "" if there are none.
    """

    name: str
    text: TextFiles
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    sampling_defaults: tuple[tuple[str, SamplingScalar], ...] = ()
    sampling_origin: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients can know about a served model.

    Attributes:
        name: the name that clients use.
        created: Unix time of the engine's start.
        max_model_len: maximum number of tokens of prompt and output together.
        vocab_size: token ids in requests must be below it.
        has_chat_template: whether conversations can be rendered.
        template_variables: variables that callers may set in every chat template of the model.
        thinks: whether the model may write reasoning before its answer.
        hidden_size: length of a full embedding.
        sampling_defaults: (name, value) of each sampling parameter whose default differs from the API's.
        named_roles: roles for which the model's chat template uses a message's `name`.
        aliases: other names of the same model.
        embedding: how embeddings are made if a request does not say.
        any_name: whether requests may use any name for the model.
        generates: whether it generates text; False for a model that only embeds.
        takes_adapters: whether requests may name an adapter in place of the model.
        adapters: the adapters that they may name now.
    """

    name: str
    created: int
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    template_variables: frozenset[str] = frozenset()
    thinks: bool = False
    hidden_size: int = 0
    sampling_defaults: tuple[tuple[str, SamplingScalar], ...] = ()
    named_roles: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    any_name: bool = False
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    generates: bool = True
    takes_adapters: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which the model is listed, the main one first."""
        return (self.name, *self.aliases)

    def answers_to(self, name: str) -> bool:
        """Whether a request may use this name."""
        return self.any_name or name in self.names or name in self.adapters
