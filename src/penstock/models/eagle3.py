"""EAGLE-3 heads: a layer that predicts the second token from three of a model's hidden states (Li et al. 2025).

A head is a checkpoint of its own, trained for one model. There are two layouts: one of the authors, SGLang and
SpecForge (`midlayer.*`), and one of vLLM's speculators (`layers.0.*`, settings under `transformer_layer_config`). A
head may know only a part of the vocabulary: for each output, `d2t` has the token's id minus the output's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.contract.model import KvCacheSpec
from penstock.kernels.linear import Weight
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WINDOW, DecoderParts, read_decoder
from penstock.nn.blocks import Projection, residual
from penstock.nn.operations import Embed, Operations, Register, copied
from penstock.nn.program import OUT, TAPS, Head, Predictor, Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["is_eagle3", "load_eagle3", "tapped_layers"]

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OF_SPECULATORS = "speculators_model_type"
_OF_LAYER = "transformer_layer_config"


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head."""
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    return config.get(_OF_SPECULATORS) == "eagle3" or any("eagle3" in str(each).lower() for each in architectures)


def tapped_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers, out of `layers`, whose inputs the head reads; `layers` itself stands for the last layer's output.

    Configs of speculators count in the same way; other configs name the layers whose outputs are read.
    """
    behind = 0 if reader.is_set(_OF_SPECULATORS) else 1
    for of in (reader, reader.section("eagle_config")):
        ids = of.integers(_LAYER_IDS, 0, layers - behind)
        if ids:
            return tuple(each + behind for each in ids)
    if layers < 4:
        raise reader.error(_LAYER_IDS, f"is missing, and a model of {layers} layers has no usual ones")
    return 2, layers // 2, layers - 3


def load_eagle3(reader: ConfigReader, weights: WeightLoader, target: Program) -> Predictor:
    """Build a head from its tensors.

    Args:
        reader: the head's config.
        weights: the head's tensors.
        target: the model that the head was trained for.

    Raises:
        ModelFileError: a value is not implemented, a tensor is missing, or the head is for another model.
    """
    settings = reader.section(_OF_LAYER) if reader.is_set(_OF_LAYER) else reader
    settings.expect("hidden_act", ["silu"], "silu")
    settings.expect("num_hidden_layers", [1], 1)
    taps = len(tapped_layers(reader, len(target.layers))) * target.shape.hidden_size
    slides = settings.boolean("use_sliding_window", default=True)
    window = settings.optional_integer("sliding_window", 1, MAX_WINDOW) if slides else None
    config = read_decoder(settings, windows=(window,))
    known, width = target.shape.vocab_size, config.shape.hidden_size
    if config.shape.vocab_size != known:
        raise settings.error("vocab_size", f"is {config.shape.vocab_size}, and that of the model to guess for {known}")
    if not weights.has("fc.weight"):
        raise reader.error("architectures", "the head has no fc.weight: EAGLE and EAGLE-2 are not implemented")
    normed_first = reader.boolean("norm_before_residual", default=False)
    head = _head(reader, weights, target, width)
    joined = Projection.bind(weights, "fc", width, taps, bias=weights.has("fc.bias"))
    return Predictor(
        table=_table(reader, weights, target, width),
        program=_program(DecoderParts(config, weights), head, normed_first=normed_first),
        joined=joined.weight,
        joined_bias=joined.bias,
        vocabulary=_vocabulary(reader, weights, known),
    )


def _program(parts: DecoderParts, head: Head, *, normed_first: bool) -> Program:
    """The head's layer. With `normed_first`, the layer adds to the normed hidden state."""
    shape, stream, has = parts.config.shape, parts.stream, parts.weights.has
    width, name = shape.hidden_size, "midlayer" if has("midlayer.input_layernorm.weight") else "layers.0"
    pair = Register("pair", 2 * width)
    embedded, hidden = pair.columns(0, width), pair.columns(width, width)
    embedding_norm, hidden_norm = parts.norm(f"{name}.input_layernorm"), parts.norm(f"{name}.hidden_norm")
    begin: Operations = (copied(stream, hidden), *hidden_norm(hidden, hidden))
    if normed_first:
        begin = (*hidden_norm(hidden, hidden), copied(stream, hidden))
    attention = parts.attention(
        f"{name}.self_attn",
        0,
        qkv_bias=has(f"{name}.self_attn.q_proj.bias"),
        output_bias=has(f"{name}.self_attn.o_proj.bias"),
        inputs=2 * width,
    )
    mlp = parts.mlp(f"{name}.mlp", bias=has(f"{name}.mlp.gate_proj.bias"))
    before = parts.norm(f"{name}.post_attention_layernorm")
    return Program(
        shape=shape,
        embedding=(*embedding_norm(embedded, embedded), *begin),
        layers=((*attention(pair, stream, adds=True), *residual(stream, mlp, before=before)),),
        final=(copied(Register(TAPS, width), stream), *parts.norm("norm")(stream, Register(OUT, width))),
        head=head,
        caches=(KvCacheSpec(shape.num_kv_heads, shape.head_dim, parts.config.windows[0]),),
        given=(pair,),
        taps=Register(TAPS, width),
    )


def _table(reader: ConfigReader, weights: WeightLoader, target: Program, width: int) -> Weight:
    """The head's embedding, or the model's if it has none."""
    if weights.has("embed_tokens.weight"):
        return weights.take_table("embed_tokens.weight", (target.shape.vocab_size, width))
    looked_up = target.embedding[0]
    assert isinstance(looked_up, Embed), "a stream begins as an embedding"
    return _fitting(reader, looked_up.table, width, "embed_tokens.weight")


def _head(reader: ConfigReader, weights: WeightLoader, target: Program, width: int) -> Head:
    """Its `lm_head`, or the model's if it has none."""
    known = _known(reader, target.shape.vocab_size)
    if weights.has("lm_head.weight"):
        return Head(weights.take_linear([("lm_head.weight", (known, width))]))
    if known < target.shape.vocab_size:
        raise reader.error("draft_vocab_size", f"is {known}, and lm_head.weight, which makes their logits, is missing")
    return Head(_fitting(reader, target.head.weight, width, "lm_head.weight"))


def _fitting(reader: ConfigReader, of_model: Weight, width: int, name: str) -> Weight:
    if of_model.inputs != width:
        raise reader.error("hidden_size", f"is {width}, and the model's {of_model.inputs}: then it needs {name}")
    return of_model


def _known(reader: ConfigReader, vocab_size: int) -> int:
    """How many tokens the head knows."""
    return reader.integer("draft_vocab_size", 1, vocab_size, default=vocab_size)


def _vocabulary(reader: ConfigReader, weights: WeightLoader, vocab_size: int) -> Tensor | None:
    """The token of each of its logits; None for all, in order."""
    weights.ignore("t2d")  # the same information, by the model's tokens
    count = _known(reader, vocab_size)
    if not weights.has("d2t"):
        if count < vocab_size:
            raise reader.error(
                "draft_vocab_size", f"is {count} of {vocab_size} tokens, and d2t, which names them, is missing"
            )
        return None
    shift = weights.take("d2t", (count,), torch.int64)
    ids = torch.arange(count, device=shift.device) + shift
    if not ids.is_meta and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise reader.error("d2t", f"names a token outside of the {vocab_size} of the model")
    return ids
