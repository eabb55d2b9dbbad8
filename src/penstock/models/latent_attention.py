"""Attention over a latent (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): sizes, tensors and operations.

Keys and values of all heads are projected from one latent per position. Only this latent is cached, with a rotated part
of the key that all heads share. The key up-projection is applied to queries before attention, and the value
up-projection to the result after it (absorbed), so there is one key head, `[rotated part | latent]`, whose values are
the latent.

Decides where checkpoints store each part. They fuse the key and value up-projections head by head, or store the two
separately, the first transposed (GGUF). They rotate neighbouring elements, while this engine rotates the two halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import StackedWeight
from penstock.kernels.linear import Weight
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WIDTH
from penstock.models.rope_config import read_rope
from penstock.nn.blocks import Normalization, Projection, rms_norm
from penstock.nn.operations import Attend, Heads, Operations, ProjectHeads, Register, Rotate
from penstock.nn.rope import Rope, RotaryTable, YarnScaling, yarn_temperature
from penstock.nn.weight_loader import WeightLoader

__all__ = ["LatentAttention", "LatentSizes", "bind_latent_attention", "read_latent_rope", "read_latent_sizes"]

_EPS = 1e-6  # epsilon of the latents' norms, whatever the config says about other norms


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of attention over a latent.

    Attributes:
        heads: number of query heads.
        query_rank: width of the latent that queries are projected from; 0 if they are projected from the stream.
        rank: width of the latent that keys and values are projected from.
        rotated: rotated elements of a query or key head.
        plain: elements of a query or key head that are not rotated.
        values: width of one head's values.
    """

    heads: int
    query_rank: int
    rank: int
    rotated: int
    plain: int
    values: int

    @property
    def kept(self) -> int:
        """Width of a cached position."""
        return self.rotated + self.rank

    @property
    def cache(self) -> KvCacheSpec:
        """The cache of one layer."""
        return KvCacheSpec(heads=1, head_dim=self.kept, value_dim=self.rank)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Attention over a latent, bound to its weights.

    Attributes:
        query_latent: `[query_rank, H]`, or None.
        query_norm: norm of the query latent, or None.
        query: `[heads * (rotated + plain), query_rank or H]`.
        latent: `[rotated + rank, H]`.
        latent_norm: norm of the last `rank` columns of `latent`'s output.
        to_latent: `[heads, rank, plain]`, the key up-projection, transposed.
        to_values: `[heads, values, rank]`, the value up-projection.
        output: `[H, heads * values]`.
        cache: index into `Program.caches`.
    """

    sizes: LatentSizes
    query_latent: Projection | None
    query_norm: Normalization | None
    query: Projection
    latent: Projection
    latent_norm: Normalization
    to_latent: StackedWeight
    to_values: StackedWeight
    output: Projection
    rope: RotaryTable
    spec: AttentionSpec
    cache: int

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        sizes, kept = self.sizes, self.sizes.kept
        q = Register("q", sizes.heads * (sizes.rotated + sizes.plain))
        asked, latent = Register("asked", sizes.heads * kept), Register("latent", kept)
        mixed, values = Register("mixed", sizes.heads * sizes.rank), Register("values", sizes.heads * sizes.values)
        normed = latent.columns(sizes.rotated, sizes.rank)
        return (
            *self._queries(x, q),
            self.latent.linear(latent, x),
            *self.latent_norm(normed, normed),
            ProjectHeads(asked, q, self.to_latent, sizes.rotated),
            Rotate(asked, kept, self.rope),
            Rotate(latent, kept, self.rope),
            Attend(mixed, asked, latent, None, self.cache, Heads(sizes.heads, 1, kept, sizes.rank), self.spec),
            ProjectHeads(values, mixed, self.to_values),
            self.output.linear(out, values, adds=adds),
        )

    def _queries(self, x: Register, q: Register) -> Operations:
        if self.query_latent is None or self.query_norm is None:
            return (self.query.linear(q, x),)
        latent = Register("query_latent", self.sizes.query_rank)
        return (
            self.query_latent.linear(latent, x),
            *self.query_norm(latent, latent),
            self.query.linear(q, latent),
        )


def read_latent_sizes(reader: ConfigReader, *, query_rank: int) -> LatentSizes:
    """Read the sizes; `query_rank` is the family's default for `q_lora_rank`, and null means no query latent."""
    heads = reader.integer("num_attention_heads", 1, MAX_WIDTH)
    reader.expect("num_key_value_heads", [heads], heads)  # one per query head, all projected from one latent
    rotated = reader.integer("qk_rope_head_dim", 2, MAX_WIDTH, default=64)
    if rotated % 2:
        raise reader.error("qk_rope_head_dim", f"must be even to be rotated in pairs, got {rotated}")
    return LatentSizes(
        heads=heads,
        query_rank=reader.optional_integer("q_lora_rank", 1, MAX_WIDTH, absent=query_rank) or 0,
        rank=reader.integer("kv_lora_rank", 1, MAX_WIDTH, default=512),
        rotated=rotated,
        plain=reader.integer("qk_nope_head_dim", 1, MAX_WIDTH, default=128),
        values=reader.integer("v_head_dim", 1, MAX_WIDTH, default=128),
    )


def read_latent_rope(reader: ConfigReader, sizes: LatentSizes, shape: ModelShape) -> tuple[Rope, AttentionSpec]:
    """The rope of the rotated part, and the scale of scores, which YaRN increases."""
    rope = read_rope(reader, sizes.rotated, shape.max_positions)
    scale = (sizes.rotated + sizes.plain) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        sections = [reader.section(key) for key in ("rope_parameters", "rope_scaling")]
        weights = [each.number("mscale_all_dim", 0.0, 1e6, default=0.0) for each in sections]
        if any(weights):
            scale *= yarn_temperature(rope.scaling.factor, max(weights)) ** 2
    return rope, AttentionSpec(scale)


def bind_latent_attention(
    weights: WeightLoader,
    name: str,
    sizes: LatentSizes,
    hidden: int,
    rope: RotaryTable,
    spec: AttentionSpec,
    *,
    cache: int,
    bias: bool,
    interleaved: bool = True,
) -> LatentAttention:
    """Take the tensors under `name`.

    Args:
        weights: the checkpoint.
        name: prefix of the tensors.
        sizes: sizes of this attention.
        hidden: width of the stream.
        rope: angles of the rotated parts.
        spec: how scores are computed.
        cache: index into `Program.caches`.
        bias: whether projections from and to the stream have biases.
        interleaved: whether the two elements of a rotated pair are neighbours in the checkpoint.
    """
    order = torch.arange(sizes.rotated)
    if interleaved:
        order = order.view(-1, 2).T.flatten()
    direct = sizes.query_rank == 0
    return LatentAttention(
        sizes=sizes,
        query_latent=None
        if direct
        else Projection.bind(weights, f"{name}.q_a_proj", sizes.query_rank, hidden, bias=bias),
        query_norm=None if direct else rms_norm(weights, f"{name}.q_a_layernorm", sizes.query_rank, _EPS),
        query=_bind_query(weights, f"{name}.{'q_proj' if direct else 'q_b_proj'}", sizes, hidden, order),
        latent=_bind_latent(weights, f"{name}.kv_a_proj_with_mqa", sizes, hidden, order, bias=bias),
        latent_norm=rms_norm(weights, f"{name}.kv_a_layernorm", sizes.rank, _EPS),
        to_latent=_bind_to_latent(weights, name, sizes),
        to_values=weights.take_stack(sizes.heads, [(f"{name}.v_b_proj.weight", (sizes.values, sizes.rank))]),
        output=Projection.bind(weights, f"{name}.o_proj", hidden, sizes.heads * sizes.values, bias=bias),
        rope=rope,
        spec=spec,
        cache=cache,
    )


def _bind_query(weights: WeightLoader, name: str, sizes: LatentSizes, hidden: int, order: Tensor) -> Projection:
    """The query projection, with the rotated part of each head first; files have it last."""
    width, inputs = sizes.rotated + sizes.plain, sizes.query_rank or hidden
    of_head = torch.cat((sizes.plain + order, torch.arange(sizes.plain)))
    rows = (torch.arange(sizes.heads)[:, None] * width + of_head).flatten()
    return Projection(_take_rows(weights, name, rows, inputs))


def _bind_latent(
    weights: WeightLoader, name: str, sizes: LatentSizes, hidden: int, order: Tensor, *, bias: bool
) -> Projection:
    """The projection to the rotated part of keys, then the latent; files have the latent first."""
    rows = torch.cat((sizes.rank + order, torch.arange(sizes.rank)))
    biases = weights.take(f"{name}.bias", (sizes.kept,)) if bias else None
    if biases is not None and not biases.is_meta:
        biases = biases[rows]
    return Projection(_take_rows(weights, name, rows, hidden), biases)


def _take_rows(weights: WeightLoader, name: str, rows: Tensor, inputs: int) -> Weight:
    ordered, shape = f"{name}.in_order.weight", (len(rows), inputs)
    weights.split_rows(f"{name}.weight", shape, {ordered: (rows, shape)})
    return weights.take_linear([(ordered, shape)])


def _bind_to_latent(weights: WeightLoader, name: str, sizes: LatentSizes) -> StackedWeight:
    """Take the key up-projection, transposed; if it is fused with the value up-projection, split the two first."""
    heads, plain, values, rank = sizes.heads, sizes.plain, sizes.values, sizes.rank
    keys, parts = f"{name}.k_b_proj.weight", [(f"{name}.k_b_proj.weight", (rank, plain))]
    if weights.has(keys):
        return weights.take_stack(heads, parts)
    k, v = torch.arange(heads * (plain + values)).view(heads, -1).split((plain, values), dim=1)
    weights.split_rows(
        f"{name}.kv_b_proj.weight",
        (heads * (plain + values), rank),
        {
            keys: (k.flatten(), (heads, plain, rank)),
            f"{name}.v_b_proj.weight": (v.flatten(), (heads, values, rank)),
        },
    )
    return weights.take_stack(heads, parts, transposed=True)
