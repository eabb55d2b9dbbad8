"""DeepSeek-V3 and R1, and models of the same architecture: `model_type` "deepseek_v3" (DeepSeek-AI 2024).

The layers of `deepseek_v2`, except that expert scores are sigmoids, and that each expert has a bias that is added to
its score for selection only. If guesses are wanted, a further layer predicts a second token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.kernels.experts import RouterSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_EXPERTS
from penstock.models.deepseek_v2 import build, read_deepseek, read_groups
from penstock.models.qwen3_moe import bind_mixture
from penstock.nn.blocks import MixtureOfExperts
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("scoring_func", ["sigmoid"], "sigmoid")
    reader.expect("topk_method", ["noaux_tc"], "noaux_tc")
    experts = reader.integer("n_routed_experts", 1, MAX_EXPERTS, default=256)
    router = RouterSpec(
        experts=experts,
        top_k=reader.integer("num_experts_per_tok", 1, experts, default=8),
        scoring="sigmoid",
        normalise=reader.boolean("norm_topk_prob", default=True),
        scale=reader.number("routed_scaling_factor", 0.0, 1e6, default=2.5),
    )
    groups = reader.integer("n_group", 1, experts, default=8)
    if groups > 1 and experts // groups < 2:
        raise reader.error(
            "n_group", f"leaves groups of one of {experts} experts, which are ranked by their two highest"
        )
    router = read_groups(reader, router, groups, reader.integer("topk_group", 1, MAX_EXPERTS, default=4))
    interleaved = reader.boolean("rope_interleave", default=True)
    config = read_deepseek(reader, router, shared=1, inner=2048, dense=3, predicting=1)

    def routed(name: str) -> MixtureOfExperts:
        plain = bind_mixture(weights, name, router, config.decoder.shape.hidden_size, config.inner)
        bias = weights.take(f"{name}.gate.e_score_correction_bias", (experts,), torch.float32)
        return replace(plain, selection_bias=bias)

    return build(config, weights, interleaved=interleaved, bind_routed=routed)
