"""What rooms without tensors know of a model."""

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
        num_kv_heads: heads that keys and values have (grouped queries share them).
        head_dim: width of one head, `D` in shape comments.
        vocab_size: width of the logits; every token id lies below it.
        max_positions: longest context that the model was made for.
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
    """Keys and values that one layer keeps, or several layers share.

    Attributes:
        heads: key heads, and as many value heads.
        head_dim: width of one.
        window: positions that the layers which read it look back to, their own included; None for all. Earlier ones
            are never read again.
        value_dim: of a latent cache, which has one head and keys alone: a position's value is the last `value_dim`
            elements of its key. 0 for values of their own, as wide as keys.
    """

    heads: int
    head_dim: int
    window: int | None = None
    value_dim: int = 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state that a layer carries from token to token: float32 numbers of this `shape` for each sequence."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a step, to be counted.

    Attributes:
        computed: positions of its sequence that are computed already.
        count: positions that it computes.
        samples: positions whose logits it wants.
    """

    computed: int
    count: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step takes, whatever computes it; costs add up.

    Attributes:
        weight_bytes: of weights that are read.
        kv_bytes: of keys and values that are read.
        fp32_ops: multiplications and additions in float32.
        bf16_ops: the same in bfloat16.
        int8_ops: the same in 8-bit integers.
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
    """The text half of a directory in Hugging Face layout: `tokenizer.json` and the small JSON files around it."""

    directory: str


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The text half of a GGUF file, as read from its metadata (keys `tokenizer.ggml.*` and `tokenizer.chat_template`).

    Its `repr` leaves out the template and all that has an entry for each token.

    Attributes:
        file: path, for error messages.
        model: tokenizer kind: `gpt2` (byte-level BPE), `llama` (SentencePiece), `gemma4` (SentencePiece's alphabet
            and bytes, joined by merges), or `bert` (WordPiece).
        pre: name of the pre-tokenizer, such as `smollm` or `llama-bpe`; "" when the file has none.
        tokens: the vocabulary; the index is the token id.
        token_types: one a token (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte).
        merges: BPE merges, "left right", best first; empty for `llama` and `bert`.
        scores: one a token for `llama`; others do not read them.
        bos, eos, unknown: token ids, -1 when absent.
        add_bos: whether text is meant to start with `bos`.
        add_space_prefix: SentencePiece's dummy prefix.
        chat_template: Jinja source, "" when the file has none.
        add_eos: whether a text ends with `eos`, as embedding models want it.
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
    """What a model's files say, but for its weights, to whoever knows no tensors.

    Attributes:
        name: what clients call it unless the operator says otherwise.
        text: where its tokenizer and chat template come from; those that the operator named, if any.
        embedding: what an embedding is where a request does not say.
        sampling_defaults: as in `ModelCard`.
        sampling_origin: where these are written; "" if nowhere.
    """

    name: str
    text: TextFiles
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    sampling_defaults: tuple[tuple[str, SamplingScalar], ...] = ()
    sampling_origin: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a served model says of itself to clients.

    Attributes:
        name: the name that clients ask for.
        created: Unix time at which the engine was started.
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids in requests lie below it.
        has_chat_template: whether conversations can be rendered.
        template_variables: what callers may set in every chat template that the model has.
        thinks: whether the model may write reasoning before its answer.
        hidden_size: values of an embedding, before any are cut.
        sampling_defaults: (name, value) of each sampling parameter that has another value than usual where a request
            does not give one.
        named_roles: roles whose messages show a `name` in the model's chat template.
        aliases: other names of the same model.
        embedding: what an embedding is where a request does not say.
        any_name: whether it answers to whatever name is asked for.
        generates: whether it writes text; a model that only embeds does not.
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

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the model is listed under, the main one first."""
        return (self.name, *self.aliases)

    def answers_to(self, name: str) -> bool:
        """Whether a request for this name is served."""
        return self.any_name or name in self.names
