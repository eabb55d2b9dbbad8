"""EAGLE-3 heads to test with: random ones for tiny models, and what transformers' modules compute with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS = 4
"""Of the models that they are for: the fewest that have the usual layers to read."""


def write_eagle3(directory: Path, target: Path, *, known: int = 0, speculators: bool = False, **settings: Any) -> Path:
    """Write a head for the model in `target`.

    Args:
        directory: where to write it.
        target: a Llama's directory.
        known: how many tokens its head knows, every second one; 0 for all, with the model's own head.
        speculators: in the layout of vLLM's speculators, not that of the authors.
        settings: further settings of its config.
    """
    model = json.loads((target / "config.json").read_text())
    own = {key: model[key] for key in ("hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")}
    own |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    own |= {"model_type": "llama", "intermediate_size": 40}
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": known or own["vocab_size"], **settings}
    if speculators:
        head |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        head |= {"transformer_layer_config": own}
    else:
        head |= own
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "config.json").write_text(json.dumps(head))
    torch.manual_seed(23)
    width, heads, keys, inner = own["hidden_size"], 4 * 16, 2 * 16, own["intermediate_size"]
    layer = "layers.0" if speculators else "midlayer"
    ids = settings.get("eagle_aux_hidden_state_layer_ids") or [0, 0, 0]
    shapes = {
        "fc": (width, len(ids) * width),
        **{
            f"{layer}.self_attn.{each}_proj": (rows, 2 * width)
            for each, rows in zip("qkv", (heads, keys, keys), strict=True)
        },
        f"{layer}.self_attn.o_proj": (width, heads),
        **{f"{layer}.mlp.{each}_proj": (inner, width) for each in ("gate", "up")},
        f"{layer}.mlp.down_proj": (width, inner),
    }
    tensors = {f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = 1 + torch.randn(width) * 0.1
    tensors["norm.weight"] = 1 + torch.randn(width) * 0.1
    if known:
        ids = torch.arange(known) * 2
        tensors["d2t"] = ids - torch.arange(known)
        tensors["t2d"] = torch.zeros(own["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
        tensors["lm_head.weight"] = torch.randn(known, width) * width**-0.5
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


class Eagle3:
    """A head put together from transformers' modules, after the paper and the authors' code.

    Args:
        directory: the head.
        model: its model, as transformers loads it.
        taps: which of the model's `hidden_states` it reads.
    """

    def __init__(self, directory: Path, model: Any, taps: list[int]) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        settings = json.loads((directory / "config.json").read_text())
        config = LlamaConfig(
            **{**settings, **settings.get("transformer_layer_config", {})}, attn_implementation="eager"
        )
        self.normed_first = settings.get("norm_before_residual", False)
        self.tensors, self.model, self.taps = load_file(directory / "model.safetensors"), model, taps
        prefix = "layers.0." if "layers.0.mlp.up_proj.weight" in self.tensors else "midlayer."
        own = {name[len(prefix) :]: each for name, each in self.tensors.items() if name.startswith(prefix)}
        layer = LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = own[f"self_attn.{name}.weight"]
            setattr(layer.self_attn, name, torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))

        def norm(weight: torch.Tensor) -> LlamaRMSNorm:
            made = LlamaRMSNorm(len(weight), eps=config.rms_norm_eps)
            made.load_state_dict({"weight": weight})
            return made

        self.hidden_norm, self.norm = norm(own.pop("hidden_norm.weight")), norm(self.tensors["norm.weight"])
        layer.load_state_dict(own)
        self.layer, self.rotary = layer.eval(), LlamaRotaryEmbedding(config)

    def states(self, tokens: list[int]) -> torch.Tensor:
        """What the head reads of the model, `[T, width]`."""
        with torch.no_grad():
            states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[each][0] for each in self.taps], 1)

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states `[T, H]` made of them."""
        return states @ self.tensors["fc.weight"].T

    def predict(self, hidden: torch.Tensor, following: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[T, known]`, and the hidden states `[T, H]` to go on from, for positions from 0.

        Args:
            hidden: `[T, H]`.
            following: the token after each position.
        """
        with torch.no_grad():
            layer, count = self.layer, len(hidden)
            embedded = self.model.get_input_embeddings()(torch.tensor(following))
            normed = self.hidden_norm(hidden)
            places = torch.arange(count)[None]
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            x = torch.cat([layer.input_layernorm(embedded), normed], 1)[None]
            angles = self.rotary(x, places)
            mixed = layer.self_attn(x, position_embeddings=angles, attention_mask=mask)[0][0]
            out = (normed if self.normed_first else hidden) + mixed
            out = out + layer.mlp(layer.post_attention_layernorm(out))
            head = self.tensors.get("lm_head.weight", self.model.get_output_embeddings().weight)
            return self.norm(out) @ head.T, out
