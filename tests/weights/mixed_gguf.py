"""A tiny Llama whose GGUF file mixes kinds of blocks, as llama.cpp's Q4_K_M and similar files do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from block_samples import numbers, random_blocks, set_scales

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 256, 512, 4, 2, 3, 260

Q4_K_M = {
    "": "Q4_K",
    "token_embd": "Q6_K",
    "blk.0.attn_v": "Q6_K",
    "blk.0.ffn_down": "Q6_K",
    "blk.1.attn_v": "Q5_K",
    "blk.1.ffn_up": "IQ4_XS",
    "blk.1.ffn_down": "Q5_0",
    "blk.2.attn_k": "Q8_0",
    "blk.2.attn_q": "F16",
    "blk.2.ffn_gate": "Q3_K",
}
"""Kinds by prefixes of names; more of them differ within a fused projection than in real files."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes in the file's terms."""
    width = HIDDEN // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        found |= {f"{block}{norm}.weight": (HIDDEN,) for norm in ("attn_norm", "ffn_norm")}
        rows = {"attn_q": HIDDEN, "attn_k": width, "attn_v": width, "attn_output": HIDDEN}
        found |= {f"{block}{name}.weight": (count, HIDDEN) for name, count in rows.items()}
        found |= {f"{block}{name}.weight": (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        found[f"{block}ffn_down.weight"] = (HIDDEN, INNER)
    return found


def write_mixed(path: Path, kinds: Mapping[str, str], parts: int = 1) -> Path:
    """Write the model, in `parts` files if more than one; returns the path of the first.

    Args:
        path: where to.
        kinds: the kind of block for each prefix of a tensor's name; "" for all others.
        parts: how many files; each has some of the tensors, and the first has the settings too.
    """
    names = list(shapes())
    paths = [path] if parts == 1 else [part_path(path, number, parts) for number in range(1, parts + 1)]
    for number, part in enumerate(paths):
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            _add_settings(writer)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(names))
        for name in names[number::parts]:
            _add_tensor(writer, name, kinds)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def part_path(path: Path, number: int, parts: int) -> Path:
    """Where part `number`, from 1, of `path` lies."""
    return path.with_name(f"{path.stem}-{number:05}-of-{parts:05}.gguf")


def _add_settings(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*_letters(), "ab", "<s>", "</s>", "<unk>"])
    writer.add_token_types([1] * 257 + [3, 3, 2])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_unk_token_id(259)
    writer.add_add_bos_token(False)


def _letters() -> list[str]:
    """A letter for each byte, as GPT-2 writes them: itself where it can be printed, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def _add_tensor(writer: gguf.GGUFWriter, name: str, kinds: Mapping[str, str]) -> None:
    shape = shapes()[name]
    seed = list(shapes()).index(name)
    if len(shape) == 1:
        writer.add_tensor(name, np.random.default_rng(seed).normal(1, 0.1, shape).astype(np.float32))
        return
    kind = next((kinds[start] for start in kinds if start and name.startswith(start)), kinds[""])
    if kind == "F16":
        drawn = np.random.default_rng(seed).normal(0, shape[1] ** -0.5, shape)
        writer.add_tensor(name, drawn.astype(np.float16))
    else:
        writer.add_tensor(name, sized_blocks(kind, *shape, seed), raw_dtype=gguf.GGMLQuantizationType[kind])


def sized_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Blocks whose products with numbers of about 1 are of about 1 too."""
    blocks = random_blocks(kind, rows, columns, seed)
    set_scales(kind, blocks, 2.0**-7)
    size = np.sqrt(np.mean(numbers(kind, blocks).astype(np.float64) ** 2))
    set_scales(kind, blocks, 2.0**-7 * columns**-0.5 / size)
    return blocks
