"""DeepSeek-V2: `model_type` "deepseek_v2" (DeepSeek-AI 2024).

Attention over a latent, and in place of most MLPs a mixture of experts with shared experts, which compute every token
(DeepSeekMoE). The first layers keep an MLP. Experts are chosen among all, or among the experts of the top groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, DecoderConfig, DecoderParts, read_decoder
from penstock.models.latent_attention import (
    LatentSizes,
    bind_latent_attention,
    read_latent_rope,
    read_latent_sizes,
)
from penstock.models.predictor import PredictorNames, bind_predictor
from penstock.models.qwen3_moe import EXPERT_TENSORS, bind_mixture
from penstock.nn.blocks import Block, GatedMlp, MixtureOfExperts
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.register import Register
from penstock.nn.rope import RotaryTable
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import Conversion, GgufWriting
from penstock.weights.gguf_decoder import heads_and_width, rope_scaling
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.source import TensorSource

__all__ = ["GGUF", "DeepseekConfig", "SharedExperts", "build", "load", "read_deepseek", "read_groups"]


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """The settings that both versions read.

    Attributes:
        decoder: the shared keys; its rope is for the rotated part of heads.
        sizes: sizes of attention.
        spec: how scores are computed.
        router: how experts are chosen.
        dense: number of first layers that have an MLP.
        inner: hidden width of one expert.
        shared: hidden width of all shared experts together; 0 for none.
        bias: whether attention's projections from and to the stream have biases.
        predicting: number of layers after the last that predict further tokens.
    """

    decoder: DecoderConfig
    sizes: LatentSizes
    spec: AttentionSpec
    router: RouterSpec
    dense: int
    inner: int
    shared: int
    bias: bool
    predicting: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedExperts:
    """`routed(x) + shared(x)`."""

    routed: MixtureOfExperts
    shared: GatedMlp

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        return *self.routed(x, out, adds=adds), *self.shared(x, out, adds=True)


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("norm_topk_prob", [False], False)  # transformers and DeepSeek do not agree on what it would do
    reader.expect("scoring_func", ["softmax"], "softmax")
    grouped = reader.expect("topk_method", ["greedy", "group_limited_greedy"], "greedy") == "group_limited_greedy"
    router = RouterSpec(
        experts=(experts := reader.integer("n_routed_experts", 1, MAX_EXPERTS, default=64)),
        top_k=reader.integer("num_experts_per_tok", 1, experts),
        scoring="softmax",
        normalise=False,
        scale=reader.number("routed_scaling_factor", 0.0, 1e6, default=1.0),
    )
    config = read_deepseek(reader, router if not grouped else _with_groups(reader, router), shared=2, inner=1407)
    return build(config, weights, mlp_bias=reader.boolean("mlp_bias", default=False))


def _with_groups(reader: ConfigReader, router: RouterSpec) -> RouterSpec:
    return read_groups(
        reader, router, reader.integer("n_group", 1, router.experts), reader.integer("topk_group", 1, MAX_EXPERTS)
    )


def read_groups(reader: ConfigReader, router: RouterSpec, groups: int, top_groups: int) -> RouterSpec:
    """Add expert groups to a router; they must divide the experts, and the chosen groups must hold `top_k` experts."""
    if router.experts % groups:
        raise reader.error("n_group", f"must divide {router.experts} experts, got {groups}")
    held = router.experts // groups
    if not -(-router.top_k // held) <= top_groups <= groups:
        raise reader.error(
            "topk_group", f"must name up to {groups} groups that hold {router.top_k} experts, got {top_groups}"
        )
    return replace(router, groups=groups, top_groups=top_groups)


def read_deepseek(
    reader: ConfigReader, router: RouterSpec, *, shared: int, inner: int, dense: int = 0, predicting: int = 0
) -> DeepseekConfig:
    """Read the settings that both versions have.

    Args:
        reader: the config.
        router: how experts are chosen.
        shared: the family's default for `n_shared_experts`.
        inner: the family's default for `moe_intermediate_size`.
        dense: the family's default for `first_k_dense_replace`.
        predicting: the family's default for `num_nextn_predict_layers`.
    """
    reader.expect("hidden_act", ["silu"], "silu")
    reader.expect("moe_layer_freq", [1], 1)
    sizes = read_latent_sizes(reader, query_rank=1536)
    decoder = read_decoder(reader, head_dim=sizes.rotated, rope=lambda shape: read_latent_rope(reader, sizes, shape)[0])
    _, spec = read_latent_rope(reader, sizes, decoder.shape)
    width = reader.integer("moe_intermediate_size", 1, MAX_WIDTH, default=inner)
    return DeepseekConfig(
        decoder=replace(decoder, shape=replace(decoder.shape, head_dim=sizes.rotated + sizes.plain)),
        sizes=sizes,
        spec=spec,
        router=router,
        dense=reader.integer("first_k_dense_replace", 0, MAX_LAYERS, default=dense),
        inner=width,
        shared=width * reader.integer("n_shared_experts", 0, MAX_EXPERTS, default=shared),
        bias=reader.boolean("attention_bias", default=False),
        predicting=reader.integer("num_nextn_predict_layers", 0, MAX_LAYERS, default=predicting),
    )


def build(
    config: DeepseekConfig,
    weights: WeightLoader,
    *,
    interleaved: bool = True,
    mlp_bias: bool = False,
    bind_routed: Callable[[str], MixtureOfExperts] | None = None,
) -> Program:
    """Build the model.

    Args:
        config: its settings.
        weights: the checkpoint.
        interleaved: see `bind_latent_attention`.
        mlp_bias: whether MLPs and shared experts have biases.
        bind_routed: takes the routed experts under a name; None for experts without selection biases.
    """
    parts, sizes, shape = DecoderParts(config.decoder, weights), config.sizes, config.decoder.shape
    rope = RotaryTable.build(config.decoder.rope, sizes.rotated, shape.max_positions, weights.device)
    predictor = _find_predictor(config, weights)

    def experts(name: str) -> Block:
        if bind_routed is None:
            routed = bind_mixture(weights, name, config.router, shape.hidden_size, config.inner)
        else:
            routed = bind_routed(name)
        if not config.shared:
            return routed
        return SharedExperts(routed, parts.mlp(f"{name}.shared_experts", bias=mlp_bias, inner_size=config.shared))

    def layer(index: int, name: str, cache: int) -> Operations:
        attention = bind_latent_attention(
            weights,
            f"{name}.self_attn",
            sizes,
            shape.hidden_size,
            rope,
            config.spec,
            cache=cache,
            bias=config.bias,
            interleaved=interleaved,
        )
        mlp = parts.mlp(f"{name}.mlp", bias=mlp_bias) if index < config.dense else experts(f"{name}.mlp")
        return parts.pre_norm_layer(name, attention, mlp)

    program = parts.program(lambda index, name: layer(index, name, index))
    program = replace(program, caches=(sizes.cache,) * shape.num_layers)
    if predictor is None:
        return program
    own = layer(shape.num_layers, predictor.layer, 0)
    return replace(program, predictor=bind_predictor(parts, predictor, program, own))


def _find_predictor(config: DeepseekConfig, weights: WeightLoader) -> PredictorNames | None:
    """The layer after the last, which predicts a second token; None if it is missing, not wanted, or one of several.

    Checkpoints repeat the model's embedding and head beside it; both equal the model's own.
    """
    layers = config.decoder.shape.num_layers
    block = f"model.layers.{layers}"
    names = PredictorNames(block, *(f"{block}.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm")))
    if config.predicting == 1 and weights.predicts and weights.has(f"{names.joined}.weight"):
        for repeated in ("embed_tokens", "shared_head.head"):
            weights.ignore(f"{block}.{repeated}.weight")
        return names
    for extra in range(config.predicting):
        weights.leave_out(f"model.layers.{layers + extra}.")
    return None


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """The settings of a GGUF file of V2 or V3; V3 has sigmoid scores."""
    heads, width = heads_and_width(keys)
    rotated = keys.size("rope.dimension_count")
    # Files with separate key and value up-projections store latent widths here, and head widths under `_mla` keys.
    apart = keys.has("attention.key_length_mla")
    key_width = keys.size("attention.key_length_mla" if apart else "attention.key_length")
    values = keys.size("attention.value_length_mla" if apart else "attention.value_length")
    rank = keys.size("attention.kv_lora_rank")
    if apart:
        for key, wanted in (("attention.key_length", rank + rotated), ("attention.value_length", rank)):
            if keys.size(key, wanted) != wanted:
                raise keys.fail(key, f"{keys.size(key)} differs from the latent's {wanted}")
    if rotated >= key_width:
        raise keys.fail("rope.dimension_count", f"{rotated} of {key_width} leave nothing of a key that is not rotated")
    if keys.size("attention.head_count_kv", heads) not in (1, heads):
        raise keys.fail("attention.head_count_kv", f"must be 1 or {heads}")
    sigmoid = keys.size("expert_gating_func", 1) == 2
    settings = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_hidden_layers": keys.size("block_count"),
        "hidden_size": width,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": keys.size("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_width - rotated,
        "v_head_dim": values,
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "first_k_dense_replace": _leading(keys),
        "num_nextn_predict_layers": 0,
    }
    return settings | _gguf_experts(keys, sigmoid=sigmoid) | _gguf_scaling(keys, rotated)


def _leading(keys: GgufKeys) -> int:
    """Number of first layers that have an MLP."""
    found = keys.sizes("leading_dense_block_count", 1)[0] if keys.has("leading_dense_block_count") else 0
    return int(found)


def _gguf_experts(keys: GgufKeys, *, sigmoid: bool) -> dict[str, Any]:
    gating = keys.size("expert_gating_func", 1)
    if gating not in (1, 2):
        raise keys.fail("expert_gating_func", f"{gating} is neither a softmax (1) nor sigmoids (2)")
    normalised = bool(keys.get("expert_weights_norm")) if keys.has("expert_weights_norm") else False
    if normalised and not sigmoid:
        raise keys.fail("expert_weights_norm", "is not implemented for a softmax")
    groups, top_groups = keys.size("expert_group_count", 1), keys.size("expert_group_used_count", 1)
    settings = {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.sizes("expert_shared_count", 1)[0] if keys.has("expert_shared_count") else 0,
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": top_groups,
        "norm_topk_prob": normalised,
    }
    if not sigmoid:
        settings["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return settings


def _gguf_scaling(keys: GgufKeys, rotated: int) -> dict[str, Any]:
    """RoPE scaling; files store a tenth of YaRN's `mscale_all_dim` under a key of this architecture."""
    weight = (
        keys.real("rope.scaling.yarn_log_multiplier") * 10.0 if keys.has("rope.scaling.yarn_log_multiplier") else 0.0
    )
    scaling = rope_scaling(keys, rotated, beside=("yarn_log_multiplier",))
    if not scaling:
        return {}
    if weight and scaling["rope_type"] == "yarn":
        scaling |= {"mscale": weight, "mscale_all_dim": weight}  # files omit `mscale`, which equals the other
    return {"rope_scaling": scaling}


def _file_settings(config: Mapping[str, Any], _: TensorSource) -> dict[str, Any]:
    """The keys that `_gguf_settings` reads, for separate key and value up-projections."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    weight, groups = rope.get("mscale_all_dim"), config.get("n_group")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.value_length": rank,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_count": config.get("n_routed_experts"),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "expert_group_count": groups,
        "expert_group_used_count": config.get("topk_group") if groups else None,
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_weights_norm": True if config.get("norm_topk_prob") else None,
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * weight if weight else None,
    }


def _conversions(config: Mapping[str, Any]) -> list[Conversion]:
    """Split the key and value up-projections, the first transposed."""
    heads, width = config["num_attention_heads"], config["qk_nope_head_dim"]
    parts: dict[str, Callable[[Tensor], Tensor]] = {
        f"{_ATTENTION}.k_b_proj.weight": lambda each: each.unflatten(0, (heads, -1))[:, :width].mT,
        f"{_ATTENTION}.v_b_proj.weight": lambda each: each.unflatten(0, (heads, -1))[:, width:],
    }
    return [Conversion(f"{_ATTENTION}.kv_b_proj.weight", parts)]


_LAYER = "model.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"

GGUF = GgufDialect(
    architecture="deepseek2",
    model_type="deepseek_v2",
    tensors={
        **{
            name: theirs
            for name, theirs in EXPERT_TENSORS.items()
            if name not in ("blk.{layer}.attn_k", "blk.{layer}.attn_v")
        },
        "blk.{layer}.ffn_gate": f"{_MLP}.gate_proj",
        "blk.{layer}.ffn_up": f"{_MLP}.up_proj",
        "blk.{layer}.ffn_down": f"{_MLP}.down_proj",
        "blk.{layer}.attn_q_a": f"{_ATTENTION}.q_a_proj",
        "blk.{layer}.attn_q_a_norm": f"{_ATTENTION}.q_a_layernorm",
        "blk.{layer}.attn_q_b": f"{_ATTENTION}.q_b_proj",
        "blk.{layer}.attn_kv_a_mqa": f"{_ATTENTION}.kv_a_proj_with_mqa",
        "blk.{layer}.attn_kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
        "blk.{layer}.attn_kv_b": f"{_ATTENTION}.kv_b_proj",  # in older files
        "blk.{layer}.attn_k_b": f"{_ATTENTION}.k_b_proj",
        "blk.{layer}.attn_v_b": f"{_ATTENTION}.v_b_proj",
        "blk.{layer}.ffn_gate_shexp": f"{_MLP}.shared_experts.gate_proj",
        "blk.{layer}.ffn_up_shexp": f"{_MLP}.shared_experts.up_proj",
        "blk.{layer}.ffn_down_shexp": f"{_MLP}.shared_experts.down_proj",
    },
    metadata=_gguf_settings,
    whole={"blk.{layer}.exp_probs_b.bias": f"{_MLP}.gate.e_score_correction_bias"},
    writing=GgufWriting(_file_settings, _conversions),
)
"""V3's files are read with this dialect too."""
